"""The verbs as they are used in notebooks, and with what is no pipeline or config."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

import chipsparse
from chipsparse import AttentionConfig, SparsityConfig
from chipsparse.pipelines.adapter import ADAPTER
from tests.pipelines.model_state import state_of
from tests.pipelines.test_layer_budgets import CONFIG, generate
from tests.tiny_models import tiny_wan_pipeline


@pytest.fixture(scope="module")
def shared():
    return tiny_wan_pipeline()


@pytest.fixture
def pipe(shared):
    """One pipeline for all of these tests, each of which must leave it as it was."""
    before = state_of(shared.transformer)
    yield shared
    assert type(shared) is WanPipeline
    assert not [name for name in vars(shared) if "chipsparse" in name]
    assert state_of(shared.transformer) == before


def wan(pipe, **arguments):
    return generate(pipe, num_frames=1, guidance_scale=1.0, **arguments)


# Notebooks.


def test_the_way_back_without_the_handle(pipe):
    handle = chipsparse.enable(pipe, CONFIG)
    assert handle.enabled
    chipsparse.disable(pipe)
    assert not handle.enabled
    handle.disable()  # may always be called
    with pytest.raises(ValueError, match="this WanPipeline is not patched by chipsparse"):
        chipsparse.disable(pipe)


def test_the_way_back_through_another_pipeline(pipe):
    other = type(pipe)(**pipe.components)
    handle = chipsparse.enable(pipe, CONFIG)
    chipsparse.disable(other)
    assert not handle.enabled


def test_running_a_cell_again_exchanges_the_patch(pipe):
    dense = wan(pipe)
    first = chipsparse.enable(pipe, CONFIG)
    second = chipsparse.enable(pipe, SparsityConfig.dense())
    assert (first.enabled, second.enabled) == (False, True)
    assert torch.equal(wan(pipe), dense)
    assert len(second.report.steps) == 5
    assert first.report.steps == []
    with second:
        pass


@pytest.mark.parametrize("config", ["no.yaml", CONFIG.override({"layers": [{"layers": 0}]})])
def test_a_patch_stays_where_the_new_one_is_refused(pipe, config):
    with chipsparse.enable(pipe, CONFIG) as handle:
        with pytest.raises(ValueError, match=r"patched already|cannot read"):
            chipsparse.enable(pipe, config)
        assert handle.enabled
    handle = chipsparse.enable(pipe, CONFIG)
    with pytest.raises(ValueError, match="cannot read"):
        chipsparse.enable(pipe, "no.yaml")
    assert handle.enabled
    handle.disable()


def test_another_pipelines_patch_is_not_taken_away(pipe):
    other = type(pipe)(**pipe.components)
    handle = chipsparse.enable(pipe, CONFIG)
    with pytest.raises(ValueError, match=r"patched already; .* or chipsparse.disable\(pipe\), fi"):
        chipsparse.enable(other, CONFIG)
    assert handle.enabled
    handle.disable()


def test_a_handle_that_is_used_up_is_refused(pipe):
    handle = chipsparse.enable(pipe, CONFIG)
    with handle, pytest.raises(RuntimeError, match="with block is open already"):
        handle.__enter__()
    with pytest.raises(RuntimeError, match="this handle is used up"), handle:
        pass


# What is no pipeline, and what is no config.


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (type, r"got the class WanPipeline; load one with WanPipeline.from_pretrained\(...\)"),
        (lambda pipe: pipe.transformer, "got a WanTransformer3DModel; pass the pipeline that has"),
        (lambda _: None, "expected a diffusers pipeline, got None"),
        (lambda _: "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", "diffusers pipeline, got 'Wan-AI/Wan2.1"),
        (lambda pipe: pipe.components, "expected a diffusers pipeline, got {"),
    ],
)
@pytest.mark.parametrize("verb", [chipsparse.enable, chipsparse.disable])
def test_what_is_no_pipeline_is_refused(pipe, wrong, said, verb):
    with pytest.raises(ValueError, match=said) as error:
        verb(wrong(pipe))
    assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "wrong", [{"attention.density": 0.2}, 5, b"profile.yaml", AttentionConfig(), ["a.yaml"]]
)
def test_what_is_no_config_is_refused(pipe, wrong):
    with pytest.raises(ValueError, match="expected a SparsityConfig, a Profile or the path") as err:
        chipsparse.enable(pipe, wrong)
    assert "SparsityConfig().override(...) makes a config of a dict" in str(err.value)
    assert ADAPTER not in vars(pipe.transformer)


def test_a_minimal_profile_is_for_every_model(pipe, tmp_path):
    (tmp_path / "nothing.yaml").write_text("")
    with chipsparse.enable(pipe, tmp_path / "nothing.yaml") as handle:
        assert handle.config == SparsityConfig()


@pytest.mark.parametrize("arguments", [{}, {"quality": "fast"}])
def test_the_folders_profile_of_another_class_is_refused(pipe, tmp_path, arguments):
    file = tmp_path / "chipsparse.yaml"
    file.write_text("model_class: FluxTransformer2DModel\nqualities: {fast: {}}")
    pipe.register_to_config(_name_or_path=str(tmp_path))
    try:
        with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below
            chipsparse.enable(pipe, **arguments)
    finally:
        pipe.register_to_config(_name_or_path="")
    assert str(error.value) == (
        f"{file} is a profile for FluxTransformer2DModel, but the pipeline has a "
        "WanTransformer3DModel"
    )
    assert ADAPTER not in vars(pipe.transformer)


def test_a_quality_is_one_of_the_profile(pipe, tmp_path):
    profile = chipsparse.find_profile(None, "WanTransformer3DModel")
    for arguments, name in (
        ({}, "balanced"),
        ({"quality": "fast"}, "fast"),
        ({"config": profile, "quality": "faithful"}, "faithful"),
        ({"config": profile.of_quality("published")}, "published"),
    ):
        with chipsparse.enable(pipe, **arguments) as handle:
            assert handle.config == profile.qualities[name]
            assert handle.report.to_dict()["quality"] == name
            assert f"quality     {name}" in handle.summary()
    with chipsparse.enable(pipe, CONFIG) as handle:
        assert handle.report.to_dict()["quality"] is None
        assert "quality" not in handle.summary()


def test_a_schedule_in_place_of_all_qualities_is_in_the_report_of_each_generation(pipe, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("sparsity: {schedule: {full_share: 0.5}}\nqualities: {balanced: , fast: }")
    with chipsparse.enable(pipe, file) as handle:
        for _ in range(2):
            generate(pipe)
            (note,) = (each for each in handle.report.notes if "mine.yaml" in each)
            assert note.startswith(f"{file}: sparsity.schedule takes the place of the schedule")
            assert "balanced, fast" in note
            assert note in handle.summary()


def test_a_quality_that_cannot_be_is_refused(pipe, tmp_path):
    (tmp_path / "plain.yaml").write_text("sparsity: {seed: 3}")
    for arguments, said in (
        ({"quality": "best"}, "no quality 'best'; known are faithful, balanced, fast, published"),
        ({"quality": ["fast"]}, r"no quality \['fast'\]; known are"),
        ({"config": CONFIG, "quality": "fast"}, "'fast' is one of a profile's, and a SparsityConf"),
        ({"config": tmp_path / "plain.yaml", "quality": "fast"}, "it has no qualities"),
    ):
        with pytest.raises(ValueError, match=said):
            chipsparse.enable(pipe, **arguments)
        assert ADAPTER not in vars(pipe.transformer)


def test_the_report_of_a_pipeline_that_was_loaded_from_a_path(pipe):
    name = "_name_or_path"
    pipe.register_to_config(**{name: Path("models/tiny")})
    try:
        with chipsparse.enable(pipe, CONFIG) as handle:
            data = json.loads(json.dumps(handle.report.to_dict()))
    finally:
        pipe.register_to_config(**{name: ""})
    assert data["pipeline"] == {"class": "WanPipeline", "location": "models/tiny"}


def test_everything_that_is_exported_is_there():
    for name in chipsparse.__all__:
        assert getattr(chipsparse, name).__module__.startswith("chipsparse.")
    assert set(chipsparse.__all__) <= set(dir(chipsparse))
    with pytest.raises(AttributeError, match="no attribute 'enabled'"):
        chipsparse.enabled  # noqa: B018


def test_what_a_notebook_shows_of_a_handle(pipe):
    with chipsparse.enable(pipe, CONFIG) as handle:
        assert repr(handle) == f"<Handle of a WanPipeline, enabled: {CONFIG!r}>"
        wan(pipe)
        lines = handle.summary().splitlines()
        assert lines[:2] == ["chipsparse  enabled", f"config      {CONFIG!r}"]
        assert lines[3].endswith("5: 3 sparse, 1 dense, 1 refresh")
        assert handle._repr_html_().startswith("<table>")
    assert handle.summary().startswith("chipsparse  disabled")
    assert "disabled" in repr(handle)


def test_the_package_says_that_it_is_typed():
    assert (Path(chipsparse.__file__).parent / "py.typed").is_file()
