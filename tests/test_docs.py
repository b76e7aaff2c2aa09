"""The documentation: links that lead somewhere, examples that run, tables that are up to date."""

import importlib.util
import itertools
import re
import shlex
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import typer
import yaml

import chipsparse
from benchmarks.__main__ import parse as parse_benchmarks
from chipsparse import SparsityConfig, load_profile
from chipsparse.cli.main import app
from chipsparse.config.schedule_forms import FORMS
from chipsparse.pipelines.registry import FAMILIES
from chipsparse.profiles.measured import MEASURED_FILE
from docs.tables import PLACE, TABLES, measured, pages, renewed
from docs.tables import __main__ as write_tables
from tests.markdown_pages import Page

ROOT = Path(__file__).parents[1]
USER_PAGES = [Page(path) for path in pages()]
OTHER_PAGES = ("C*.md", "benchmarks/notes/*.md", "assets/*/README.md", "examples/*/README.md")
PAGES = [*USER_PAGES, *(Page(path) for glob in OTHER_PAGES for path in sorted(ROOT.glob(glob)))]
COMMANDS = typer.main.get_command(app).commands
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
GROUPS = [name for name, value in vars(SparsityConfig()).items() if hasattr(value, "__dict__")]
FIELD = re.compile(rf"(?:{'|'.join(GROUPS)})\.(?!py\b)\w+(?:: .*)?")
MOST_COLUMNS = 9
LONGEST_CELL = 240
README_LINES = 90
MOST_WORDS = 13_400  # outside of generated tables
NAMES = {"ids": lambda page: str(page.path.relative_to(ROOT))}
each_page = pytest.mark.parametrize("page", PAGES, **NAMES)
each_user_page = pytest.mark.parametrize("page", USER_PAGES, **NAMES)


def dead_links(page):
    """Yield the links of a page that lead nowhere, each with the reason."""
    for link in page.links:
        parts = urlsplit(link)
        target = page.path.parent / unquote(parts.path) if parts.path else page.path
        if parts.scheme:
            if parts.scheme != "https" or "." not in parts.netloc:
                yield f"{link}: not an https address"
        elif not target.exists():
            yield f"{link}: there is no {target}"
        elif parts.fragment and parts.fragment not in Page(target).anchors:
            yield f"{link}: {target.name} has no such heading"


@each_page
def test_links_lead_somewhere(page):
    assert list(dead_links(page)) == []


def test_the_index_reaches_every_page():
    linked = set(Page(ROOT / "docs" / "README.md").links)
    assert {page.path.name for page in USER_PAGES} - linked == {"README.md"}
    assert "docs/README.md" in Page(ROOT / "README.md").links


def test_the_pages_stay_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES
    written = (PLACE.sub("", page.text) for page in USER_PAGES)
    assert sum(len(text.split()) for text in written) <= MOST_WORDS


def python_blocks(page):
    return [block for block in page.blocks if block.language == "python"]


@pytest.mark.parametrize("page", [*filter(python_blocks, USER_PAGES[1:])], **NAMES)
def test_examples_run(page, tmp_path, monkeypatch, capsys):
    (tmp_path / "assets").symlink_to(ROOT / "assets")
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for block in python_blocks(page):
        assert block.info == "python run", f"line {block.line}: mark it as `python run`"
        source = "\n" * (block.line - 1) + block.text  # so that errors name the page's own lines
        exec(compile(source, str(page.path), "exec"), names)


@each_page
def test_examples_name_what_is_there(page):
    for name in re.findall(r"\bchipsparse\.(\w+)\(", "".join(map(str, python_blocks(page)))):
        assert hasattr(chipsparse, name)


@pytest.mark.parametrize("page", ["config", "tuning"])
def test_profiles_are_read(page, tmp_path):
    blocks = Page(ROOT / "docs" / f"{page}.md").blocks
    profiles = [block.text for block in blocks if block.language == "yaml"]
    assert profiles
    for text in profiles:
        (tmp_path / "profile.yaml").write_text(text)
        assert load_profile(tmp_path / "profile.yaml").model_class in FAMILIES


def check_field(span):
    """Raise `ValueError` where a span such as ``mlp.density: 0.2`` names no such field."""
    path, colon, value = span.partition(":")
    group, _, field = path.partition(".")
    known = vars(getattr(SparsityConfig(), group)).keys() | (FORMS if group == "schedule" else ())
    if field.partition(".")[0] not in known:
        raise ValueError(f"{group} has no field {field}")
    if colon:
        SparsityConfig().override({path: yaml.safe_load(value)})


def check_options(span):
    """Raise `ValueError` where a command or an option in a sentence is not there."""
    words = span.split()
    named = [words[1]] if words[0] == "chipsparse" and not words[1].startswith("-") else COMMANDS
    if not set(named) <= set(COMMANDS):
        raise ValueError(f"no command {words[1]}")
    known = {"--install-completion"} | {
        option for name in named for item in COMMANDS[name].params for option in item.opts
    }
    if unknown := {word for word in words if re.match(r"--?[a-z]", word)} - known:
        raise ValueError(f"no option {unknown}")


