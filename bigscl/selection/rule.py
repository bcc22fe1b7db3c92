"""The selection at the end of an epoch: how many positives each class expects, and which images they are."""

# Shapes: L classes.

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bigscl.config import RankBy
from bigscl.selection import ranking
from bigscl.selection.class_ratios import at_level, class_ratios
from bigscl.selection.thresholds import Thresholds, expected_counts, pseudo_positive_counts
from bigscl.store import Annotations, Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionRule:
    """How expected positives are selected."""

    positives_per_image: float
    """K, the expected positives for each label."""
    start_epoch: int = 1
    """First epoch that has expected positives."""
    rank_by: RankBy = "score"
    per_class: bool = False
    """Whether each class has a K of its own, estimated from the memory; K is then their mean."""
    given_ratios: NDArray[np.float64] | None = None
    """K of each class if it is known, up to the level: their mean becomes K."""

    pseudo_positive_share: float | None = None
    """Share of the expected positives that are not given, the highest scores, which get thresholds too."""

    @property
    def given_first(self) -> bool:
        """Whether given positives are always expected: the paper ranks by the score alone."""
        return self.per_class or self.given_ratios is not None or self.rank_by == "spatial"

    def completed(self, thresholds: Thresholds) -> Thresholds:
        """Return committed thresholds; before the first ones there are no pseudo-positives."""
        if self.pseudo_positive_share is None or thresholds.pseudo_positives is not None:
            return thresholds
        return replace(thresholds, pseudo_positives=Thresholds.none(len(thresholds.score)))

    def select(
        self,
        chunks: Iterable[ranking.Chunk],
        annotations: Annotations,
        labels: NDArray[np.int64],
        ratios: NDArray[np.float64] | None,
        ranks: Transport,
    ) -> tuple[Thresholds, NDArray[np.float64] | None]:
        """Return the selection over the chunks of all ranks, and K of each class for the next one.

        `chunks` are what samples are ranked by: each rank gives those of its own shards. `labels` are those
        of each class, without what only answers named. `ratios` are K of each class by the selection before;
        without them every class has K.
        """
        # A run that was resumed without `per_class` has ratios from before.
        ratios = ratios if self.per_class else None
        counts, k = annotations.counts(), self.positives_per_image
        has_answers = bool((labels != counts).any())
        used = np.full(len(counts), k) if ratios is None else ratios
        if self.given_ratios is not None:
            used = at_level(self.given_ratios, labels, k)
        elif has_answers:
            used = at_level(used, labels, k)
        num_expected = expected_counts(labels, used)
        if has_answers:
            num_expected = np.maximum(num_expected, counts)
        share = self.pseudo_positive_share
        fewer = None if share is None else pseudo_positive_counts(counts, num_expected, share)
        if self.given_first:
            chunks = ranking.given_first(chunks, annotations)
        named = annotations if self.per_class else None
        thresholds = ranking.select(
            chunks, num_expected, ranks, num_pseudo_positives=fewer, annotations=named
        )
        if thresholds.positives is not None:
            ratios = class_ratios(k, counts, thresholds.positives)
        return replace(thresholds, given_first=self.given_first), ratios


def selection_rule(
    positives_per_image: float | None,
    *,
    start_epoch: int,
    rank_by: RankBy,
    k_per_class: bool | NDArray[np.float64],
    pseudo_positive_share: float | None,
) -> SelectionRule | None:
    """Return the rule for K; None without K, when nothing is selected."""
    if positives_per_image is None:
        return None
    return SelectionRule(
        positives_per_image=positives_per_image,
        start_epoch=start_epoch,
        rank_by=rank_by,
        per_class=k_per_class is True,
        given_ratios=None if isinstance(k_per_class, bool) else k_per_class,
        pseudo_positive_share=pseudo_positive_share,
    )
