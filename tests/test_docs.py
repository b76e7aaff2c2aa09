"""The documentation: links that lead somewhere, examples that run, tables that are up to date."""

import ast
import importlib.util
import itertools
import re
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import pytest
import typer
import yaml

import chipsparse
from benchmarks.__main__ import parse as parse_benchmarks
from benchmarks.records import write_compact
from chipsparse import SparsityConfig, load_profile
from chipsparse.cli.main import app
from chipsparse.common.validation import option
from chipsparse.old_names import GONE, RENAMED
from chipsparse.pipelines.registry import ADAPTERS
from docs.tables import TABLES, config, measured, pages, renewed
from docs.tables import __main__ as write_tables
from tests.markdown_pages import Page, commands
from tests.variants import slow

ROOT = Path(__file__).parents[1]
DOCS = [Page(path) for path in pages()]
USER_PAGES = [Page(ROOT / "README.md"), *DOCS]
PAGES = [
    *USER_PAGES,
    Page(ROOT / "CONTRIBUTING.md"),
    Page(ROOT / "CHANGELOG.md"),
    *(Page(path) for path in sorted(ROOT.glob("benchmarks/notes/*.md"))),
    *(Page(path) for path in sorted(ROOT.glob("assets/*/README.md"))),
]
SHELLS = ("", "sh", "bash", "console")
CHIPSPARSE = typer.main.get_command(app)
COMMANDS = CHIPSPARSE.commands


def options_of(command):
    return {text for each in command.params for text in (*each.opts, *each.secondary_opts)}


OPTIONS = {name: options_of(command) for name, command in COMMANDS.items()}
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
MOST_COLUMNS = 9
LONGEST_CELL = 240
SLOW = ("parallel", "tuning")  # pages whose examples take long


def name_of(page):
    return str(page.path.relative_to(ROOT)) if page.path.is_relative_to(ROOT) else page.path.name


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
each_user_page = pytest.mark.parametrize("page", USER_PAGES, ids=name_of)
each_docs_page = pytest.mark.parametrize("page", DOCS, ids=name_of)


@pytest.fixture
def page_with(tmp_path):
    """A page with some text."""

    def write(text):
        path = tmp_path / "page.md"
        path.write_text(text)
        return Page(path)

    return write


# Links.


def dead_links(page):
    """What is wrong with the links of a page."""
    for link in page.links:
        parts = urlsplit(link)
        if parts.scheme:
            if parts.scheme != "https" or "." not in parts.netloc:
                yield f"{link}: not an https address"
            continue
        target = page.path.parent / unquote(parts.path) if parts.path else page.path
        if not target.exists():
            yield f"{link}: there is no {target}"
        elif parts.fragment and parts.fragment not in Page(target).anchors:
            yield f"{link}: {target.name} has no such heading"


@each_page
def test_links_lead_somewhere(page):
    assert list(dead_links(page)) == []


def test_every_page_of_the_documentation_is_reached_from_its_index():
    linked = set(Page(ROOT / "docs" / "README.md").links)
    assert {page.path.name for page in DOCS} - linked == {"README.md"}
    assert any(link.startswith("docs/") for link in Page(ROOT / "README.md").links)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](nothing.md)", "there is no"),
        ("![a](nothing.png)", "there is no"),
        ("# One\n\n[a](#two)", "no such heading"),
        ("[a](http://example.org)", "not an https address"),
        ("[a][b]\n\n[b]: nothing.md", "there is no"),
    ],
)
def test_dead_links_are_found(page_with, text, problem):
    (found,) = dead_links(page_with(text))
    assert problem in found


def test_anchors_are_those_of_github(page_with):
    text = "# What `a.b_c` says\n\n## The same\n\n## The same\n\n### [A link](x), and *more*!"
    expected = {"what-ab_c-says", "the-same", "the-same-1", "a-link-and-more"}
    assert page_with(text).anchors == expected


# Code in Python.


def python_blocks(page):
    return [block for block in page.blocks if block.language == "python"]


@pytest.mark.parametrize(
    "page",
    [
        (slow if page.path.stem in SLOW else pytest.param)(page, id=page.path.stem)
        for page in DOCS
        if python_blocks(page)
    ],
)
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    """All examples of a page one after the other, as a reader would run them."""
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for block in python_blocks(page):
        assert block.info == "python run", f"line {block.line}: mark it as `python run`"
        source = "\n" * (block.line - 1) + block.text  # so that errors name the page's own lines
        exec(compile(source, str(page.path), "exec"), names)


