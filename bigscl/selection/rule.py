"""The selection at the end of an epoch: how many positives each class expects, and which images they are."""

# Shapes: L classes.

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bigscl.config import RankBy
from bigscl.selection import ranking
from bigscl.selection.class_ratios import at_level, class_ratios
from bigscl.selection.selection import Selection, expected_counts, selection_of, surest_counts
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

    asserted: float | None = None
    """Share of the unnamed expected positives whose cut is wanted too, the surest first."""

    @property
    def named_first(self) -> bool:
        """Whether annotated positives are always expected: the paper ranks by the score alone."""
        return self.per_class or self.given_ratios is not None or self.rank_by == "spatial"

    def completed(self, selection: Selection) -> Selection:
        """Return a committed selection; before the first one no expected positive is asserted."""
        if self.asserted is None or selection.surest is not None:
            return selection
        return replace(selection, surest=Selection.none(len(selection.tau)))

    def select(
        self,
        chunks: Iterable[ranking.Chunk],
        annotations: Annotations,
        labels: NDArray[np.int64],
        ratios: NDArray[np.float64] | None,
        ranks: Transport,
    ) -> tuple[Selection, NDArray[np.float64] | None]:
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
        surest = None if self.asserted is None else surest_counts(counts, num_expected, self.asserted)
        if self.named_first:
            chunks = ranking.named_first(chunks, annotations)
        named = annotations if self.per_class else None
        cuts = ranking.rank(chunks, num_expected, ranks, num_surest=surest, annotations=named)
        if cuts.positives is not None:
            ratios = class_ratios(k, counts, cuts.positives)
        return selection_of(replace(cuts, named_first=self.named_first)), ratios


def selection_rule(
    positives_per_image: float | None,
    *,
    start_epoch: int,
    rank_by: RankBy,
    k_per_class: bool | NDArray[np.float64],
    asserted: float | None,
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
        asserted=asserted,
    )
