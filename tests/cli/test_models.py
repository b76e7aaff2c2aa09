"""`chipsparse models`: every adapter is listed, with what it says of itself."""

import json

import pytest

from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.pipelines.other_classes import OTHER_CLASSES
from chipsparse.pipelines.registry import ADAPTERS
from chipsparse.pipelines.wan import WanAdapter
from tests.cli.conftest import command


@pytest.fixture
def models(monkeypatch):
    """What the command prints, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        result = command("models", *arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        return result.stdout

    return run


@pytest.fixture
def listed(models):
    """The entries of `--json`, by transformer class."""

    def run():
        return {row["transformer_class"]: row for row in json.loads(models("--json"))["models"]}

    return run


def words(text):
    return " ".join(text.split())


def test_every_adapter_is_listed_with_what_it_says(models, listed):
    page, rows = models(), listed()
    assert list(rows) == list(ADAPTERS)
    lines = page.splitlines()
    starts = [next(i for i, line in enumerate(lines) if f" {name} " in line) for name in rows]
    assert starts == sorted(starts)
    for (name, adapter), start, end in zip(
        ADAPTERS.items(), starts, [*starts[1:], len(lines)], strict=True
    ):
        row, paragraph = rows[name], words(" ".join(lines[start:end]))
        assert row["families"] == adapter.families
        for key in ("attention", "mlp", "text_columns", "guidance"):
            assert row[key]
            assert row[key] in paragraph
        for part, text in (("attention", adapter.sparse_attention), ("mlp", adapter.sparse_mlp)):
            reason = adapter.masked_parts.get(part)
            assert row[part] == (text if reason is None else f"dense: {reason}")
        argument = adapter.guidance_argument
        assert row["guidance"].startswith("none; " if argument is None else f"{argument}: ")


def test_the_last_paragraph_is_about_all_others(models):
    page = models()
    assert "other classes refused; of those" in words(page)
    content = json.loads(models("--json"))
    assert content["others"] in words(page)
    assert content["pipelines"] in words(page)
    assert list(content) == ["chipsparse", "models", "pipelines", "others", "other_classes"]


def test_there_is_a_line_for_each_other_class(models):
    lines = json.loads(models("--json"))["other_classes"]
    page = words(models())
    assert list(lines) == list(OTHER_CLASSES)
    for name, reason in OTHER_CLASSES.items():
        assert lines[name] == f"refused: {reason}"
        assert f"{name} {lines[name]}" in page


def test_no_line_is_longer_than_the_terminal(models):
    assert max(map(len, models().splitlines())) <= 80


@pytest.mark.parametrize(
    ("name", "column", "text"),
    [
        ("WanTransformer3DModel", "text_columns", "none in self-attention"),
        ("FluxTransformer2DModel", "text_columns", "before the image's, always kept"),
        ("ChromaTransformer2DModel", "text_columns", "before the image's"),
        ("ChromaTransformer2DModel", "attention", "dense: the pipeline passes an attention mask"),
        ("WanTransformer3DModel", "guidance", "guidance_scale: a second call per step"),
        (
            "FluxTransformer2DModel",
            "guidance",
            "true_cfg_scale: a second call per step",
        ),
    ],
)
def test_what_is_said_of_the_models(listed, name, column, text):
    assert listed()[name][column] == text


def test_an_adapter_that_says_nothing_has_a_row_as_well(models, monkeypatch):
    class Silent(ModelAdapter):
        transformer_class = "WanTransformer3DModel"
        guides_in_batch = True
        planned_layout = WanAdapter.planned_layout

    monkeypatch.setitem(ADAPTERS, "WanTransformer3DModel", Silent)
    row = json.loads(models("--json"))["models"][0]
    assert row == {
        "transformer_class": "WanTransformer3DModel",
        "families": "",
        "attention": "self-attention",
        "mlp": "feed-forward",
        "text_columns": "none in self-attention",
        "guidance": "guidance_scale: in the same call, as the other half of the batch",
    }
    assert "WanTransformer3DModel" in models()
