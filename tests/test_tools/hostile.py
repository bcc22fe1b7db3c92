"""Hostile things for every kind of argument, and the verbs that take them.

A verb is read from its own signature, so that a new one is covered as soon as it is in `VERBS`; a parameter
of a new name must be given a kind here.
"""

import importlib
import inspect
import itertools
import json
import shutil
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer
import yaml

from bigscl.common.command_line import with_options
from bigscl.store import seal
from bigscl.tools.cli import VERBS

HUGE = "9" * 30
NAMES = {
    "store": "store a b against runs",
    "folder": "cache out folder to",
    "text": "host names test classes images image_prefix region split split_column image_column "
    "label_column separator full name license offset dataset data_license push_to_hub who",
    "place": "place probe",
    "run": "run",
    "output": "output",
    "shards": "shards",
    "file": "index real reviewed keys labels ground_truth synsets answers file",
    "config": "config configs",
    "predictions": "predictions",
    "dataset": "source",
    "table": "table_file",
    "sample": "sample class_name",
    "endpoint": "endpoint",
    "setting": "methods vary settings",
}
KINDS = {name: kind for kind, names in NAMES.items() for name in names.split()}


@dataclass(frozen=True)
class Parameter:
    """One parameter of a verb."""

    name: str
    kind: str
    flag: str | None
    """None: it is positional."""
    required: bool
    least: float | None


@dataclass(frozen=True)
class Verb:
    words: tuple[str, ...]
    parameters: tuple[Parameter, ...]


def verbs() -> Iterator[Verb]:
    """Every verb and sub-command."""
    for name in VERBS:
        if name in ("train", "evaluate"):  # they have such tests of their own
            continue
        module = importlib.import_module(f"bigscl.tools.verbs.{name}")
        if hasattr(module, "app"):
            for command in module.app.registered_commands:
                function = command.callback
                yield Verb(
                    (name, command.name or function.__name__), tuple(parameters(with_options(function)))
                )
        else:
            yield Verb((name,), tuple(parameters(with_options(module.command))))


def parameters(function: Callable[..., Any]) -> Iterator[Parameter]:
    hints = typing.get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if hint is typer.Context:
            continue
        kind, info = hint.__origin__, hint.__metadata__[0]
        flags = [word for word in info.param_decls or () if word.startswith("--")]
        positional = isinstance(info, typer.models.ArgumentInfo)
        yield Parameter(
            name=name,
            kind=_kind(name, kind),
            flag=None if positional else (flags or [f"--{name.replace('_', '-')}"])[0],
            required=parameter.default is inspect.Parameter.empty,
            least=getattr(info, "min", None),
        )


def _kind(name: str, hint: Any) -> str:
    parts = {part for part in (typing.get_args(hint) or (hint,)) if part is not type(None)}
    inner = set(itertools.chain.from_iterable(typing.get_args(part) or (part,) for part in parts))
    if typing.get_origin(hint) is typing.Literal or any(isinstance(one, str) for one in inner):
        return "choice"
    if bool in inner:
        return "flag"
    if int in inner or float in inner:
        return "number"
    return KINDS[name]


