"""How far to trust mined labels, without full labels: from given labels that were hidden from training.

Of some images one given label is hidden (`data.canaries`). How many of these labels the memory finds is not
yet how many missing ones it finds: most of them are the only thing that an image shows, and easier. So their
values calibrate the others. A pair of image and class that no label names, with value s, is positive with
probability

    p = sigmoid(a logit(s) + b of the class)

where the b of a class makes as many pairs positive as are expected of it; where a label is hidden more are,
so there all b are higher by one number. Given such p, an image with m positives has named each of them with
probability 1/m, which gives the likelihood of the hidden labels; `a`, how well the values separate, maximises
it. Missing labels are only in images with several positives, hidden ones mostly in images with one, which is
more prominent: `a` of missing labels is 0.87 of that (`OF_MISSING`, by the truth of two datasets), and no
more of them are found than of hidden ones. The precision of the mined labels is the mean of their p, their
recall the sum over all that are missing.

It assumes that labels are drawn uniformly from what an image shows, that K is right for every class, and that
classes of an image are independent given their values. docs/choosing-k.md has it beside the truth.
"""

# Shapes: n images, L classes.

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigscl.selection.ranking import Chunk
from bigscl.selection.thresholds import Thresholds
from bigscl.store import Annotations, Array, KeptScores, Ragged, Ranked, Transport, on_rank_zero

