"""The configs that come with bigscl: complete runs, and files for launchers."""

import os
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "configs"


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