@each_user_page
def test_fields_commands_and_options_in_sentences_are_there(page):
    for span in page.spans:
        if FIELD.fullmatch(span):
            check_field(span)
        elif span.startswith(("chipsparse ", "--")):
            check_options(span)


def check_command(line, folder=ROOT):
    """Raise where a command line could not even start; nothing is run."""
    match shlex.split(line, comments=True):
        case ["chipsparse", name, *arguments] if name in COMMANDS:
            COMMANDS[name].make_context(name, arguments)
        case ["python", "-m", "benchmarks", *arguments]:
            parse_benchmarks(arguments)
        case ["python" | "torchrun", *arguments]:
            modules = [after for word, after in itertools.pairwise(arguments) if word == "-m"]
            there = [importlib.util.find_spec(module) is not None for module in modules]
            there += [(folder / word).is_file() for word in arguments if word.endswith(".py")]
            if not there or not all(there):
                raise ValueError(f"{line}: no such module or script")
        case ["make", *targets] if {word for word in targets if "=" not in word} <= TARGETS:
            pass
        case ["pip", "install", ".", *_]:
            pass
        case ["pytest", folder, *_] if (ROOT / folder).is_dir():
            pass
        case _:
            raise ValueError(f"{line}: not known to the tests")


@each_page
def test_command_lines_can_start(page):
    for block in page.blocks:
        if block.language in ("", "sh", "bash", "console"):
            for line in block.commands:
                check_command(line, page.path.parent)


WRONG = {
    check_field: ("mlp.keep", "attention.delta_rule: sum"),
    check_options: ("chipsparse explain --ramm 8G", "chipsparse describe"),
    check_command: (
        "chipsparse generate a --output out.mp4 --comparee",
        "rm -rf out",
        "python -m benchmarks nothing",
        "python nothing.py",
        "make nothing",
    ),
}


@pytest.mark.parametrize(("check", "text"), [(c, text) for c in WRONG for text in WRONG[c]])
def test_wrong_fields_options_and_commands_are_found(check, text, capsys):
    with pytest.raises((Exception, SystemExit)):
        check(text)


@each_user_page
def test_tables_are_up_to_date_and_can_be_read_on_a_narrow_screen(page):
    assert renewed(page.text) == page.text, "run `python -m docs.tables`"
    for table in page.tables:
        assert {len(row) for row in table} == {len(table[0])} <= set(range(MOST_COLUMNS + 1))
        assert max(len(cell) for row in table for cell in row) <= LONGEST_CELL


def test_every_table_has_one_place():
    places = re.findall(r"<!-- table: (.*?) -->", "".join(page.text for page in USER_PAGES))
    assert sorted(places) == sorted(TABLES)


def test_the_command_writes_what_has_changed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "page.md"
    page = Page(ROOT / "docs" / "config.md")
    path.write_text(page.text.replace("| `0.1` |", "| `0.2` |"))
    monkeypatch.setattr(write_tables, "pages", lambda: [path])
    write_tables.main()
    assert (path.read_text(), capsys.readouterr().out) == (page.text, f"{path}\n")


def test_places_that_cannot_be_filled_are_refused():
    for text in ("<!-- table: nothing -->\n<!-- end of table -->", "<!-- table: config -->\n"):
        with pytest.raises(ValueError, match=r"no table is called 'nothing'|must end with"):
            renewed(text)


def figures():
    """Yield sentences of the pages with the figures that the records have now."""
    yield "performance", measured.USUAL
    records = measured.read("attention_kernels_h200.json")
    sums = measured.find(records, op="dense_attention_column_sums", backend="gluon")
    ratios = [result["latency_ms"] / result["baseline_ms"] for result in sums]
    yield "limits", f"takes {min(ratios):.2f} to {max(ratios):.2f} times that of a dense step"
    cases = ("merge, keep 10%, attention", "control: raster order, merge, keep 10%, attention")
    quality = [measured.find(measured.read("quality_h200.json"), case=case) for case in cases]
    tiles, rows = (records[0]["psnr_median"] for records in quality)
    yield "method", f"is worth {tiles - rows:.1f} dB at 10 % of the columns"
    moved = measured.find(measured.read("offload_h200.json"), mlp="dense")
    yield "limits", f"alone {max(item['to_device_bytes'] for item in moved) / 1e9:.0f} GB for one"


def test_what_was_measured_is_up_to_date():
    assert MEASURED_FILE.read_text() == measured.measured_classes(), "run `python -m docs.tables`"


@pytest.mark.parametrize(("name", "sentence"), list(figures()))
def test_figures_in_sentences_are_those_of_the_records(name, sentence):
    assert sentence in " ".join((ROOT / "docs" / f"{name}.md").read_text().split())
