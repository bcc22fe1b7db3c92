"""Configs from YAML files and command lines, with every mistake in them reported at once."""

import reprlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from bigscl.config.schema import Config
from bigscl.method.objective import Objective
from bigscl.text import first_few, printable, reason_of

# Values of a config, with their aliases written out; those in this folder have about a hundred.
MOST_VALUES = 10_000
MOST_LEVELS = 20
MOST_MISTAKES = 50
LONGEST_INPUT = 80
# Values as they were found, in messages.
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = LONGEST_INPUT


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists everything that is wrong with it."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a YAML file with `--section.key value` overrides; ConfigError lists all mistakes."""
    values = _read(path)
    for dotted, value in _parse_overrides(overrides):
        _set(values, dotted, value)
    return make_config(values, str(path))


def _read(path: Path) -> dict[str, Any]:
    """The sections of a YAML file."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{printable(str(path))}: cannot be read: {reason_of(error)}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections with settings, found {type(values).__name__}")
    return values


def parse_yaml(text: str, source: str) -> Any:
    """The plain values in a YAML text; ConfigError, with its source, for anything else.

    Aliases are followed only as far as the result stays small: ten lines of them can mean a billion values.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, frozenset())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        reason = printable(" ".join(str(error).split()))
    except Exception as error:  # YAML raises whatever the text after a tag makes it trip over.
        reason = reason_of(error)
    raise ConfigError(f"{printable(source)}: cannot be read: {reason}. Expected YAML: `key: value`.")


def _count(node: yaml.Node, counts: dict[int, int], inside: frozenset[int]) -> int:
    """Values in a node with all aliases written out; ValueError if they are too many or nested too deeply."""
    if id(node) in inside:
        raise ValueError("an alias inside of what it names")
    if len(inside) > MOST_LEVELS:
        raise ValueError(f"more than {MOST_LEVELS} levels")
    if id(node) not in counts:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = [one for part in parts for one in (part if isinstance(part, tuple) else (part,))]
        counts[id(node)] = 1 + sum(_count(one, counts, inside | {id(node)}) for one in inner)
    if counts[id(node)] > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    return counts[id(node)]


def make_config(values: dict[str, Any], source: str = "config") -> Config:
    """The config of plain values, or ConfigError with everything that is wrong in it."""
    try:
        config = _adapter().validate_python(values)
    except ValidationError as error:
        problems = [(_dotted(one["loc"]), _complaint(one)) for one in error.errors()]
        raise ConfigError(_listed(source, problems)) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply, expected sections with settings") from None
    if problems := list(_conflicts(config)):
        raise ConfigError(_listed(source, problems))
    return config


@cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def to_yaml(config: Config) -> str:
    """The resolved config, as it can be loaded again."""
    plain = _adapter().dump_python(config, mode="json")
    return yaml.safe_dump(plain, sort_keys=False)


