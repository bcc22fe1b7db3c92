"""Read configs from YAML files and command lines, and report all their mistakes at once."""

import difflib
import os
import re
import reprlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from bigscl.common.text import first_few, printable, reason_of
from bigscl.common.url_secrets import hide, take, take_all
from bigscl.common.user_error import UserError
from bigscl.config.schema import (
    Config,
    DataConfig,
    LogConfig,
    OptimizerConfig,
    SelectionConfig,
    StoreConfig,
    Tracker,
)
from bigscl.data.augmentation import Mixing
from bigscl.data.transforms import shorter_side
from bigscl.losses.objective import BASES, Base, Consistency, Norm, Objective, Ramp
from bigscl.store import STORE_SCHEMES

# Values of a config with all aliases expanded; the configs of this project have about a hundred.
MOST_VALUES = 10_000
MOST_LEVELS = 20
MOST_MISTAKES = 50
LONGEST_INPUT = 80
# The shorter side in multiples of the central crop, beyond which it is a mistake rather than a choice.
MOST_CROPPED = 1.6
Section = TypeVar("Section")
# Shortens the values that messages quote.
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = LONGEST_INPUT


SHOULD = "input should be "


UNKNOWN = "no such setting"
ABSENT = dict.fromkeys(
    ("repeated_augmentation", "aug_repeats"),
    "the memory updates each image once per epoch, by the scores of the epoch before. Train more epochs",
)
"""Settings of other trainers that cannot be here, each with the reason."""


class ConfigError(UserError):
    """A configuration that cannot be run; the message lists everything that is wrong with it."""


FOLDER = Path(__file__).parent.parent / "configs"
"""Configs that come with bigscl: complete runs, and files for launchers."""


def find_config(path: Path) -> Path:
    """Return the file that a path means: itself, or the packaged run of that name if there is no file."""
    # os.path: a name that is too long, or has a NUL, is no file, and no error here.
    if os.path.exists(path) or path.parent != Path() or path.name in ("", ".."):
        return path
    packaged = FOLDER / (path.name if path.suffix == ".yaml" else f"{path.name}.yaml")
    return packaged if os.path.isfile(packaged) else path


def packaged_files() -> dict[str, Path]:
    """Return all packaged files by their names: `imagenet_resnet50_scl` of a run, else the path."""
    files = sorted(path for path in FOLDER.rglob("*") if path.is_file())
    runs = {path.stem: path for path in files if path.parent == FOLDER and path.suffix == ".yaml"}
    others = (path for path in files if path not in runs.values())
    return {**runs, **{str(path.relative_to(FOLDER)): path for path in others}}


def load_config(path: Path, overrides: Sequence[str] = (), *, to_train: bool = False) -> Config:
    """Return the config of a YAML file and `--section.key value` overrides; ConfigError lists mistakes.

    The path may also be the name of a config that comes with bigscl. A config `to_train` names a network and
    trackers that are installed here; that imports torch.
    """
    path = find_config(path)
    values = _read(path)
    for dotted, value in _parse_overrides(overrides):
        _set(values, dotted, value)
    return make_config(values, str(path), to_train=to_train)


def load_data_settings(path: Path) -> DataConfig:
    """Return the data section of the config that a run saved; its other sections are not checked."""
    section = _read(path).get("data")
    return _validated(TypeAdapter(DataConfig), section, f"{path}: data")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
        text = data.decode()
    except (OSError, ValueError) as error:
        hint = ". `bigscl configs` lists those that come with bigscl" if not os.path.exists(path) else ""
        hint = ". Expected YAML: `key: value`." if isinstance(error, UnicodeDecodeError) else hint
        raise ConfigError(f"{printable(str(path))}: cannot be read: {reason_of(error)}{hint}") from error
    _check_digest(data, path)
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections with settings, found {type(values).__name__}")
    return values


DIGEST = re.compile(rb"# crc32 ([0-9a-f]{8}) of the lines below")


def with_digest(text: str) -> str:
    """Return a YAML text after a comment with its CRC-32, which a reader of the file compares."""
    crc = zlib.crc32(text.encode())
    return f"# crc32 {crc:08x} of the lines below; remove this line if you edit them\n{text}"


