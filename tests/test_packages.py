"""Packages: what is imported is declared, and what is declared is imported."""

import ast
import re
import sys
from functools import cache
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")  # of Python 3.11

ROOT = Path(__file__).parents[1]
LIBRARY = ("chipsparse", "kernels", "pipelines")
PACKAGE = (*LIBRARY, "experiments", "cli")
BESIDE = ("benchmarks", "docs", "tests", "assets")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
FOR_TESTS = ("test", "test-browser", "test-quantized")
FOR_USERS = sorted(EXTRAS.keys() - {*FOR_TESTS, "dev"})
# Modules that are not called as the package that has them.
NAMES = {"markdown_it_py": "markdown_it", "pillow": "PIL", "pyyaml": "yaml"}
PLUGINS = {"pytest_xdist"}  # which nobody imports
BY_NAME = ("importlib.import_module", "importlib.util.find_spec", "check_installed")


def modules(requirements):
    names = [re.match(r"[\w.-]+", each)[0].lower().replace("-", "_") for each in requirements]
    return {NAMES.get(name, name) for name in names}


CORE = modules(PROJECT["dependencies"])


@cache
def imported(path):
    """Modules that a file imports: by statement, by a text for importlib, or from its MODULES."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            texts = (value.value for value in node.args[:1] if isinstance(value, ast.Constant))
            found |= {text for text in texts if isinstance(text, str)}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES":
            found |= set(ast.literal_eval(node.value))
    return {name.partition(".")[0] for name in found}


def files(*folders):
    """Python files below folders of the repository, each once: links lead to the same ones."""
    return {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}


def of_others(*folders):
    """What the files of some folders import that is neither ours nor Python's own."""
    found = {name for path in files(*folders) for name in imported(path)}
    ours = {path.stem for path in files("assets")} | {*PACKAGE, *BESIDE}
    return found - ours - sys.stdlib_module_names


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    extras = {name for extra in FOR_USERS for name in modules(EXTRAS[extra])}
    assert of_others(*LIBRARY) <= CORE
    assert CORE <= of_others(*PACKAGE) <= CORE | extras


@pytest.mark.parametrize("extra", FOR_USERS)
def test_what_an_extra_has_is_imported_and_not_in_the_core(extra):
    assert modules(EXTRAS[extra]) <= of_others(*PACKAGE) - CORE


def test_what_is_beside_the_package_imports_what_tests_install():
    installed = {name for extra in FOR_TESTS for name in modules(EXTRAS[extra])}
    assert of_others(*BESIDE) <= CORE | installed
    assert of_others(*BESIDE) >= installed - PLUGINS


def test_pytest_finds_the_plugin():
    (module,) = PROJECT["entry-points"]["pytest11"].values()
    assert any(
        path == ROOT / f"{module.removeprefix('chipsparse.').replace('.', '/')}.py"
        for path in files(*PACKAGE)
    )
