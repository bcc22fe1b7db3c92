"""Build the wheel without network, check that all files of the product are in it, under one name, and try it.

The trial is in another environment and an empty folder, which see nothing of the sources.
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKED = ("configs", "store", "tools")
BUILD = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")

# The commands of a newcomer, each with its exit code and a part of what it prints.
TRIALS = (
    ("configs imagenet_resnet50_scl", 0, "ImageNet-1K, ResNet-50 fine-tuned"),
    ("configs --to configs", 0, "configs/accelerate/8gpu.yaml"),
    ("plan imagenet_resnet50_scl", 2, "--samples 1281167 --classes 1000"),
    ("plan imagenet_resnet50_scl --samples 1281167 --classes 1000 --processes 8", 0, "23.6 GB"),
    ("quickstart trial --methods an --epochs 1", 0, "AN (assume negative)"),
)


def product(source: Path) -> set[str]:
    """Return the files of the product by their names in the wheel."""
    command = ["git", "-C", str(source), "ls-files", "-z", "bigscl", *LINKED]
    files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    files = [file for file in files if file and not os.path.islink(source / file)]
    return {file if file.startswith("bigscl/") else f"bigscl/{file}" for file in files}


def install(wheel: Path, folder: Path) -> Path:
    """Return the interpreter of a new environment that has the wheel, and borrows what it depends on."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        str(wheel),
    ]
    subprocess.run(pip, check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # Folders on a .pth come last, and their own .pth files (an editable install) are not read.
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    return python


def try_out(python: Path, folder: Path) -> None:
    """Run the commands of a newcomer in an empty folder."""
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    where = "import bigscl; print(bigscl.__file__)"
    for words, expected, part in ((None, 0, str(python.parent.parent)), *TRIALS):
        command = [str(python), *(["-c", where] if words is None else ["-m", "bigscl", *words.split()])]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != expected or part not in done.stdout + done.stderr:
            said = (done.stdout + done.stderr)[-3000:]
            raise SystemExit(f"wheel: {words or where}: code {done.returncode}, no {part!r} in\n{said}")
        print(f"{words or 'import bigscl'}: as expected")


def main() -> None:
    """Build the last commit and check it; the wheel is not kept."""
    with tempfile.TemporaryDirectory() as folder:
        # A clone, because setuptools puts files of earlier builds into the wheel.
        source = Path(folder) / "source"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
        subprocess.run([*BUILD, "--wheel-dir", folder, str(source)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
        wanted = product(source)
        if names != wanted:
            raise SystemExit(f"wheel: missing {sorted(wanted - names)}, unexpected {sorted(names - wanted)}")
        try_out(install(wheel, Path(folder) / "environment"), Path(folder) / "empty")
        print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB, all under bigscl/")


if __name__ == "__main__":
    main()