def _check_digest(data: bytes, path: Path) -> None:
    """Raise ConfigError if a file has a digest, and its lines have another."""
    first, _, rest = data.partition(b"\n")
    found, said = f"{zlib.crc32(rest):08x}", DIGEST.match(first)
    if said and said[1].decode() != found:
        raise ConfigError(
            f"{printable(str(path))}: damaged or edited: its lines have the CRC-32 {found}, its first line "
            f"says {said[1].decode()}. Restore it from a copy; if you edited it, remove that line"
        )


def parse_yaml(text: str, source: str) -> Any:
    """Return the plain values in a YAML text; ConfigError for anything else, and for bombs of aliases."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, frozenset())
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        # The message quotes nothing of a text with secrets.
        for name in ("context_mark", "problem_mark") if hide(text) != text else ():
            if (mark := getattr(error, name, None)) is not None:
                mark.buffer = None
        reason = printable(" ".join(str(error).split()))
    except Exception as error:  # PyYAML raises many types of error for malformed tags.
        reason = reason_of(error)
    raise ConfigError(f"{printable(source)}: cannot be read: {reason}. Expected YAML: `key: value`.")


def _count(node: yaml.Node, counts: dict[int, int], inside: frozenset[int]) -> int:
    """Count the values in a node, aliases expanded; UserError if they are too many or nested too deeply."""
    if id(node) in inside:
        raise UserError("an alias that contains itself")
    if len(inside) > MOST_LEVELS:
        raise UserError(f"more than {MOST_LEVELS} levels")
    if id(node) not in counts:
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        inner = [item for part in parts for item in (part if isinstance(part, tuple) else (part,))]
        counts[id(node)] = 1 + sum(_count(number, counts, inside | {id(node)}) for number in inner)
    if counts[id(node)] > MOST_VALUES:
        raise UserError(f"more than {MOST_VALUES:,} values")
    return counts[id(node)]


def make_config(values: dict[str, Any], source: str = "config", *, to_train: bool = False) -> Config:
    """Return the config of plain values, as `load_config` does; ConfigError lists all mistakes."""
    values, problems = _with_preprocessing(values)
    if to_train:
        named = {name for name, _ in problems}
        problems += [fault for fault in _not_installed(values) if fault[0] not in named]
    config = _validated(_adapter(), values, source, problems)
    if problems := [*problems, *_conflicts(config)]:
        raise ConfigError(_listed(source, problems))
    return config


def _not_installed(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    model, log = values.get("model"), values.get("log")
    if isinstance(model, dict) and isinstance(backbone := model.get("backbone"), str):
        from bigscl.models.families import check_backbone

        try:
            check_backbone(backbone)
        except UserError as error:
            yield "model.backbone", str(error).removeprefix("backbone: ")
    from accelerate.tracking import get_available_trackers

    installed = {str(name) for name in get_available_trackers()}
    trackers = log.get("trackers", LogConfig().trackers) if isinstance(log, dict) else LogConfig().trackers
    for name in trackers if isinstance(trackers, list | tuple) else ():
        if name in get_args(Tracker) and name not in installed:
            yield "log.trackers", f"{name} is not installed: pip install {name}, or leave it out ([]: none)"


def _with_preprocessing(values: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Return the values with the preprocessing of the weights, if they ask for it, and what prevents it."""
    data, model = values.get("data"), values.get("model")
    if not isinstance(data, dict) or not isinstance(model, dict) or data.get("preprocessing") != "weights":
        return values, []
    backbone, weights = model.get("backbone"), model.get("weights")
    if not isinstance(backbone, str) or not isinstance(weights, str | None):
        return values, []
    from bigscl.models.families import NoPreprocessing, find_preprocessing

    try:
        preprocessing = find_preprocessing(backbone, weights)
    except NoPreprocessing as error:
        return values, [("data.preprocessing", f"weights, but {error}. Or choose explicit")]
    except ValueError as error:
        return values, [("model.backbone", str(error).removeprefix("backbone: "))]
    return {**values, "data": {**data, **preprocessing.settings(data)}}, []


def _validated(
    adapter: TypeAdapter[Section], values: Any, source: str, others: Sequence[tuple[str, str]] = ()
) -> Section:
    """Return plain values as a dataclass of the config; ConfigError lists all mistakes, and `others`."""
    try:
        return adapter.validate_python(take_all(values))
    except ValidationError as error:
        raise ConfigError(_listed(source, [*_by_setting(error.errors()), *others])) from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply, expected sections with settings") from None


