"""List the configs that come with bigscl, and copy them."""

from pathlib import Path
from typing import Annotated

import typer

from bigscl.common.command_line import AsJson
from bigscl.common.files import atomic_write
from bigscl.common.user_error import UserError
from bigscl.config.load import FOLDER, packaged_files
from bigscl.tools.shared.terminal import plural, print_result, table


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Configs to list or copy, as they are listed. Default: all."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(help="Folder to copy them to. Nothing is overwritten.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the configs that come with bigscl; with --to, copy them, so that you can change them.

    Every command that takes a CONFIG takes the name of one of these runs, too.

    Example: bigscl configs imagenet_resnet50_scl --to .
    """
    files = _chosen(names or [])
    if to is None:
        about = {name: _first_comment(path) for name, path in files.items()}
        print_result(about, table(("name", "what it is"), list(about.items()), indent=""), as_json)
        return
    copied = [str(path) for path in _copy(files, to)]
    there = len(files) - len(copied)
    same = f"; {plural(there, 'file')} had the same content" if there else ""
    text = "\n".join([*copied, f"copied {plural(len(copied), 'file')}{same}"])
    print_result({"copied": copied, "there": there}, text, as_json)


def _chosen(names: list[str]) -> dict[str, Path]:
    files = packaged_files()
    if unknown := [name for name in names if name.removesuffix(".yaml") not in files and name not in files]:
        near = [name for name in files if unknown[0].lower() in name][:3]
        hint = f"Did you mean {', '.join(near)}?" if near else "`bigscl configs` lists them."
        raise UserError(f"{unknown[0]!r}: no such config. {hint}")
    wanted = [name if name in files else name.removesuffix(".yaml") for name in names]
    return {name: files[name] for name in wanted or files}


def _first_comment(path: Path) -> str:
    """Return the first comment line of a file that has comments; else nothing."""
    if path.suffix not in (".yaml", ".sbatch", ".def", ""):
        return ""
    lines = (line for line in path.read_text().splitlines() if not line.startswith("#!"))
    return next((line.lstrip("# ") for line in lines if line.startswith("#")), "")


def _copy(files: dict[str, Path], folder: Path) -> list[Path]:
    """Copy files that are not there yet; refuse, before anything is copied, to replace others."""
    targets = {path: folder / path.relative_to(FOLDER) for path in files.values()}
    there = {path for path, target in targets.items() if target.exists() or target.is_symlink()}
    if other := [str(targets[path]) for path in there if not _same(path, targets[path])]:
        raise UserError(
            f"{sorted(other)[0]}: is there already with other content, and is not replaced. Choose another "
            f"folder, or the names of files that it does not have."
        )
    for path in targets.keys() - there:
        target = targets[path]
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(target) as partial:
            partial.write_bytes(path.read_bytes())
    return sorted(targets[path] for path in targets.keys() - there)


def _same(path: Path, target: Path) -> bool:
    return target.is_file() and target.read_bytes() == path.read_bytes()