Floats = NDArray[np.float64]
BOUND = 0.3
"""Precision below which mined labels are not to be trusted."""
FEWEST = 30
"""Hidden labels below which nothing can be said."""
MOST_HIDDEN, MOST_LABELLED = 1000, 2000
"""Images that are looked at: enough for an error of two points, a few seconds with 1,000 classes."""
SLOPES = np.geomspace(0.2, 5, 61)
"""Values of `a` that are tried."""
OF_MISSING = (0.78, 0.87, 0.96)
"""Slope of missing labels as a part of that of hidden ones: lowest, usual and highest on VOC and MS-COCO."""
LARGEST_LOGIT, BINS = 14.0, 128
# Half the 95% quantile of chi-squared with one degree of freedom: the interval of a profile likelihood.
DROP = 1.92
NODES, WEIGHTS = (
    (part + shift) / 2 for part, shift in zip(np.polynomial.legendre.leggauss(4), (1, 0), strict=True)
)
GROUPS = ("rare", "middle", "frequent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A third of the classes, by how many labels they have."""

    name: str
    classes: int
    precision: float
    """NaN if none of their labels is mined."""
    hidden: int
    found: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How many of the mined labels are right, estimated without full labels."""

    hidden: int
    """Hidden labels."""
    found: int
    """Those of them that are expected positives."""
    precision: float
    """Share of the mined labels that are right."""
    low: float
    high: float
    """Its 95% interval over draws of hidden labels, with the spread of OF_MISSING; K is taken to be right."""
    recall: float
    """Share of the missing positives that are mined."""
    epochs: int
    """Epochs so far."""
    images_per_class: float
    groups: tuple[Group, ...] = ()

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Trust":
        numbers = {name: _number(value) for name, value in values.items() if name != "groups"}
        groups = tuple(
            Group(**{name: one[name] if name == "name" else _number(one[name]) for name in one})
            for one in values["groups"]
        )
        return cls(**numbers, groups=groups)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; null for what is unknown."""
        values = asdict(self)
        for one in (values, *values["groups"]):
            one |= {name: _rounded(value) for name, value in one.items() if isinstance(value, float)}
        return values | {"groups": list(values["groups"])}

    @property
    def is_known(self) -> bool:
        return self.hidden >= FEWEST and not np.isnan(self.precision)

    @property
    def is_enough(self) -> bool:
        """Whether the mined labels can be used, by the lower end of the interval."""
        return self.is_known and self.low >= BOUND

    def __str__(self) -> str:
        told = f"{self.found} of {self.hidden} hidden labels found"
        seen = f"{self.epochs} epochs, {self.images_per_class:,.0f} images per class"
        if not self.is_known:
            return f"mined labels: trust unknown, {told}: hide at least {FEWEST} (data.canaries)"
        share = (
            f"about {self.precision:.0%} right ({self.low:.0%} to {self.high:.0%}), "
            f"{self.recall:.0%} of the missing ones found; {told}"
        )
        return (
            f"mined labels: {share}"
            if self.is_enough
            else f"mined labels: too early to trust: {seen}; {share}"
        )

    def metrics(self) -> dict[str, Any]:
        values = self.to_json()
        return {
            "hidden_labels": self.hidden,
            "hidden_labels_found": self.found,
            **{f"mined_{name}": values[name] for name in ("precision", "recall")},
            "mined_precision_95": [values["low"], values["high"]],
        }

    def of_groups(self) -> list[str]:
        return [
            f"{one.name} ({one.classes} classes): "
            + ("none mined" if np.isnan(one.precision) else f"about {one.precision:.0%} right")
            + f", {one.found} of {one.hidden} hidden labels found"
            for one in self.groups
        ]

    def by_class(self, labels: NDArray[np.int64]) -> Floats:
        """Return the precision of each class's group, [L]; NaN if unknown. `labels` counts all labels."""
        precision = np.full(len(labels), np.nan)
        for group, classes in zip(self.groups, _thirds(labels), strict=True):
            precision[classes] = group.precision if self.is_known else np.nan
        return precision


def _number(value: Any) -> Any:
    return float("nan") if value is None else value


def _rounded(value: float) -> float | None:
    return None if np.isnan(value) else round(value, 4)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Images:
    """Images with what their classes are ranked by, in 0 to 1."""

    values: Floats
    """[n,L]"""
    is_open: NDArray[np.bool_]
    """[n,L]: pairs that training knows nothing about."""
    mined: NDArray[np.bool_]
    """[n,L]: open pairs that are expected positives."""
    num_positives: Floats
    """[L]: positives that are expected among the open pairs of each class."""


def estimate(
    canaries: Images,
    hidden: NDArray[np.int64],
    labelled: Images,
    *,
    labels: NDArray[np.int64],
    epochs: int,
    num_samples: int,
) -> Trust:
    """Return how far to trust labels mined in `labelled`; `hidden` [n] are those of the canaries."""
    found = canaries.mined[np.arange(len(hidden)), hidden]
    images, classes = np.nonzero(labelled.mined)
    known = {"precision": np.nan, "low": np.nan, "high": np.nan, "recall": 0.0}
    right = np.empty(0)
    if len(classes) and len(hidden):
        logits = _logits(labelled.values)
        histograms = _histograms(logits, labelled.is_open)

        def offsets(slope: float) -> Floats:
            return _offsets(histograms, CENTERS * slope, labelled.num_positives)

        def mined_probabilities(slope: float) -> Floats:
            return _sigmoid(slope * logits[images, classes] + offsets(slope)[classes])

        likelihoods = np.array([_log_likelihood(canaries, hidden, each, offsets(each)) for each in SLOPES])
        plausible = SLOPES[likelihoods > likelihoods.max() - DROP]
        lowest, usual, highest = OF_MISSING
        right = mined_probabilities(usual * SLOPES[likelihoods.argmax()])
        # Missing labels are not easier than hidden ones: no more of them are found.
        missing = max(labelled.num_positives.sum(), 1e-9)
        most = missing / len(classes) * _wilson(int(found.sum()), len(hidden))
        right *= min(1.0, most[1] / max(right.mean(), 1e-9))
        known = {
            "precision": right.mean(),
            "low": min(mined_probabilities(lowest * plausible.min()).mean(), most[0], right.mean()),
            "high": min(mined_probabilities(highest * plausible.max()).mean(), most[2]),
            "recall": right.sum() / missing,
        }
    return Trust(
        hidden=len(hidden),
        found=int(found.sum()),
        **{name: float(value) for name, value in known.items()},
        epochs=epochs,
        images_per_class=num_samples / len(labels),
        groups=_groups(labels, hidden, found, classes, right),
    )


def _wilson(found: int, count: int) -> Floats:
    """Return the lower end of the 95% interval of a share, the share, and the upper end."""
    share, z = found / count, 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * np.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return np.array([middle - half, share, middle + half])


def _thirds(labels: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return the classes of each of GROUPS, by the number of labels of each class."""
    return np.array_split(np.argsort(labels, kind="stable"), len(GROUPS))


def _groups(
    labels: NDArray[np.int64],
    hidden: NDArray[np.int64],
    found: NDArray[np.bool_],
    mined: NDArray[np.int64],
    probabilities: Floats,
) -> tuple[Group, ...]:
    groups = []
    for name, classes in zip(GROUPS, _thirds(labels), strict=True):
        own, is_hidden = np.isin(mined, classes), np.isin(hidden, classes)
        known = len(probabilities) and own.any()
        precision = float(probabilities[own].mean()) if known else float("nan")
        counts = int(is_hidden.sum()), int(found[is_hidden].sum())
        groups.append(
            Group(name=name, classes=len(classes), precision=precision, hidden=counts[0], found=counts[1])
        )
    return tuple(groups)


def _log_likelihood(canaries: Images, hidden: NDArray[np.int64], slope: float, offsets: Floats) -> float:
    """Return the log-likelihood of the hidden labels, each drawn uniformly from the positives of its image.

    With independent classes the hidden one is h with probability `p_h E[1 / (1 + number of others)]`: `p_h`
    times the integral over t in 0 to 1 of the product over the others of `1 - p + p t`, relative to images
    that have a positive at all.
    """
    logits = slope * _logits(canaries.values) + offsets
    centers = np.linspace(logits.min(), logits.max(), BINS)
    step = max(centers[1] - centers[0], 1e-9)
    counts = np.bincount(((logits[canaries.is_open] - centers[0]) / step).round().astype(int), minlength=BINS)
    shift = _offsets(counts[None], centers, canaries.num_positives.sum(keepdims=True))
    p = np.where(canaries.is_open, _sigmoid(logits + shift), 0.0)
    images = np.arange(len(hidden))
    own = p[images, hidden]
    nothing = np.exp(np.log1p(-p).sum(1))
    p[images, hidden] = 0
    share = sum(
        weight * np.exp(np.log1p(-p * (1 - t)).sum(1)) for t, weight in zip(NODES, WEIGHTS, strict=True)
    )
    return float(np.log(np.maximum(own * share / np.maximum(1 - nothing, 1e-9), 1e-12)).sum())


def _offsets(counts: NDArray[np.int64], logits: Floats, totals: Floats) -> Floats:
    """Return b of each row of counts, for which counts @ sigmoid(logits + b) is the row's total."""
    low, high = np.full((2, len(counts)), [[-80.0], [80.0]])
    for _ in range(30):
        middle = (low + high) / 2
        too_many = (counts * _sigmoid(logits + middle[:, None])).sum(1) > totals
        low, high = np.where(too_many, low, middle), np.where(too_many, middle, high)
    return np.asarray((low + high) / 2)


CENTERS = np.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, BINS)


def _histograms(logits: Floats, is_open: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each class how many open pairs are nearest to each of CENTERS, [L,BINS]."""
    places = ((logits + LARGEST_LOGIT) / (CENTERS[1] - CENTERS[0])).round().astype(int)
    places += np.arange(logits.shape[1]) * BINS
    return np.bincount(places[is_open], minlength=logits.shape[1] * BINS).reshape(-1, BINS)


def _logits(values: Floats) -> Floats:
    small = float(_sigmoid(np.array(-LARGEST_LOGIT)))
    inside = np.clip(values, small, 1 - small)
    return np.asarray(np.clip(np.log(inside / (1 - inside)), -LARGEST_LOGIT, LARGEST_LOGIT))


def _sigmoid(logits: Floats) -> Floats:
    values: Floats = 0.5 * (1 + np.tanh(0.5 * logits))
    # Below 1, so that the logarithm of what is left is finite.
    return np.asarray(np.minimum(values, 1 - 1e-12))


def _all_classes(values: Ranked, rows: NDArray[np.bool_]) -> Array:
    """Return the values of some rows, [n,L]; of classes that are not kept the floor."""
    if not isinstance(values, KeptScores):
        return values[rows]
    kept = replace(
        values, classes=values.classes[rows], values=values.values[rows], floors=values.floors[rows]
    )
    return kept.spread(kept.floors)


class Canaries:
    """The hidden labels of a run: notes what their images are ranked by while a selection reads the store."""

    def __init__(
        self, hidden: Ragged, negatives: Ragged, annotations: Annotations, *, momentum: float | None
    ) -> None:
        """`annotations` are what training sees; `momentum` is None if averages have no initial value."""
        rows = np.flatnonzero(hidden.lengths)
        classes = hidden.values.astype(np.int64)
        # An answer of a person may have named the class again.
        is_hidden = ~annotations.is_given(rows, classes)
        rows, classes = rows[is_hidden], classes[is_hidden]
        chosen = _evenly(len(rows), MOST_HIDDEN)
        self._rows, self._hidden = rows[chosen], classes[chosen]
        labelled = np.setdiff1d(np.flatnonzero(annotations.given.lengths), rows)
        self._labelled = labelled[_evenly(len(labelled), MOST_LABELLED)]
        self._negatives, self._annotations = negatives, annotations
        self._labels = annotations.counts() + np.bincount(classes, minlength=annotations.num_classes)
        self._momentum = momentum
        self._wanted = np.sort(np.concatenate([self._rows, self._labelled]))
        self._parts: list[Chunk] = []

    def noted(self, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks, and note those of their rows that are needed."""
        self._parts = []
        for ids, values in chunks:
            mask = np.isin(ids, self._wanted, assume_unique=True)
            self._parts.append((ids[mask], _all_classes(values, mask)))
            yield ids, values

    def trust(self, selection: Thresholds, epochs: int, ranks: Transport) -> Trust:
        """Return how far to trust a selection from the chunks that were noted. All ranks call it together."""
        ids = np.concatenate([np.empty(0, np.int64), *(part[0] for part in self._parts)])
        width = self._annotations.num_classes
        values = np.concatenate([np.empty((0, width), np.float16), *(part[1] for part in self._parts)])
        self._parts = []
        sent = [ranks.gather(array.tobytes()) for array in (ids, values)]

        def compute() -> bytes:
            assert sent[0] is not None
            assert sent[1] is not None
            all_ids = np.frombuffer(b"".join(sent[0]), np.int64)
            all_values = np.frombuffer(b"".join(sent[1]), np.float16).reshape(-1, width)
            order = np.argsort(all_ids)
            found = self._estimate(all_ids[order], all_values[order], selection, epochs)
            return json.dumps(found.to_json()).encode()

        return Trust.from_json(json.loads(on_rank_zero(ranks, compute)))

    def _estimate(
        self, ids: NDArray[np.int64], values: NDArray[np.float16], selection: Thresholds, epochs: int
    ) -> Trust:
        assert selection.num_expected is not None
        samples, labels = self._annotations.num_samples, self._labels
        missing = np.maximum(selection.num_expected - labels, 0) / samples

        def images(rows: NDArray[np.int64], positives: Floats) -> Images:
            own = values[np.searchsorted(ids, rows)]
            is_open = ~self._annotations.of_rows(rows)
            is_open[self._negatives.entries(rows)] = False
            left = 0.0 if self._momentum is None else self._momentum**epochs
            return Images(
                values=np.clip(own.astype(np.float64) / (1 - left), 0, 1),
                is_open=is_open,
                mined=selection.expected(own, rows) & is_open,
                num_positives=len(rows) * positives,
            )

        return estimate(
            images(self._rows, missing + labels / max(labels.sum(), 1)),
            self._hidden,
            images(self._labelled, missing),
            labels=labels,
            epochs=epochs,
            num_samples=samples,
        )


def _evenly(count: int, most: int) -> NDArray[np.int64]:
    """Return at most `most` places of `count`, evenly spaced."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