def checked(settings: Section, source: str) -> Section:
    """Return settings that were made in code, checked as those of a file; ConfigError lists all mistakes."""
    return _validated(TypeAdapter(type(settings)), asdict(settings), source)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnObjective:
    """An objective without a config, checked as strictly as with one."""

    __pydantic_config__: ClassVar[ConfigDict] = Config.__pydantic_config__

    objective: Objective


def make_objective(
    base: Base = "en",
    consistency: Consistency = "scl",
    *,
    norm: Norm = "mse",
    gamma: Ramp = Ramp(),  # noqa: B008
    smoothing: float = 0.1,
    **settings: Any,
) -> Objective:
    """Return what an own loop minimises, base + gamma * consistency; ConfigError lists all mistakes.

    Call it with `MemoryBatch.inputs` and the weight of the step, for which `gamma.at(progress)` is a ramp.
    Other settings are those of single losses, as in a config: `hill={"margin": 0.5}`.
    """
    given = {"base": base, "consistency": consistency, "norm": norm, "gamma": gamma, "smoothing": smoothing}
    plain = {
        name: asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        for name, value in (given | settings).items()
    }
    made = _validated(TypeAdapter(_OwnObjective), {"objective": plain}, "objective").objective
    if problems := list(_idle_settings(made)):
        raise ConfigError(_listed("objective", problems))
    return made


@cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


def to_yaml(config: Config) -> str:
    """Return the resolved config as YAML; `load_config` reads it back."""
    plain = _adapter().dump_python(config, mode="json")
    return yaml.safe_dump(plain, sort_keys=False)