class World:
    """Good things for every kind of argument, and room for bad ones. Anyone may read it."""

    def __init__(self, root: Path, run: Path, index_pattern: str) -> None:
        self.root, self.run, self.pattern = root, run, index_pattern
        self._numbers = itertools.count()
        self.config = self._config()
        self.predictions = self._predictions(root / "predictions.npz")
        self.dataset = root / "dataset"
        for name in ("cat", "dog"):
            (self.dataset / name).mkdir(parents=True)
            (self.dataset / name / "1.jpg").write_bytes(b"not an image")
        self.table = self.dataset / "table.csv"
        self.table.write_text("image,label\ncat/1.jpg,cat\n")

    def scratch(self) -> Path:
        """A new empty folder."""
        folder = self.root / f"scratch-{next(self._numbers)}"
        folder.mkdir()
        folder.chmod(0o777)
        return folder

    def _config(self) -> Path:
        path = self.root / "run.yaml"
        values = {
            "run": str(self.root / "new-run"),
            "data": {"train": self.pattern, "size": 48, "batch_size": 4, "workers": 0},
            "model": {"backbone": "bigscl.models.smallnet:small_resnet"},
            "selection": {"K": 2.0},
            "schedule": {
                "warmup": {"epochs": 1, "learning_rate": 0.001},
                "main": {"epochs": 1, "learning_rate": 0.001},
            },
        }
        path.write_text(yaml.safe_dump(values))
        return path

    def _predictions(self, path: Path) -> Path:
        from bigscl.evaluation.predictions import load_predictions

        random = np.random.default_rng(0)
        labels = random.integers(0, 2, (6, 3)).astype(np.int8)
        keys = np.array([f"image{n}" for n in range(6)])
        np.savez(path, logits=random.normal(size=(6, 3)).astype(np.float32), keys=keys, labels=labels)
        folder = self.root / "evaluation"
        load_predictions(path).save(folder / "predictions.zarr")
        return folder

    def good(self, parameter: Parameter, verb: Verb, words: list[str]) -> str:
        """A value that works with these other words."""
        values: dict[str, Callable[[], Any]] = {
            "store": lambda: self.run,
            "run": lambda: self.run,
            "place": self.scratch,
            "output": lambda: self.scratch() / _output_name(verb, words),
            "folder": lambda: self.scratch() / "new",
            "shards": lambda: self.pattern,
            "config": lambda: self.config,
            "predictions": lambda: self.predictions,
            "dataset": lambda: self.dataset,
            "table": lambda: self.table,
            "choice": lambda: "csv" if verb.words[0] == "review" else "labels",
            "file": lambda: _written(self, b"key,class,yes\n", "answers.csv"),
        }
        return str(values[parameter.kind]())


def _output_name(verb: Verb, words: list[str]) -> str:
    exported = {"scores": "scores.npy", "heatmaps": "heatmaps.npz"}
    if verb.words == ("export",):
        return exported.get(words[0] if words else "", "labels.csv")
    return {"render": "picture.png", "review": "questions.csv"}.get(verb.words[0], "new")


# Paths that are not what they should be

PATHS: dict[str, Callable[[World], Path]] = {
    "missing": lambda world: world.scratch() / "nothing",
    "a file": lambda world: _written(world, b"hello"),
    "an empty file": lambda world: _written(world, b""),
    "NULs": lambda world: _written(world, bytes(1000)),
    "below a file": lambda world: _written(world, b"hello") / "deep" / "down",
    "an empty folder": lambda world: world.scratch(),
    "a folder of something else": lambda world: _foreign(world),
    "a name too long": lambda world: world.scratch() / ("n" * 300),
    "a broken link": lambda world: _link(world, Path("nowhere")),
    "a link to itself": lambda world: _link(world, Path("link")),
    "unreadable": lambda world: _locked(world, 0o000),
}
OUTPUTS: dict[str, Callable[[World], Path]] = {
    "a folder": lambda world: world.scratch(),
    "in a missing folder": lambda world: world.scratch() / "missing" / "file.csv",
    "below a file": lambda world: _written(world, b"hello") / "file.csv",
    "an existing file": lambda world: _written(world, b"hello", "file.csv"),
    "in a read-only folder": lambda world: _locked(world, 0o555) / "file.csv",
    "of an unknown kind": lambda world: world.scratch() / "file.nonsense",
    "a name too long": lambda world: world.scratch() / ("n" * 300),
}
FOLDERS: dict[str, Callable[[World], Path]] = {
    "a file": lambda world: _written(world, b"hello"),
    "below a file": lambda world: _written(world, b"hello") / "deep",
    "in a read-only folder": lambda world: _locked(world, 0o555) / "new",
    "a name too long": lambda world: world.scratch() / ("n" * 300),
}


def _written(world: World, data: bytes, name: str = "file") -> Path:
    path = world.scratch() / name
    path.write_bytes(data)
    return path


def _foreign(world: World) -> Path:
    folder = world.scratch()
    (folder / "holiday.jpg").write_bytes(b"...")
    (folder / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {"x": 1}}')
    return folder