def _conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """(dotted path, what is wrong) for settings that contradict each other or would have no effect."""
    objective, store = config.objective, config.store
    needs = objective.needs
    if store.kind == "none" and needs.memory:
        yield "store.kind", f"none, but {objective.base} with consistency {objective.consistency} needs it"
    if store.kind != "disk" and store.url is not None:
        yield "store.url", f"has no effect with store.kind {store.kind}"
    if objective.consistency == "none" and objective.norm != "mse":
        yield "objective.norm", "has no effect without consistency"
    if not needs.smoothing and objective.smoothing != Objective().smoothing:
        yield "objective.smoothing", f"has no effect with base {objective.base}"
    if needs.k and config.selection.K == "auto" and config.data.val is None:
        yield "selection.K", "auto needs data.val, fully labelled; or give a number"
    if needs.mean_counts and config.optimizer.accumulate > 1:
        yield "optimizer.accumulate", f"{objective.base} needs the whole batch at once, so 1"
    if store.top is None and store.compact_after is not None:
        yield "store.compact_after", "has no effect without store.top"
    if store.top is not None and not (store.compact_after or config.schedule.warmup.epochs):
        yield "store.compact_after", "needed: without warm-up nothing says when to choose the top classes"
    if store.top is None and store.warmup_heatmaps == "scores" and objective.consistency == "scl":
        yield "store.warmup_heatmaps", "scores without store.top keeps no heatmaps, and scl needs them"
    if store.url is not None and not store.url.startswith("s3://") and (store.endpoint or store.region):
        yield "store.endpoint", "has no effect on a file system"
    for name, phase in (("warmup", config.schedule.warmup), ("main", config.schedule.main)):
        if phase.decay == "constant" and phase.final_learning_rate:
            yield f"schedule.{name}.final_learning_rate", "has no effect with decay constant"
    if config.schedule.warmup.epochs + config.schedule.main.epochs < 1:
        yield "schedule", "no epochs at all"
    if config.data.color_jitter is not None and config.data.rand_augment is not None:
        yield "data.rand_augment", "choose it or data.color_jitter"
    if config.data.labels == "labels" and config.data.observed is not None:
        yield "data.observed", "has no effect with data.labels: labels"
    if config.data.resize == "shorter" and config.data.shorter < (config.data.eval_size or config.data.size):
        yield "data.shorter", f"{config.data.shorter}: the centre that is cut out of it is larger"
    if config.data.resize == "square" and config.data.shorter != 256:
        yield "data.shorter", "has no effect with data.resize: square"
    most = store.slots - config.spare_slots
    if store.kind != "none" and config.keep_checkpoints > most:
        every = f" when every_epochs is {config.checkpoint.every_epochs}" if config.spare_slots > 1 else ""
        yield "checkpoint.keep", f"{config.keep_checkpoints}, but {store.slots} slots can keep {most}{every}"
    if config.model.freeze_statistics and config.hardware.sync_batchnorm:
        yield "hardware.sync_batchnorm", "has no effect with model.freeze_statistics"
    for name in ("scale", "ratio"):
        low, high = getattr(config.data.crop, name)
        if low > high:
            yield f"data.crop.{name}", f"[{low}, {high}]: the least is larger than the largest"
    if config.data.crop.scale[1] > 1:
        yield "data.crop.scale", f"{config.data.crop.scale[1]} of the image's area, expected at most 1"


def changed_settings(before: Path, config: Config) -> list[str]:
    """Settings that are not as in a saved config, as `section.key: value`; none where there is no file.

    ConfigError if there is one that cannot be read.
    """
    if not before.exists():
        return []
    old = dict(_flat(_read(before)))
    new = dict(_flat(yaml.safe_load(to_yaml(config))))
    return [f"{name}: {new.get(name)}" for name in {**new, **old} if new.get(name) != old.get(name)]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of every setting in nested sections."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _parse_overrides(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    remaining = list(arguments)
    while remaining:
        name = remaining.pop(0)
        if not name.startswith("--"):
            raise ConfigError(f"{name[:LONGEST_INPUT]!r}: expected --section.key value")
        name, equals, text = name[2:].partition("=")
        if not equals:
            if not remaining:
                raise ConfigError(f"--{name}: expected a value after it")
            text = remaining.pop(0)
        yield name, parse_yaml(text, f"--{name} {text[:LONGEST_INPUT]}")


def _set(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        inner = values.get(section)
        if not isinstance(inner, dict):
            inner = values[section] = {}
        values = inner
    values[last] = value


def _dotted(location: tuple[str | int, ...]) -> str:
    # Members of a union appear as types or literals; users know only the keys they wrote.
    return ".".join(str(part) for part in location if not str(part).endswith(("]", "Config", "float", "int")))


def _complaint(error: Any) -> str:
    if error["type"] == "unexpected_keyword_argument":
        return "no such setting"
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return "missing"
    message: str = error["msg"]
    found = SHORT.repr(error["input"])
    return f"{found}: {message[0].lower()}{message[1:]}"


def _listed(source: str, problems: list[tuple[str, str]]) -> str:
    named = (f"  {path[:LONGEST_INPUT]}: {complaint}" for path, complaint in problems)
    lines = first_few(named, len(problems), most=MOST_MISTAKES, join="\n")
    return f"{source}: {len(problems)} mistake{'s' if len(problems) > 1 else ''}\n{lines}"
