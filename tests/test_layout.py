"""The dependency rule and the folder layout, read from the files themselves."""

import ast
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "chipsparse"
FOLDERS = ("kernels", "pipelines", "experiments", "cli")
MOST_MEBIBYTES = 60  # of all files together: the tree is cloned and copied often

# Each room may import itself and those before it, at once, in a function or for types alone.
# A module is in the room with the longest name that its own begins with.
ROOMS = (
    ("chipsparse.kernels",),
    ("chipsparse.common",),
    ("chipsparse.layout",),
    ("chipsparse.config",),
    ("chipsparse.reasons",),
    ("chipsparse.skip",),
    ("chipsparse.profiles",),
    ("chipsparse.tuning",),
    ("chipsparse.sparse.plan", "chipsparse.without_effect"),
    ("chipsparse.parallel",),
    ("chipsparse.report",),
    ("chipsparse.sparse.cost_model",),
    ("chipsparse.sparse.cache",),
    ("chipsparse.sparse.layers",),
    ("chipsparse.sparse.graphs",),
    ("chipsparse.sparse",),
    ("chipsparse.pipelines",),
    ("chipsparse.api",),
    ("chipsparse.experiments",),
    ("chipsparse.cli",),
    ("chipsparse.cli.commands",),
    ("chipsparse.cli.main", "chipsparse.__main__"),
    ("chipsparse",),  # the public names alone, each found at its first use
    ("benchmarks",),
)
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def sources():
    """Each source file with its import name, such as `chipsparse.cli.main`."""
    for top in (*FOLDERS, "benchmarks", "chipsparse"):
        for file in sorted((ROOT / top).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            if top == "chipsparse" and parts[1] in (*FOLDERS, "assets"):
                continue
            name = ".".join(("chipsparse", *parts) if top in FOLDERS else parts)
            yield file, name.removesuffix(".__init__")


@cache
def modules():
    """The import names of all source files."""
    return frozenset(name for _, name in sources())


def room_of(module):
    """The room of a module; that of `chipsparse` holds no other."""
    name = module
    while name not in FLOOR or (name == "chipsparse" != module):
        assert "." in name, f"{module} is in no room of ROOMS"
        name = name.rpartition(".")[0]
    return name


@cache
def imports(file, module):
    """Each imported module with its line, those of functions and `TYPE_CHECKING` too."""
    return [*read_imports(ast.parse(file.read_text(encoding="utf-8")), file, module)]


def read_imports(tree, file, module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            package = module if file.name == "__init__.py" else module.rpartition(".")[0]
            base = node.module or ""
            if node.level:
                kept = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            for alias in node.names:
                # `from chipsparse import api` imports a module, `from chipsparse import enable` not
                inner = f"{base}.{alias.name}"
                yield inner if inner in FLOOR or inner in modules() else base, node.lineno


def violations(file, module):
    """Each import of a later room, in a sentence."""
    for imported, line in imports(file, module):
        top = imported.split(".")[0]
        if top in FOLDERS:
            yield f"{module}:{line}: import chipsparse.{imported}"
        if top not in ("chipsparse", "benchmarks"):
            continue
        room = room_of(imported)
        if FLOOR[room] > FLOOR[room_of(module)]:
            yield f"{module}:{line}: {imported} is in the later room {room}"


def test_rooms_import_those_before_them():
    assert [said for source in sources() for said in violations(*source)] == []


@pytest.mark.parametrize(
    ("module", "source", "later"),
    [
        ("chipsparse.sparse.plan", "import chipsparse.pipelines.runner", "chipsparse.pipelines"),
        ("chipsparse.sparse.plan", "def f():\n    from chipsparse import api", "chipsparse.api"),
        ("chipsparse.sparse.plan", "from chipsparse import enable", "chipsparse"),
        (
            "chipsparse.sparse.cache.store",
            "if X:\n    import chipsparse.sparse.layers.mlp",
            "chipsparse.sparse.layers",
        ),
        ("chipsparse.kernels.op", "from chipsparse.config import X", "chipsparse.config"),
        ("chipsparse.common.file", "import chipsparse.config", "chipsparse.config"),
        ("chipsparse.pipelines.runner", "from ..api import enable", "chipsparse.api"),
        ("chipsparse.api", "from chipsparse.experiments import quality", "chipsparse.experiments"),
        ("chipsparse.cli.tune.lab", "from chipsparse.cli.commands import tune", "commands"),
        ("chipsparse.experiments.clips", "import chipsparse", "chipsparse"),
        ("chipsparse.cli.main", "import benchmarks.run", "benchmarks"),
    ],
)
def test_the_rule_finds_what_breaks_it(tmp_path, module, source, later):
    file = tmp_path / "module.py"
    file.write_text(source)
    assert next(violations(file, module)).endswith(later)


def test_the_rule_wants_links_and_lets_the_rest_pass(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("import kernels.attention\nfrom pipelines import wan\n")
    said = [sentence.rpartition(" ")[2] for sentence in violations(file, "chipsparse.cli.media")]
    assert said == ["chipsparse.kernels.attention", "chipsparse.pipelines"]
    file.write_text(
        "import torch\nfrom chipsparse.api import enable\nimport chipsparse.sparse.plan\n",
    )
    assert list(violations(file, "chipsparse.experiments.quality")) == []


def circles(edges):
    """Each set of files that import one another, by Tarjan's strongly connected components."""
    order = {}
    lowest = {}
    path = []
    found = []

    def visit(module):
        order[module] = len(order)
        lowest[module] = order[module]
        path.append(module)
        for imported in edges[module]:
            if imported not in order:
                visit(imported)
            if imported in path:
                lowest[module] = min(lowest[module], lowest[imported])
        if lowest[module] == order[module]:
            start = path.index(module)
            if len(path) > start + 1:
                found.append(sorted(path[start:]))
            del path[start:]

    for module in edges:
        if module not in order:
            visit(module)
    return found


def edges_of(files):
    """The files that each of these imports, those of functions and `TYPE_CHECKING` too."""
    names = {name for _, name in files}
    return {
        name: sorted({imported for imported, _ in imports(file, name)} & names - {name})
        for file, name in files
    }


def test_no_circle_between_files():
    edges = edges_of([*sources()])
    assert circles(edges) == []
    assert sum(map(len, edges.values())) > 1000  # the edges are found at all


def test_the_rule_finds_a_circle(tmp_path):
    sources = {
        "a": "def f():\n    from chipsparse.b import x",
        "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import chipsparse.c",
        "c": "from .a import f",
        "d": "import chipsparse.a\nimport chipsparse.e",
        "e": "import torch",
    }
    files = []
    for name, source in sources.items():
        file = tmp_path / f"{name}.py"
        file.write_text(source)
        files.append((file, f"chipsparse.{name}"))
    assert circles(edges_of(files)) == [["chipsparse.a", "chipsparse.b", "chipsparse.c"]]
    assert circles(edges_of(files[1:])) == []


@pytest.mark.parametrize("folder", [*FOLDERS, "assets"])
def test_folders_are_linked_and_cannot_shadow_other_packages(folder):
    """A folder with `__init__.py` would hide PyPI's `kernels` from programs run in this folder."""
    link = PACKAGE / folder
    assert link.readlink() == Path("..") / folder
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()
    assert not (ROOT / f"{folder}.py").exists()


def test_only_pipelines_and_what_is_above_know_diffusers():
    for file, module in sources():
        if FLOOR[room_of(module)] < FLOOR["chipsparse.pipelines"]:
            found = [name for name, _ in imports(file, module) if name.startswith("diffusers")]
            assert found == [], f"{module} imports {found}"


def test_what_skips_knows_torch_and_numpy_alone():
    known = {*sys.stdlib_module_names, "chipsparse", "torch", "numpy"}
    for file, module in sources():
        if module.startswith("chipsparse.skip"):
            found = {name.partition(".")[0] for name, _ in imports(file, module)}
            assert found <= known, f"{module} imports {found - known}"


def tracked_sizes():
    """Bytes of each file that git tracks here, links as links, by path; None without git."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return None
    list_files = ["git", "ls-files", "-z"]
    listed = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:  # a repository that is another user's, say
        return None
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    there = [file for file in files if file.is_symlink() or file.exists()]
    return {str(file.relative_to(ROOT)): file.lstat().st_size for file in there}


def test_the_tree_is_small():
    sizes = tracked_sizes()
    if sizes is None:
        pytest.skip("no checkout of git")
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:8]
    assert sum(sizes.values()) < MOST_MEBIBYTES * 2**20, f"the largest files: {largest}"