@each_page
def test_examples_that_take_too_long_to_run_name_what_there_is(page):
    for block in python_blocks(page):
        assert unknown_names(block.text) == []


def unknown_names(source):
    """What an example takes from chipsparse or other modules that is not there."""
    unknown = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "chipsparse" and not hasattr(chipsparse, node.attr):
                unknown.append(node.attr)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            unknown += [each.name for each in node.names if not has(module, each.name)]
    return unknown


def has(module, name):
    """Whether it can be imported from there, be it a module that nobody has imported yet."""
    if hasattr(module, name):
        return True
    path = f"{module.__name__}.{name}"
    return hasattr(module, "__path__") and importlib.util.find_spec(path) is not None


def test_names_that_are_not_there_are_found():
    assert unknown_names("import chipsparse\nchipsparse.enabel(pipe)") == ["enabel"]
    assert unknown_names("from chipsparse.plan import Plan") == ["Plan"]
    assert unknown_names("from chipsparse.measure import quality, quantity") == ["quantity"]


# Profiles and fields.


@each_page
def test_profiles_are_read(page, tmp_path):
    for block in page.blocks:
        if block.language == "yaml":
            file = tmp_path / "profile.yaml"
            file.write_text(block.text)
            assert load_profile(file).model_class in ADAPTERS


def test_profiles_are_among_the_examples():
    found = {page.path.stem for page in DOCS for block in page.blocks if block.language == "yaml"}
    assert found == {"config", "tuning"}


def check_field(span):
    """Raises `ValueError` where a span such as ``mlp.density: 0.2`` names no such field."""
    path, colon, value = span.partition(":")
    group, _, field = path.partition(".")
    fields = vars(getattr(SparsityConfig(), group))
    if field not in fields:
        raise ValueError(f"{group} has no field {field}")
    if colon:
        SparsityConfig().override({path: yaml.safe_load(value)})


GROUPS = [name for name, value in vars(SparsityConfig()).items() if hasattr(value, "__dict__")]
OLD_NAMES = {entry.replace(" =", ":") for entry in (*RENAMED, *GONE)}
FIELD = re.compile(rf"(?:{'|'.join(GROUPS)})\.(?!py\b)\w+(?:: .*)?")


@each_page
def test_fields_of_the_config_are_there(page):
    for span in page.spans:
        old = span in OLD_NAMES and page.path.name in ("CHANGELOG.md", "config.md")
        if FIELD.fullmatch(span) and not old:
            check_field(span)


@pytest.mark.parametrize(
    "span", ["mlp.keep", "attention.delta_rule: sum", "memory.vram: much", "schedule.skip: 3"]
)
def test_fields_that_are_not_there_are_found(span):
    assert FIELD.fullmatch(span)
    with pytest.raises(ValueError, match=r"no field|expected"):
        check_field(span)


# Commands.


def check_command(line, folder):
    """Raises where a command line could not even start; runs nothing."""
    words = shlex.split(line, comments=True)
    match words:
        case ["chipsparse", name, *arguments] if name in COMMANDS:
            COMMANDS[name].make_context(name, arguments)
        case ["python", "-m", "benchmarks", *arguments]:
            parse_benchmarks(arguments)
        case ["python" | "torchrun", *arguments]:
            modules = [after for word, after in itertools.pairwise(arguments) if word == "-m"]
            scripts = [word for word in arguments if word.endswith(".py")]
            missing = [each for each in modules if importlib.util.find_spec(each) is None]
            missing += [each for each in scripts if not (folder / each).is_file()]
            if missing or not (modules or scripts):
                raise ValueError(f"{line}: there is no {missing}")
        case ["make", *targets]:
            if unknown := [each for each in targets if "=" not in each and each not in TARGETS]:
                raise ValueError(f"{line}: there is no {unknown}")
        case ["pip", "install", ".", *_]:
            pass
        case _:
            raise ValueError(f"{line}: not known to the tests; teach them what it may be")


@each_page
def test_command_lines_can_start(page):
    for block in page.blocks:
        if block.language in SHELLS:
            for line in commands(block):
                check_command(line, page.path.parent)