def _link(world: World, to: Path) -> Path:
    path = world.scratch() / "link"
    path.symlink_to(to)
    return path


def _locked(world: World, mode: int) -> Path:
    folder = world.scratch()
    folder.chmod(mode)
    return folder


# What a file may have become

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "NULs": lambda data: bytes(len(data)),
    "cut in half": lambda data: data[: len(data) // 2],
    "binary": lambda data: b"\xff\xfe\x80" + data,
    "a list": lambda data: b"[]",
    "null": lambda data: b"null",
    "a number": lambda data: b"7",
    "a word": lambda data: b'"word"',
    "an empty object": lambda data: b"{}",
    "deep": lambda data: b"[" * 100_000,
}
WRONG: dict[str, Any] = {
    "null": None,
    "a word": "word",
    "-5": -5,
    "huge": int(HUGE),
    "infinite": float("inf"),
    "a list": [],
    "an object": {},
    "a list of words": ["x"],
}
STORE_FILES = (
    "zarr.json",
    "arrays-000/zarr.json",
    "arrays-000/scores/zarr.json",
    "snapshots/NEWEST.json",
    "snapshots/OLDEST.json",
    "lease.json",
)
LEASE = {
    "run": "far",
    "host": "elsewhere",
    "pid": 1,
    "started": "",
    "since": 0.0,
    "token": "t",
    "machine": "",
}
RUN_FILES = ("config.yaml", "checkpoints/step-00000030/progress.json")


def damaged_runs() -> dict[str, Callable[[World], Path]]:
    """Copies of the run with one file damaged, or gone, or a folder in its place."""
    files = [f"store/{name}" for name in STORE_FILES] + list(RUN_FILES)
    found: dict[str, Callable[[World], Path]] = {}
    for name, (damage, change) in itertools.product(files, DAMAGES.items()):
        found[f"{name}: {damage}"] = partial(_with_damage, name=name, change=change)
    for name in files:
        found[f"{name}: missing"] = partial(_changed, name=name, actions=[Path.unlink])
        found[f"{name}: a folder"] = partial(_changed, name=name, actions=[Path.unlink, Path.mkdir])
        found[f"{name}: unreadable"] = partial(_changed, name=name, actions=[lambda path: path.chmod(0)])
    return found


def wrong_fields() -> dict[str, Callable[[World], Path]]:
    """Copies of the run with one field of a JSON file of a wrong type or size."""
    fields = {
        "store/snapshots/NEWEST.json": ("id", "parent", "time", "run", "epoch", "step", "group", "slots"),
        "store/lease.json": tuple(LEASE),
        "checkpoints/step-00000030/progress.json": ("snapshot", "step"),
        "store/zarr.json": (
            "format",
            "fingerprint",
            "num_classes",
            "heatmap_size",
            "rows_per_shard",
            "shard_sizes",
        ),
        "store/arrays-000/zarr.json": ("name", "layout", "top", "slots", "codec", "checksum", "counts"),
    }
    found: dict[str, Callable[[World], Path]] = {}
    for name, keys in fields.items():
        for key, (wrong, value) in itertools.product(keys, WRONG.items()):
            found[f"{name}: {key} is {wrong}"] = partial(_with_field, name=name, key=key, value=value)
    for what, slots in {
        "slot -5": [-5, 0, 0, 0],
        "slot 99": [99, 0, 0, 0],
        "half a slot": [0.5, 0, 0, 0],
    }.items():
        newest = "store/snapshots/NEWEST.json"
        found[f"snapshot: {what}"] = partial(_with_field, name=newest, key="slots", value=slots)
    for key, value in {"train": 7, "train_index": 5, "given": {"seed": "x"}}.items():
        found[f"config: data.{key} is {value}"] = partial(_with_data, key=key, value=value)
    return found


def _copy(world: World) -> Path:
    target = world.scratch() / "run"
    shutil.copytree(world.run, target)
    (target / "store" / "lease.json").write_text(json.dumps(seal(LEASE)))
    return target


