"""The shape of the project: which way imports point, and that the README's commands are the ones CI runs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {"store": set(), "bigscl": {"store"}, "tools": {"store", "bigscl"}}


def imported_names(file: Path) -> set[str]:
    """Top-level names of every absolute import in a file, wherever it stands."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_from_tools_to_bigscl_to_store(package):
    for file in sorted((ROOT / package).rglob("*.py")):
        upwards = imported_names(file) & (ALLOWED.keys() - ALLOWED[package] - {package})
        assert not upwards, f"{file.relative_to(ROOT)} imports {sorted(upwards)}"


def test_store_imports_no_torch():
    code = "import bigscl.store, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_trainer_starts_without_what_only_some_runs_need():
    """Torchvision brings torch's compiler with it, which takes longer to import than all the rest."""
    code = "import bigscl.train, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    unwanted = {"torchvision", "torch._dynamo", "matplotlib", "sklearn", "timm", "tensorboard", "pandas"}
    assert not unwanted & set(done.stdout.split())


def test_ci_runs_the_test_command_of_the_readme():
    command = "pip install -e '.[test]' && pytest -n 2"
    assert command in (ROOT / "README.md").read_text().splitlines()
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()
