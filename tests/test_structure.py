"""The shape of the project: which way imports point, and that the README's commands are the ones CI runs."""

import ast
import itertools
import re
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import bigscl.store
from bigscl.tools.cli import VERBS

ROOT = Path(__file__).parent.parent


def modules():
    """(dotted name, file) of every module, by the name under which it is imported."""
    for file in sorted((ROOT / "bigscl").rglob("*.py")):
        yield ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), file
    for package in ("store", "tools"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield f"bigscl.{name}", file


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported(file: Path) -> set[str]:
    """Dotted names of every absolute import in a file, wherever it stands."""
    names = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


def test_imports_point_from_tools_to_bigscl_to_store():
    for name, file in modules():
        ours = {each for each in imported(file) if each.split(".")[0] in ("bigscl", "store", "tools")}
        tools = {each for each in ours if each.startswith("bigscl.tools")}
        store = {each for each in ours if each.startswith("bigscl.store")}
        assert not {each for each in ours if not each.startswith("bigscl")}, name
        if name.startswith("bigscl.store"):
            # Two small modules, which import nothing of ours.
            assert ours - {"bigscl.common.user_error", "bigscl.common.url_secrets"} == store, name
        elif not name.startswith("bigscl.tools") and name not in ("bigscl", "bigscl.__main__"):
            assert not tools, name


# From low to high: a module imports from its own folder and from those that come before it in this list, not
# from others of its line. A folder that is not listed counts as a part of the folder above it.
LAYERS = (
    ("bigscl/common/user_error", "bigscl/common/url_secrets"),
    ("store",),
    ("bigscl/common",),
    ("bigscl/data", "bigscl/distributed"),
    ("bigscl/data/labels", "bigscl/datasets", "bigscl/losses", "bigscl/models/families"),
    ("bigscl/models", "bigscl/config"),
    ("bigscl/selection",),
    ("bigscl/memory",),
    ("bigscl/training", "bigscl/__init__"),
    ("bigscl/evaluation", "bigscl/examples", "bigscl/preflight"),
    ("bigscl",),
    ("bigscl/preflight/rehearsal",),
    ("tools/shared",),
    ("tools/viewer",),
    ("tools/verbs",),
    ("tools",),
    ("bigscl/__main__",),
)
LEVELS = {part: level for level, parts in enumerate(LAYERS) for part in parts}


def layer(file: Path) -> str:
    """Return the part of LAYERS that a file belongs to: the longest that its path begins with."""
    path = file.relative_to(ROOT).with_suffix("")
    return next(str(each) for each in (path, *path.parents) if str(each) in LEVELS)


def imported_modules(file: Path, files: dict[str, Path]):
    """Yield the file of each of our modules that a file imports, wherever in it."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in files else node.module for name in inner]
        else:
            continue
        yield from (files[name] for name in names if name in files)


def test_folders_import_only_from_lower_folders():
    files = dict(modules())
    for name, file in files.items():
        for other in imported_modules(file, files):
            mine, its = layer(file), layer(other)
            # Names of the package are imported when they are used; only type checkers follow them here.
            if mine == "bigscl/__init__" and its == "tools":
                continue
            assert mine == its or LEVELS[its] < LEVELS[mine], f"{name} ({mine}) imports {other} ({its})"


MOST_MODULES = 15
# Folders that are still being divided, with their number of modules. Entries only go away.
CROWDED: dict[str, int] = {}


def test_folders_have_few_modules():
    counts = Counter(str(file.parent.relative_to(ROOT)) for _, file in modules() if file.stem != "__init__")
    assert not {
        folder: count
        for folder, count in counts.items()
        if count > CROWDED.get(folder, MOST_MODULES) and folder != "tools/verbs"
    }


def test_no_two_modules_have_one_name():
    """But a verb and the library that it calls."""
    files = [file for _, file in modules() if file.stem not in ("__init__", "__main__")]
    counts = Counter(file.stem for file in files)
    verbs = {file.stem for file in files if file.parent.name == "verbs" and file.stem in VERBS}
    assert not {stem for stem, count in counts.items() if count > 1 + (stem in verbs)}


def test_mistakes_of_the_user_are_raised_as_user_errors():
    """A plain ValueError would end in a traceback: bigscl/common/failures.py takes it for a bug."""
    assert not imported(ROOT / "bigscl" / "common" / "user_error.py")
    for name, file in modules():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Raise):
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                assert getattr(raised, "id", "") != "ValueError", f"{name}, line {node.lineno}"


def test_store_is_used_through_its_public_names_only():
    """Modules outside store/ import from `bigscl.store` itself, and only what its `__init__` imports."""
    public = {name for name, value in vars(bigscl.store).items() if not isinstance(value, ModuleType)}
    for name, file in modules():
        if name.startswith("bigscl.store"):
            continue
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("bigscl.store")], name
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bigscl.store"):
                assert node.module == "bigscl.store", f"{name} imports from {node.module}"
                assert {alias.name for alias in node.names} <= public, name


WITHOUT_TORCH = (
    "bigscl.store",
    "bigscl.config",
    "bigscl.data.read_samples",
    "bigscl.evaluation.sample_plots",
    *(f"bigscl.tools.verbs.{verb}" for verb in ("export", "index", "shards")),
)


def test_what_every_command_imports_and_what_reads_labels_imports_no_torch():
    """It takes seconds and 700 MB, more than a small export."""
    code = "import importlib, sys\nfor name in sys.argv[1:]:\n    importlib.import_module(name)\n"
    code += "    assert 'torch' not in sys.modules, name"
    words = [sys.executable, "-c", code, *WITHOUT_TORCH]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == 0


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


def test_every_dependency_has_a_lower_bound():
    """`.ci/lowest` tries these bounds; a name without one would be installed at any age."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    unbounded = [name for name in named if not re.search(r">=\d", name) and not name.startswith("bigscl[")]
    assert not unbounded


def test_no_array_is_saved_under_the_name_of_an_option():
    """In numpy 1.26 savez has no option `allow_pickle`: it would save an array of that name."""
    for name, file in modules():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith("savez"):
                assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, name


def test_lowest_versions_are_tried_with_the_lowest_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    script = (ROOT / ".ci" / "lowest").read_text()
    assert f"python{project['requires-python'].removeprefix('>=')}}}" in script


def folders_of_the_map():
    """Text of the map by folder: `bigscl/config` and so on."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## What is where")[2].split("```")[1]
    found, folder = {}, ""
    for line in text.strip("\n").splitlines():
        if opened := re.match(r"( {0,2})(\S+)/ +", line):
            folder = f"bigscl/{opened[2]}" if opened[1] else opened[2]
            line = line[opened.end() :]
        found[folder] = f"{found.get(folder, '')} {line}"
    return found


def test_map_names_every_module():
    found = folders_of_the_map()
    for name, file in modules():
        words = set(re.findall(r"\w+", found[str(file.parent.relative_to(ROOT))]))
        assert file.stem in words or file.stem in ("__init__", "__main__"), (
            f"{name}: not in the map of the pages"
        )


def test_map_names_no_module_that_is_gone():
    """Words with an underscore are names of modules; other words are not checked."""
    for folder, text in folders_of_the_map().items():
        stems = {file.stem for file in (ROOT / folder).glob("*.py")}
        for part in re.split(r"[;:]", text):
            words = re.findall(r"[a-z]\w*", part)
            named = [word for word in words if word in stems]
            unknown = [word for word in words if "_" in word and word not in stems and folder != "tests"]
            assert not unknown, f"{folder}: {unknown}, near {named}"


def test_map_fits_on_one_screen():
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## What is where")[2].split("```")[1]
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 120


PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)


def test_the_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 12_000
    assert not [page for page in PAGES[1:] if f"]({page})" not in text]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_files_that_exist(page):
    text = (ROOT / page).read_text()
    named = set(
        re.findall(r"(?:bigscl|store|tools|configs|docs|tests|\.ci)/[\w/-]+\.(?:py|md|yaml|png)", text)
    )
    linked = {(ROOT / page).parent / link for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)}
    assert not [name for name in named if not (ROOT / name).exists()]
    assert not [link for link in linked if not link.exists()]