def _file(run: Path, name: str) -> Path:
    """A file of a run; the newest and the oldest snapshot are found by name."""
    numbers = sorted(path.stem for path in (run / "store" / "snapshots").glob("*.json"))
    return run / name.replace("NEWEST", numbers[-1]).replace("OLDEST", numbers[0])


def _changed(world: World, name: str, actions: Sequence[Callable[[Path], object]]) -> Path:
    """A copy of the run after something was done to one of its files."""
    run = _copy(world)
    path = _file(run, name)
    for act in actions:
        act(path)
    return run


def _with_damage(world: World, name: str, change: Callable[[bytes], bytes]) -> Path:
    return _changed(world, name, [lambda path: path.write_bytes(change(path.read_bytes()))])


def _with_field(world: World, name: str, key: str, value: Any) -> Path:
    def change(path: Path) -> None:
        values = json.loads(path.read_text())
        inner = values["attributes"]["bigscl"] if "zarr.json" in name else values
        inner[key] = value
        path.write_text(json.dumps(values))

    return _changed(world, name, [change])


def _with_data(world: World, key: str, value: Any) -> Path:
    run = _copy(world)
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"][key] = value
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return run


# Predictions

PREDICTION_FILES = ("zarr.json", "logits/zarr.json", "keys/zarr.json", "logits/c/0/0")


def damaged_predictions() -> dict[str, Callable[[World], Path]]:
    """Copies of saved predictions with one file damaged."""

    def damaged(world: World, name: str, change: Callable[[bytes], bytes] | None) -> Path:
        target = world.scratch() / "evaluation"
        shutil.copytree(world.predictions, target)
        path = target / "predictions.zarr" / name
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()))
        return target

    found: dict[str, Callable[[World], Path]] = {}
    for name in PREDICTION_FILES:
        for damage, change in [*DAMAGES.items(), ("missing", None)]:
            found[f"{name}: {damage}"] = partial(damaged, name=name, change=change)
    for suffix in (".npy", ".npz"):
        for damage in ("empty", "NULs", "a word"):
            data = DAMAGES[damage](bytes(500))
            found[f"{suffix}: {damage}"] = partial(_written, data=data, name=f"logits{suffix}")
    found["numbers alone"] = _numbers_alone
    return found


def _numbers_alone(world: World) -> Path:
    path = world.scratch() / "logits.npz"
    np.savez(path, logits=np.float32(3), keys=np.float32(4))
    return path


TEXTS = ("", "nobody", "-5", HUGE, "\x1b[31mred", "a/b/c", "0.5", "\udcff")
SETTINGS = ("", "nonsense", "=", "store.momentum", "store.momentum={", "store.tip=3", "store=3", "--x")
ENDPOINTS = ("", "nonsense", "http://[")
NUMBERS = ("", "x", "-1", HUGE, "-" + HUGE, "nan", "inf", "1e400", "0")


def hostile(parameter: Parameter) -> dict[str, Callable[[World], Any]]:
    """Values that a parameter may be given by mistake or malice."""
    texts: dict[str, tuple[str, ...]] = {
        "sample": TEXTS,
        "text": TEXTS,
        "setting": SETTINGS,
        "endpoint": ENDPOINTS,
        "number": NUMBERS,
        "choice": ("", "nonsense"),
        "flag": (),
    }
    if parameter.kind in texts:
        return {repr(text): lambda world, text=text: text for text in texts[parameter.kind]}
    paths: dict[str, dict[str, Callable[[World], Any]]] = {
        "store": {
            **PATHS,
            "an unknown scheme": lambda world: "ftp://x/y",
            "no bucket": lambda world: "s3://",
        },
        "place": PATHS,
        "run": PATHS,
        "file": PATHS,
        "config": PATHS,
        "dataset": PATHS,
        "table": PATHS,
        "shards": {
            **PATHS,
            "an open brace": lambda world: "x-{0..",
            "a huge brace": lambda world: "x{0..9}" * 3,
        },
        "predictions": {**PATHS, **damaged_predictions()},
        "output": OUTPUTS,
        "folder": FOLDERS,
    }
    return paths[parameter.kind]