@pytest.mark.parametrize(
    "line",
    [
        "chipsparse generate a --output out.mp4 --comparee",
        "chipsparse generate --compare",
        "chipsparse generate a -o out.mp4 --steps many",
        "chipsparse paint",
        "python -m benchmarks nothing",
        "python -m benchmarks.nothing",
        "python nothing.py",
        "make nothing",
        "rm -rf out",
    ],
)
def test_command_lines_that_cannot_start_are_found(line, tmp_path, capsys):
    with pytest.raises((Exception, SystemExit)):
        check_command(line, tmp_path)


def unknown_options(span):
    """What of a command or option inside a sentence is not there."""
    words = span.split()
    if words[0] == "chipsparse":
        name = words[1]
        if name.startswith("-"):  # of the command as a whole
            return unknown_in(words, options_of(CHIPSPARSE))
        return [name] if name not in COMMANDS else unknown_in(words, OPTIONS[name])
    return unknown_in(words[:1], set.union(*OPTIONS.values()))


def unknown_in(words, known):
    return [word for word in words if re.match(r"--?[a-z]", word) and word not in known]


@each_user_page
def test_commands_and_options_in_sentences_are_there(page):
    for span in page.spans:
        if span.startswith(("chipsparse ", "--")):
            assert unknown_options(span) == [], span


def test_options_that_are_not_there_are_found():
    assert unknown_options("chipsparse explain --model M --ramm 8G") == ["--ramm"]
    assert unknown_options("chipsparse describe") == ["describe"]
    assert unknown_options("--vramm 8G") == ["--vramm"]


# Tables.


@each_docs_page
def test_tables_are_up_to_date(page):
    assert renewed(page.text) == page.text, "run `python -m docs.tables`"


def test_every_table_has_one_place():
    places = re.findall(r"<!-- table: (.*?) -->", "".join(page.text for page in DOCS))
    assert sorted(places) == sorted(TABLES)


def test_a_table_that_is_out_of_date_is_written_anew():
    page = next(page for page in DOCS if page.path.stem == "config")
    assert renewed(page.text.replace("| `0.1` |", "| `0.2` |")) == page.text


def test_fields_are_described_in_words():
    @dataclass(frozen=True)
    class Inner:
        """One thing."""

    @dataclass(frozen=True)
    class Outer:
        """Some things.

        Raises:
            ValueError: never.
        """

        share: float | Literal["all"] | None = option(None, "a share", minimum=0, maximum=1)
        steps: tuple[int, ...] = option((1, 2), "a | b", minimum=0)
        inner: Inner | None = option(None, "one")
        inners: tuple[Inner, ...] = option((), "several")

    assert config.section("a.b", Outer).splitlines() == [
        "### `a.b`",
        "",
        "Some things.",
        "",
        "| field | type | default | allowed | what it is |",
        "| --- | --- | --- | --- | --- |",
        "| `share` | number or word or null | `null` | 0 to 1, `all` | a share |",
        "| `steps` | list of whole numbers | `[1, 2]` | at least 0 | a \\| b |",
        "| `inner` | group of fields | `null` | [below](#abinner) | one |",
        "| `inners` | list of groups of fields | `[]` | [below](#abinners) | several |",
    ]
    assert [path for path, _ in config.groups(Outer, "")] == ["", "inner", "inners"]


def test_the_command_writes_what_has_changed(page_with, monkeypatch, capsys):
    start, end = "<!-- table: other models -->\n", "<!-- end of table -->"
    page = page_with(f"# Title\n\n{start}old\n\n{end}\n\nText.\n")
    monkeypatch.setattr(write_tables, "pages", lambda: [page.path])
    write_tables.main()
    table = f"{start}\n{TABLES['other models']()}\n\n{end}"
    assert page.path.read_text() == f"# Title\n\n{table}\n\nText.\n"
    assert capsys.readouterr().out == f"{page.path}\n"
    write_tables.main()
    assert capsys.readouterr().out == ""


