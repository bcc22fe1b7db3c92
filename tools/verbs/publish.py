"""Write a run's network for others: weights, card, ONNX."""

import importlib
import math
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigscl.common.command_line import AsJson
from bigscl.common.files import atomic_folder, read_class_names
from bigscl.common.user_error import UserError
from bigscl.data.index import load_index
from bigscl.tools.shared.terminal import print_result

if TYPE_CHECKING:
    from bigscl.config import Config
    from bigscl.evaluation.target import EvaluationTarget

PACKAGES = {"onnx": "onnx", "onnxscript": "onnx", "onnxruntime": "onnx", "huggingface_hub": "hub"}
"""Packages of the extra `publish`, and what needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LicenceFlags:
    """Licences and names for the model card."""

    license: Annotated[
        str | None, typer.Option(help="Licence of the weights, as `apache-2.0`. Default: not stated.")
    ] = None
    dataset: Annotated[
        str | None, typer.Option(help="Name of the training data. Default: the names of the shards.")
    ] = None
    data_license: Annotated[str | None, typer.Option(help="Licence or terms of the training data.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFlags:
    """Where the folder is uploaded to."""

    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Upload the folder to this repository of the Hugging Face Hub."
        ),
    ] = None
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False

    def check(self) -> None:
        if self.private and self.push_to_hub is None:
            raise UserError("--private: has no effect without --push-to-hub")


def command(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A run (its best weights), a checkpoint or its weights file."),
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; it must not exist.")],
    classes: Annotated[
        Path | None, typer.Option(help="Class names, one per line. Default: those of the training shards.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Title of the model card. Default: the run's name.")
    ] = None,
    offset: Annotated[
        str,
        typer.Option(
            metavar="auto|none|NUMBER",
            help="Added to all logits. auto: as the memory of the run suggests, so that as many classes "
            "reach a score of 0.5 as K expects; none where there is no such memory.",
        ),
    ] = "auto",
    onnx: Annotated[bool, typer.Option("--onnx/--no-onnx", help="Write model.onnx.")] = True,
    *,
    licence: LicenceFlags,
    hub: HubFlags,
    as_json: AsJson = False,
) -> None:
    """Write the network of a run for other people: weights, model card, preprocessing, ONNX.

    bigscl publish runs/mine published/mine --license apache-2.0 --push-to-hub me/mine

    The bias has an offset (--offset) that makes 0.5 a usable threshold and changes no ranking. All files are
    checked: the library's own network with the written weights and model.onnx must give the logits of the
    run, plus that offset. Results are those of `bigscl evaluate RUN`, if it has been run, else those of
    the validation. Local paths are not published.
    """
    hub.check()
    _check_packages({"onnx": onnx, "hub": hub.push_to_hub is not None})
    if folder.exists():
        raise UserError(f"{folder}: exists. Choose a new folder, or remove it.")
    from bigscl.evaluation.target import find_target
    from bigscl.tools.shared.publication import (
        Licences,
        describe_weights,
        lacks_names,
        model_card,
        write_portable_files,
    )

    target = find_target(run, None, None)
    assert target.config is not None
    added, why = _offset(offset, target.config)
    names = _class_names(target, classes)
    with atomic_folder(folder) as partial:
        differences = write_portable_files(target, names, partial, onnx=onnx, offset=added)
        licences = Licences(weights=licence.license, dataset=licence.dataset, data=licence.data_license)
        card = model_card(
            target,
            names,
            name or target.config.run.name,
            licences,
            files=sorted(differences),
            repository=hub.push_to_hub,
            offset=added,
        )
        (partial / "README.md").write_text(card)
    if hub.push_to_hub is not None:
        _push(folder, hub.push_to_hub, hub.private)
    facts = {
        "folder": str(folder),
        "weights": str(target.weights),
        "weights_are": describe_weights(target),
        "offset": added,
        "differences": differences,
        "pushed_to": hub.push_to_hub,
    }
    lines = [f"{folder}: {describe_weights(target)}, {target.weights}", why]
    if lacks_names(names):
        lines.append("names of the classes are missing, the data number them: --classes FILE gives names")
    print_result(facts, "\n".join([*lines, *_text(differences, hub.push_to_hub)]), as_json)


def _offset(wanted: str, config: "Config") -> tuple[float, str]:
    """Return what is added to all logits, and a line about it."""
    from bigscl.evaluation.memory_figures import memory_offset
    from bigscl.store import StoreError

    if wanted == "none":
        return 0.0, "offset of the logits: none"
    if wanted != "auto":
        try:
            value = float(wanted)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise UserError(f"--offset: found {wanted!r}, expected auto, none or a number")
        return value, f"offset of the logits: {value:+g}"
    try:
        found = memory_offset(config)
    except (UserError, StoreError, OSError) as error:
        return 0.0, f"no offset of the logits: {' '.join(str(error).split()).removeprefix('offset: ')}"
    return found.value, f"offset of the logits {found}"


def _check_packages(needed: dict[str, bool]) -> None:
    """Refuse what needs a package that is not installed: now, not after the export."""
    missing = [package for package, what in PACKAGES.items() if needed[what] and find_spec(package) is None]
    if missing:
        other = ", or leave ONNX out with --no-onnx" if "huggingface_hub" not in missing else ""
        raise UserError(
            f"publish: needs {', '.join(missing)}, not installed: pip install 'bigscl[publish]'{other}"
        )


def _class_names(target: "EvaluationTarget", file: Path | None) -> list[str]:
    """Return the names of the classes, as many as the network has outputs."""
    assert target.config is not None
    if file is None:
        try:
            return list(load_index(target.config.data.train, target.config.data.train_index).class_names)
        except (ValueError, OSError) as error:
            raise UserError(f"class names: {error} Or give --classes FILE.") from None
    return read_class_names(file)


def _push(folder: Path, repository: str, private: bool) -> None:
    hub: Any = importlib.import_module("huggingface_hub")
    api = hub.HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="Published by bigscl")
    except Exception as error:  # of the network, of the service, of credentials
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(
            f"--push-to-hub {repository}: {reason}. {folder} is complete: after `hf auth login`, "
            f"`hf upload {repository} {folder}` uploads it."
        ) from error


def _text(differences: dict[str, float], repository: str | None) -> list[str]:
    lines = ["largest difference from the logits of the run:"]
    lines += [f"  {name:18} {difference:.1e}" for name, difference in differences.items()]
    if repository is not None:
        lines.append(f"uploaded to {repository}")
    return lines
