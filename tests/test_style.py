"""Rules of style that no linter has, read from the syntax trees of all files."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "chipsparse",
    "kernels",
    "pipelines",
    "experiments",
    "cli",
    "benchmarks",
    "docs",
    "examples",
    "tests",
)
DISPLAYS = (ast.List, ast.Tuple, ast.Set, ast.Dict)


def one_name_an_assignment(node):
    """``a, b = 1, 2`` is two lines, unless what is assigned reads what is assigned to: a swap."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return True
    targets = [part for target in node.targets for part in ast.walk(target)]
    read = {ast.unparse(part) for part in ast.walk(node.value) if isinstance(part, ast.expr)}
    names = {ast.unparse(part) for part in targets if not isinstance(part, ast.Tuple)}
    unpacks = any(isinstance(part, ast.Starred) for part in node.value.elts)
    several = any(isinstance(target, ast.Tuple) for target in node.targets)
    return unpacks or not several or bool(names & read)


def no_literal_in_a_literal(node):
    """``[*("a", "b"), "c"]`` and ``{**{"a": 1}, "b": 2}`` are written as one."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        parts = [part.value for part in node.elts if isinstance(part, ast.Starred)]
    elif isinstance(node, ast.Call):
        parts = [part.value for part in node.args if isinstance(part, ast.Starred)]
    elif isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        parts = [value for key, value in pairs if key is None]
    else:
        parts = []
    return not any(isinstance(part, DISPLAYS) for part in parts)


def no_arithmetic_with_truth(node):
    """``n + (a and not b)`` and ``", more" * (n > 1)`` are an ``if``; ``(n or 0) + 1`` is fine."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
        return True
    return not any(is_truth(part) for part in (node.left, node.right))


def is_truth(node):
    """Whether an expression is True or False by its form."""
    if isinstance(node, ast.BoolOp):
        return isinstance(node.op, ast.And)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, ast.Compare)


def no_check_by_assignment(node):
    """``_ = self.ranges`` hides that a property checks something: a check is a call."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Attribute):
        return True
    return not any(isinstance(each, ast.Name) and each.id == "_" for each in node.targets)


RULES = (
    one_name_an_assignment,
    no_literal_in_a_literal,
    no_arithmetic_with_truth,
    no_check_by_assignment,
)


def sources():
    """Each source file once: folders of the package are links."""
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.resolve() == file:
                yield file


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule):
    broken = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in sources()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if not rule(node)
    ]
    assert broken == []


@pytest.mark.parametrize(
    ("rule", "broken", "kept"),
    [
        pytest.param(
            one_name_an_assignment,
            ["a, b = 1, 2", "self.a, b = c, []", "(a, b), c = d, e", "c = a, b = 1, 2"],
            ["a, b = b, a", "a, b = f()", "a, b = *c, 1", "a = 1, 2", "self.a, b = b, self.a"],
            id="names",
        ),
        pytest.param(
            no_literal_in_a_literal,
            ["[*(1, 2), 3]", "(*[1], 2)", "f(*(1, 2))", "{**{'a': 1}, 'b': 2}"],
            ["[*a, 1]", "f(*a)", "{**a, 'b': 2}", "{**dict.fromkeys('ab')}"],
            id="literals",
        ),
        pytest.param(
            no_arithmetic_with_truth,
            ["n + (a > b)", "', more' * (n > 1)", "n - (a and b)", "n + (not a)"],
            ["(n or 0) + 1", "sum(a > b for a in c)", "a and b + c", "(a > b) & c"],
            id="truth",
        ),
        pytest.param(
            no_check_by_assignment,
            ["_ = self.ranges"],
            ["_ = self.check()", "_, a = b", "ranges = self.ranges"],
            id="checks",
        ),
    ],
)
def test_a_rule_finds_what_it_is_for(rule, broken, kept):
    for texts, expected in ((broken, False), (kept, True)):
        for text in texts:
            found = all(rule(node) for node in ast.walk(ast.parse(text)))
            assert found is expected, text