def test_8_bits_stand_beside_both_baselines(tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    common = {"case": "wan1b_480p", "dtype": "bfloat16", "density": 0.1, "mlp_density": 0.3}
    common |= dict.fromkeys(("device", "torch", "triton", "diffusers"), "some")
    common |= {"dense_ms": 900.0, "precision": "fp8"}
    sparse = {"schedule": "published", "actions": {"dense": 12, "sparse": 38}, "refresh_ms": 950.0}
    sparse |= {"sparse_ms": 300.0, "linears": "fp8", "baseline_step_ms": 800.0}
    sparse |= {"baseline_ms": 40e3, "latency_ms": 20e3, "speedup": 2.0}
    skipped = {"schedule": "balanced", "actions": {"dense": 15, "skip": 35}, "refresh_ms": None}
    skipped |= {"sparse_ms": None, "linears": "bfloat16", "baseline_step_ms": 1000.0}
    skipped |= {"baseline_ms": 50e3, "latency_ms": 16e3, "speedup": 3.125}
    write_compact([common | sparse, common | skipped], tmp_path / "some.json")
    head, _, first, second, *_ = measured.full_size_8_bits("some.json").splitlines()
    assert len(head.split("|")) - 2 <= MOST_COLUMNS
    assert first == (
        "| Wan 1.3B 480p | fp8, fp8 | published (0.1, 0.3) | 12 dense, 38 sparse | 800 (1,000) "
        "| 900 | 950 | 300 | 2.00x (2.50x) |"
    )
    assert second == (
        "| Wan 1.3B 480p | bf16, fp8 | balanced | 15 dense, 35 skip | 1,000 | 900 | - | - | 3.12x |"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<!-- table: nothing -->\n<!-- end of table -->", "no table is called 'nothing'"),
        ("<!-- table: config -->\n", "must end with"),
    ],
)
def test_places_that_cannot_be_filled_are_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        renewed(text)


# Figures.


def record(file, **values):
    (found,) = measured.find(measured.read(file), **values)
    return found


def mean_gain_db(case, over):
    """Mean of the paired differences in PSNR of two rows of tiny-wan's quality."""
    pairs = [record("quality_h200.json", case=name)["psnr"] for name in (case, over)]
    return statistics.fmean(a - b for a, b in zip(*pairs, strict=True))


def figures():
    """Sentences of the pages with the figures that the records have now."""
    sums = measured.find(
        measured.read("attention_kernels_h200.json"),
        op="dense_attention_column_sums",
        backend="gluon",
    )
    ratios = [each["latency_ms"] / each["baseline_ms"] for each in sums]
    yield "limits", f"takes {min(ratios):.2f} to {max(ratios):.2f} times that of a dense step"
    merge = "merge, keep 10%, attention"
    raster = record("quality_h200.json", case=f"control: raster order, {merge}")["psnr_median"]
    gain = record("quality_h200.json", case=merge)["psnr_median"] - raster
    yield "method", f"On tiny-wan it is worth {gain:.1f} dB at 10 % of the columns"
    smaller, larger = (mean_gain_db(f"{merge}, groups of {n} rows", merge) for n in (64, 192))
    yield "tuning", f"on tiny-wan 64 gain {smaller:.1f} dB and 192 lose {-larger:.1f}"
    mlp = record("quality_h200.json", case="control: MLP only")["psnr_median"]
    yield "tuning", f"on tiny-wan the MLP alone at 30 % is at {mlp:.0f} dB"
    moved = measured.find(measured.read("offload_h200.json"), mlp="dense")
    ratios = [each["latency_ms"] / each["baseline_ms"] for each in moved]
    yield "tuning", f"took {min(ratios):.2f} to {max(ratios):.2f} of its time"
    caches_gb = max(each["to_device_bytes"] for each in moved) / 1e9
    yield "limits", f"those of attention alone {caches_gb:.0f} GB"


@pytest.mark.parametrize(("name", "sentence"), list(figures()))
def test_figures_in_sentences_are_those_of_the_records(name, sentence):
    page = next(page for page in DOCS if page.path.stem == name)
    assert sentence in " ".join(page.text.split())


@each_page
def test_rows_have_a_cell_for_each_column(page):
    for table in page.tables:
        assert {len(row) for row in table} == {len(table[0])}, table[0]


@each_docs_page
def test_pages_can_be_read_on_a_narrow_screen(page):
    for table in page.tables:
        assert len(table[0]) <= MOST_COLUMNS, table[0]
        assert max(len(cell) for row in table for cell in row) <= LONGEST_CELL
