"""Build the wheel without network, and check that all files of the product are in it, under one name."""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINKED = ("configs", "store", "tools")
BUILD = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")


def product(source: Path) -> set[str]:
    """Return the files of the product by their names in the wheel."""
    command = ["git", "-C", str(source), "ls-files", "-z", "bigscl", *LINKED]
    files = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    files = [file for file in files if file and not os.path.islink(source / file)]
    return {file if file.startswith("bigscl/") else f"bigscl/{file}" for file in files}


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
        print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB, all under bigscl/")


if __name__ == "__main__":
    main()