def _conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, problem) of settings that contradict each other or would have no effect."""
    objective, store = config.objective, config.store
    needs = objective.needs
    if store.kind == "none" and objective.needs_memory:
        yield "store.kind", f"none, but {objective.base} with consistency {objective.consistency} needs it"
    elif store.kind == "none":
        yield from _idle_store(store)
    if store.kind == "ram" and store.url is not None:
        yield "store.url", "has no effect with store.kind memory"
    yield from _idle_settings(objective)
    yield from _late_starts(config)
    yield from _idle_optimizer(config.optimizer)
    yield from _mixing_problems(config)
    if objective.needs_k and config.selection.K == "auto" and config.data.val is None:
        yield "selection.K", "auto needs data.val, fully labelled; or give a number"
    if objective.needs_whole_batch and config.optimizer.accumulate > 1:
        yield "optimizer.accumulate", f"{objective.base} needs the whole batch at once, so 1"
    if store.top is None and store.compact_after is not None:
        yield "store.compact_after", "has no effect without store.top"
    if store.top is not None and not (store.compact_after or config.schedule.warmup.epochs):
        yield "store.compact_after", "needed: without warm-up nothing says when to choose the top classes"
    if store.top_scores is not None and store.warmup_heatmaps == "dense":
        problem = "heatmaps of all classes weigh far more than all scores"
        yield "store.top_scores", f"needs store.warmup_heatmaps: scores; {problem}"
    if store.top_scores is not None and (store.top or 0) > store.top_scores:
        yield "store.top", f"{store.top}, expected at most store.top_scores, {store.top_scores}"
    if store.top is None and store.warmup_heatmaps == "scores" and "maps" in needs:
        problem = f"scores without store.top keeps no heatmaps, and {objective.consistency} needs them"
        yield "store.warmup_heatmaps", problem
    if "weight" in needs and store.warmup_heatmaps == "scores" and store.top is not None:
        problem = "dense: with scores, heatmaps start at scores whose looks nobody counted"
        yield "store.warmup_heatmaps", f"{objective.consistency} needs {problem}"
    if "weight" in needs and store.ema == "debiased":
        yield "store.ema", f"{objective.consistency} takes the start out of a plain average; choose one"
    yield from _idle_selection(config)
    scheme = (store.url or "").partition("://")[0]
    if store.url is not None and scheme not in STORE_SCHEMES and (store.endpoint or store.region):
        yield "store.endpoint", "has no effect on a file system"
    elif store.region and scheme in STORE_SCHEMES and scheme != "s3":
        yield "store.region", f"has no effect with {scheme}://"
    for name, phase in (("warmup", config.schedule.warmup), ("main", config.schedule.main)):
        if phase.decay == "constant" and phase.final_learning_rate:
            yield f"schedule.{name}.final_learning_rate", "has no effect with decay constant"
    if config.schedule.epochs < 1:
        yield "schedule", "no epochs at all"
    if config.data.color_jitter is not None and config.data.rand_augment is not None:
        yield "data.rand_augment", "choose it or data.color_jitter"
    if config.data.val_labels_file is not None and config.data.val is None:
        yield "data.val_labels_file", "has no effect without data.val"
    if config.data.labels == "full" and config.data.given is not None:
        yield "data.given", "has no effect with data.labels: full"
    if config.data.canaries and config.data.labels == "full":
        yield "data.canaries", "has no effect with data.labels: full"
    elif config.data.canaries and "expected" not in needs:
        yield "data.canaries", f"has no effect with base {objective.base}, which mines no labels"
    if config.data.labels == "full" and config.data.answers is not None:
        yield "data.answers", "has no effect with data.labels: full"
    try:
        config.data.evaluation_transform()
    except ValueError as error:
        yield "data.shorter", str(error).removeprefix("shorter: ")
    if config.data.resize == "square" and config.data.shorter != 256:
        yield "data.shorter", "has no effect with data.resize: square"
    most = store.slots - config.spare_slots
    if store.kind != "none" and config.keep_checkpoints > most:
        every = f" when every_epochs is {config.checkpoint.every_epochs}" if config.spare_slots > 1 else ""
        yield "checkpoint.keep", f"{config.keep_checkpoints}, but {store.slots} slots can keep {most}{every}"
    if config.model.freeze_statistics and config.hardware.sync_batchnorm:
        yield "hardware.sync_batchnorm", "has no effect with model.freeze_statistics"


def _idle_store(store: StoreConfig) -> Iterator[tuple[str, str]]:
    # The number of slots is also that of the checkpoints that are kept.
    for name in [field.name for field in fields(store) if field.name not in ("kind", "slots")]:
        if getattr(store, name) != getattr(StoreConfig(), name):
            yield f"store.{name}", "has no effect with store.kind none"


def _idle_optimizer(optimizer: OptimizerConfig) -> Iterator[tuple[str, str]]:
    if optimizer.fused and optimizer.name not in ("adam", "adamw"):
        yield "optimizer.fused", f"has no effect with optimizer.name {optimizer.name}"
    if not optimizer.decay_norms_and_biases and not optimizer.weight_decay:
        yield "optimizer.decay_norms_and_biases", "false has no effect without optimizer.weight_decay"


def _mixing_problems(config: Config) -> Iterator[tuple[str, str]]:
    data, mix, base = config.data, config.data.mix, config.objective.base
    if mix is None:
        return
    if not (mix.mixup or mix.cutmix) or not mix.probability or data.batch_size < 2:
        yield ("data.mix", "mixes no images: needs mixup or cutmix, a probability, and batches of 2 or more")
    elif mix.cutmix_share != Mixing().cutmix_share and not (mix.mixup and mix.cutmix):
        yield "data.mix.cutmix_share", "has no effect without both mixup and cutmix"
    if not BASES[base].mixes:
        able = ", ".join(name for name, term in BASES.items() if term.mixes)
        yield ("data.mix", f"objective.base {base} has no loss of two images in one; choose {able}")
    if data.erase is not None:
        yield "data.mix", "the memory leaves out one box of a view; choose it or data.erase"


def _idle_selection(config: Config) -> Iterator[tuple[str, str]]:
    selection, store = config.selection, config.store
    if "expected" not in config.objective.needs:
        for name in ("by", "per_class"):
            if getattr(selection, name) != getattr(SelectionConfig(), name):
                yield f"selection.{name}", f"has no effect with base {config.objective.base}"
    share, default = selection.pseudo_positive_share, SelectionConfig().pseudo_positive_share
    if share != default and "pseudo_positives" not in config.objective.needs:
        yield "selection.pseudo_positive_share", f"has no effect with base {config.objective.base}"
    if selection.by == "spatial" and store.top is None and store.warmup_heatmaps == "scores":
        yield "selection.by", "spatial needs heatmaps, and store.warmup_heatmaps: scores keeps none"


def _idle_settings(objective: Objective) -> Iterator[tuple[str, str]]:
    if objective.consistency == "none" and objective.norm != "mse":
        yield "objective.norm", "has no effect without consistency"
    default, used = Objective(), BASES[objective.base].setting
    for name in sorted({term.setting.name for term in BASES.values() if term.setting}):
        if (used is None or name != used.name) and getattr(objective, name) != getattr(default, name):
            yield f"objective.{name}", f"has no effect with base {objective.base}"


def _late_starts(config: Config) -> Iterator[tuple[str, str]]:
    term = BASES[config.objective.base]
    start = getattr(term.settings(config.objective), "start_epoch", 0)
    if term.setting is not None and start and start >= config.schedule.epochs:
        yield (
            f"objective.{term.setting.name}.start_epoch",
            f"{start}, counted from 0, but the run has {config.schedule.epochs} epochs",
        )


def doubtful_settings(config: Config) -> Iterator[str]:
    """Yield a warning for settings that are allowed, but hardly what the user wants."""
    side = config.data.eval_size or config.data.size
    shorter = config.data.shorter or side
    if config.data.resize == "shorter" and shorter > MOST_CROPPED * side:
        yield (
            f"data.shorter: {shorter}, but the network's input has {side}: validation sees the central "
            f"{side} of {shorter} pixels, at most {(side / shorter) ** 2:.0%} of an image. Leave "
            f"data.shorter out ({shorter_side(side)} then), or choose data.resize: square"
        )


def changed_settings(before: Path, config: Config) -> list[str]:
    """Return `section.key: value` of the settings that differ from a saved config, if there is one."""
    if not before.exists():
        return []
    values = _read(before)
    # With the defaults of settings that an earlier revision did not have; a wrong one is compared as it is.
    with suppress(ConfigError):
        values = yaml.safe_load(to_yaml(make_config(values, str(before))))
    old = dict(flat_settings(values))
    new = dict(flat_settings(yaml.safe_load(to_yaml(config))))
    return [f"{name}: {new.get(name)}" for name in {**new, **old} if new.get(name) != old.get(name)]


def flat_settings(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every setting in nested sections."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from flat_settings(value, f"{prefix}{name}.")
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
        text = take(text)
        yield name, parse_yaml(text, f"--{name} {text[:LONGEST_INPUT]}")


def _set(values: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        inner = values.get(section)
        if not isinstance(inner, dict):
            inner = values[section] = {}
        values = inner
    values[last] = value


def _by_setting(errors: Iterable[Any]) -> list[tuple[str, str]]:
    """Return (dotted path, complaint) of each setting: the members of a union have one complaint together."""
    by_setting: dict[str, str] = {}
    for error in errors:
        # Members of a union appear as types or literals; users know only the keys they wrote.
        path = ".".join(part for part in map(str, error["loc"]) if not part.endswith(("]", "float", "int")))
        complaint = _complaint(error)
        if complaint == UNKNOWN:
            reason = ABSENT.get(path.rpartition(".")[2])
            complaint += _nearest(path) if reason is None else f": {reason}"
        start, should, expected = complaint.partition(SHOULD)
        if should and by_setting.get(path, "").startswith(start + should):
            complaint = f"{by_setting[path]} or {expected}"
        elif path in by_setting and complaint != by_setting[path]:
            complaint = f"{by_setting[path]}; {complaint}"
        by_setting[path] = complaint
    return list(by_setting.items())


def _nearest(path: str) -> str:
    """Return a question with the setting that was most likely meant; empty if none is near."""
    # The page of all settings reads configs itself.
    from bigscl.config.print_config import all_settings

    names = [setting.path for setting in all_settings()]
    near = difflib.get_close_matches(path, names, n=1, cutoff=0.75)
    return f"; did you mean {near[0]}?" if near else ""


def _complaint(error: Any) -> str:
    if error["type"] == "unexpected_keyword_argument":
        return UNKNOWN
    if error["type"] in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return "missing"
    message: str = error["msg"].removeprefix("Value error, ")
    found = SHORT.repr(error["input"])
    return f"{found}: {message[0].lower()}{message[1:]}"


def _listed(source: str, problems: list[tuple[str, str]]) -> str:
    named = (f"  {path[:LONGEST_INPUT]}: {complaint}" for path, complaint in problems)
    lines = first_few(named, len(problems), most=MOST_MISTAKES, join="\n")
    return f"{source}: {len(problems)} mistake{'s' if len(problems) > 1 else ''}\n{lines}"
