"""The settings that can meet in a run, and the combinations that are refused.

A new setting joins by one line in `DIMENSIONS`; a new value of a `choice` joins by itself. The first value of
a dimension is its default; where it takes less time, rows have it unless a pair needs another.
"""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bigscl.config import Config
from bigscl.losses.objective import BASES, CONSISTENCIES


def choices_of(kind: Any) -> tuple[Any, ...]:
    """Every value of a type that has few: those of a Literal, False and True, or both of a union."""
    if kind is bool:
        return (False, True)
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(value for part in get_args(kind) for value in choices_of(part))
    return ()


def all_settings(section: type = Config, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield (dotted path, type, default) of every setting of the config."""
    hints = get_type_hints(section)
    for field in fields(section):
        kind = hints[field.name]
        inner = [part for part in (kind, *get_args(kind)) if is_dataclass(part)]
        if inner:
            yield from all_settings(inner[0], f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", kind, field.default


def choice(path: str) -> dict[str, dict[str, Any]]:
    """Every value of a setting, its default first."""
    kind, default = next((kind, default) for name, kind, default in all_settings() if name == path)
    values = sorted(choices_of(kind), key=lambda value: value != default)
    return {str(value).lower(): {path: value} for value in values}


def base_losses() -> dict[str, dict[str, Any]]:
    """Every base loss; parts that start late by default start within a short run."""
    found = choice("objective.base")
    for name, settings in found.items():
        if name in ("em_apl", "crisp", "splc"):
            settings[f"objective.{name}.start_epoch"] = 1
    return found


# A value without settings is carried out by the harness (`tests.pairs.trial`).
DIMENSIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "base": base_losses(),
    "consistency": choice("objective.consistency"),
    "store": {
        "disk": {"store.kind": "disk"},
        "s3": {},
        "az": {},
        "memory": {"store.kind": "ram"},
        "none": {"store.kind": "none"},
    },
    "layout": {
        "dense": {},
        "scores": {"store.warmup_heatmaps": "scores"},
        "top": {"store.top": 4, "store.compact_after": 1},
        "scores, then top": {"store.warmup_heatmaps": "scores", "store.top": 4, "store.compact_after": 1},
        "top at the resume": {},
    },
    "tars": {"folder": {}, "http": {}, "s3": {}, "az": {}},
    "workers": {"0": {"data.workers": 0}, "1": {"data.workers": 1}, "2": {"data.workers": 2}},
    "processes": {"1": {}, "2": {}, "3": {}},
    "launcher": {"python": {}, "accelerate": {}, "torchrun": {}},
    "scores kept": {"all": {}, "few": {"store.top_scores": 6}},
    "codec": choice("store.codec"),
    "decoder": choice("data.decoder"),
    "labels": {
        "shards": {},
        "file": {},
        "drawn": {"data.given": {"seed": 3, "negatives": 1}},
        "full": {"data.labels": "full"},
    },
    "hidden labels": {"none": {}, "some": {"data.canaries": 0.2}},
    "answers": {"none": {}, "before": {}, "later": {}},
    "validation": {"none": {}, "shards": {}, "file": {}},
    "K": {"2.5": {"selection.K": 2.5}, "auto": {"selection.K": "auto"}},
    "K per class": choice("selection.per_class"),
    "rank by": choice("selection.by"),
    "precision": choice("hardware.precision"),
    "norm": choice("objective.norm"),
    "optimizer": choice("optimizer.name"),
    "fused": choice("optimizer.fused"),
    "decayed": {
        "all": {"optimizer.decay_norms_and_biases": True},
        "no norms": {"optimizer.decay_norms_and_biases": False, "optimizer.weight_decay": 0.01},
    },
    "layer decay": {"no": {}, "yes": {"optimizer.layer_decay": 0.7}},
    "mixing": {
        "none": {},
        "mixup": {"data.mix": {"mixup": 0.4}},
        "cutmix": {"data.mix": {"cutmix": 1.0}},
        "both": {"data.mix": {"mixup": 0.4, "cutmix": 1.0}},
    },
    "compile": choice("hardware.compile"),
    "accumulation": {"1": {}, "2": {"optimizer.accumulate": 2}},
    "averaged weights": {"no": {}, "yes": {"weight_ema": 0.9}},
    "average of the memory": choice("store.ema"),
    "SyncBatchNorm": choice("hardware.sync_batchnorm"),
    "statistics": choice("model.freeze_statistics"),
    "stages": {"train": {}, "freeze": {"model.freeze_stages": 1}},
    "squashed views": choice("data.crop.squash"),
    "channels last": choice("hardware.channels_last"),
    "checkpoints": choice("checkpoint.background") | {"rare": {"checkpoint.every_epochs": 2}},
    "checksums": choice("store.checksum"),
    "best pooled by": choice("validation.pooling"),
    "score log": {"yes": {}, "no": {"log.score_classes": 0}},
    "pictures": {"never": {}, "always": {"store.history_samples": 2, "log.pictures_every": 1}},
    "RAM": {"all": {}, "little": {"store.resident_gb": 1e-6, "store.prefetch_batches": 1}},
}

EXPENSIVE = ("compile", "launcher", "precision", "processes", "store", "tars", "workers", "pictures")
"""Dimensions whose default takes less time, the most expensive first."""
LEFT_OUT = {
    "data.allow_pipe": "a `pipe:` is one shard, and needs a rank of its own: tests/test_bigscl/test_index.py",
    "data.interpolation": "pixels of a view: tests/test_bigscl/test_decoders.py",
    "data.labels": "the dimension `labels`",
    "data.preprocessing": "needs published weights, which are downloads",
    "data.resize": "pixels of a view: tests/test_bigscl/test_decoders.py",
    "hardware.deterministic": "of GPUs",
    "log.ids": "for debugging; tests/integration have it",
    "objective.boostlu.scheme": "which positives are mistakes: tests/test_bigscl/test_field_losses.py",
    "schedule.main.decay": "a number for each step: tests/test_bigscl/test_schedule.py",
    "schedule.warmup.decay": "a number for each step: tests/test_bigscl/test_schedule.py",
    "store.anonymous": "of public buckets; the servers here take any credentials",
    "store.warmup_heatmaps": "the dimension `layout`",
    "validation.metric": "one of two numbers that are computed in any case",
}
"""Settings with few values that have no `choice` in the table, each with the reason."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A combination that is refused at the start, in one line."""

    dimensions: tuple[str, ...]
    applies: Callable[..., bool]
    """Takes the names of the values of the dimensions."""
    says: str
    """Regular expression of that line."""

    def forbids(self, row: Mapping[str, str]) -> bool:
        values = [row.get(name) for name in self.dimensions]
        return None not in values and self.applies(*values)


def _is_not_there(name: str) -> Callable[[str, str], bool]:
    """Whether a setting of the store is given although there is none."""
    default = next(iter(DIMENSIONS[name]))
    return lambda value, store: store == "none" and value != default


_heatmaps = {name for name, term in CONSISTENCIES.items() if "maps" in term.needs}
_corrected = {name for name, term in CONSISTENCIES.items() if "weight" in term.needs}
_expected = {name for name, term in BASES.items() if "expected" in term.needs}
_whole_batch = {name for name, term in BASES.items() if term.statistics is not None}

REFUSALS = (
    Refusal(("precision",), lambda name: name == "fp16", r"hardware.precision: fp16 needs a GPU"),
    Refusal(
        ("fused",),
        lambda fused: fused == "true",
        r"optimizer.fused: (needs a GPU|has no effect with optimizer.name)",
    ),
    Refusal(
        ("base", "mixing"),
        lambda base, mixing: mixing != "none" and not BASES[base].mixes,
        r"data.mix: objective.base \w+ has no loss of two images in one",
    ),
    Refusal(
        ("store", "base"),
        lambda store, base: store == "none" and BASES[base].needs_memory,
        r"store.kind: none, but",
    ),
    Refusal(
        ("store", "consistency"),
        lambda store, name: store == "none" and CONSISTENCIES[name].needs_memory,
        r"store.kind: none, but .* needs it",
    ),
    *(
        Refusal(
            (name, "store"), _is_not_there(name), r"store\.\w+: has no effect with store.kind none|needs it"
        )
        for name in (
            "layout",
            "scores kept",
            "codec",
            "average of the memory",
            "checksums",
            "pictures",
            "RAM",
        )
    ),
    Refusal(
        ("layout", "consistency"),
        lambda layout, name: layout == "scores" and name in _heatmaps,
        r"store.warmup_heatmaps: scores without store.top keeps no heatmaps",
    ),
    Refusal(
        ("layout", "consistency"),
        lambda layout, name: layout == "scores, then top" and name in _corrected,
        r"store.warmup_heatmaps: scl_corrected needs dense",
    ),
    Refusal(
        ("layout", "scores kept"),
        lambda layout, kept: kept == "few" and not layout.startswith("scores"),
        r"store.top_scores: needs store.warmup_heatmaps: scores",
    ),
    Refusal(
        ("consistency", "scores kept"),
        lambda name, kept: kept == "few" and name in _corrected,
        r"store.top_scores: needs store.warmup_heatmaps: scores|scl_corrected needs dense",
    ),
    Refusal(
        ("layout", "rank by"),
        lambda layout, by: layout == "scores" and by == "spatial",
        r"selection.by: spatial needs heatmaps",
    ),
    Refusal(
        ("base", "rank by"),
        lambda base, by: by == "spatial" and base not in _expected,
        r"selection.by: has no effect with base",
    ),
    Refusal(
        ("base", "K per class"),
        lambda base, how: how != "false" and base not in _expected,
        r"selection.per_class: has no effect with base",
    ),
    Refusal(
        ("base", "hidden labels"),
        lambda base, hidden: hidden != "none" and base not in _expected,
        r"data.canaries: has no effect with",
    ),
    Refusal(
        ("hidden labels", "store"),
        lambda hidden, store: hidden != "none" and store == "none",
        r"data.canaries: has no effect with|needs it",
    ),
    Refusal(
        ("labels", "hidden labels"),
        lambda labels, hidden: hidden != "none" and labels == "full",
        r"data.canaries: has no effect with data.labels: full",
    ),
    Refusal(
        ("store", "K per class"),
        lambda store, how: store == "none" and how != "false",
        r"store.kind: none, but|selection.per_class: has no effect",
    ),
    Refusal(
        ("store", "rank by"),
        lambda store, by: store == "none" and by == "spatial",
        r"store.kind: none, but|selection.by: has no effect",
    ),
    Refusal(
        ("base", "accumulation"),
        lambda base, count: count != "1" and base in _whole_batch,
        r"optimizer.accumulate: \w+ needs the whole batch at once",
    ),
    Refusal(
        ("base", "K", "validation"),
        lambda base, k, val: k == "auto" and val == "none" and BASES[base].needs_k,
        r"selection.K: auto needs data.val",
    ),
    Refusal(
        ("K per class", "validation"),
        lambda how, val: how == "labelled" and val == "none",
        r"selection.per_class: labelled takes K of each class from the full labels of data.val",
    ),
    Refusal(
        ("consistency", "average of the memory"),
        lambda name, ema: name in _corrected and ema == "debiased",
        r"store.ema: scl_corrected takes the start out of a plain average",
    ),
    Refusal(
        ("consistency", "norm"),
        lambda name, norm: name == "none" and norm != "mse",
        r"objective.norm: has no effect without consistency",
    ),
    Refusal(
        ("store", "norm"),
        lambda store, norm: store == "none" and norm != "mse",
        r"store.kind: none, but|objective.norm: has no effect",
    ),
    Refusal(
        ("labels", "answers"),
        lambda labels, answers: labels == "full" and answers != "none",
        r"data.answers: has no effect with data.labels: full",
    ),
    *(
        Refusal((name, "SyncBatchNorm"), applies, r"hardware.sync_batchnorm: true, but .* compute on CPUs")
        for name, applies in (
            ("processes", lambda count, synced: count != "1" and synced == "true"),
            ("launcher", lambda launcher, synced: launcher == "torchrun" and synced == "true"),
        )
    ),
    Refusal(
        ("statistics", "SyncBatchNorm"),
        lambda frozen, synced: frozen == synced == "true",
        r"hardware.sync_batchnorm: has no effect with model.freeze_statistics",
    ),
)


STORE_CALLS = (
    "show", "show sample", "verify", "export labels", "export scores", "export heatmaps", "audit", "ask",
    "ask simulated", "render", "view prepared", "view", "compact", "compact rewritten", "verify again",
)  # fmt: skip
"""Calls of tools that read the store, as `tests.pairs.looks` names them."""
TOOL_REFUSALS: tuple[tuple[tuple[str, ...], Refusal], ...] = (
    (
        ("ask", "ask simulated"),
        Refusal(
            ("labels",),
            lambda labels: labels == "full",
            r"was trained with all labels .*nothing is to be asked",
        ),
    ),
    (
        ("export heatmaps",),
        Refusal(("layout",), lambda layout: layout == "scores", r"keeps no heatmaps .*only scores"),
    ),
    (("audit",), Refusal(("score log",), lambda kept: kept == "no", r"has no scores of finished epochs")),
    (STORE_CALLS, Refusal(("store",), lambda store: store in ("none", "memory"), r"keeps no memory on disk")),
)
"""Calls of tools that are refused, also in one line."""
