"""Profiles: found by folder and class, complete, and refused with the field's path."""

import dataclasses

import pytest

from chipsparse.config import SparsityConfig
from chipsparse.profiles import ASSETS, GenerationDefaults, find_profile, load_profile

PROFILES = sorted((ASSETS / "profiles").glob("*.yaml"))


def field_names(cls):
    for item in dataclasses.fields(cls):
        yield item.name
        if dataclasses.is_dataclass(item.default):
            yield from field_names(type(item.default))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_bundled_profiles_load_and_document_every_field(path):
    profile = load_profile(path)
    assert profile.model_class == path.stem
    assert profile.description
    text = path.read_text(encoding="utf-8")
    for name in (*field_names(SparsityConfig), *field_names(GenerationDefaults)):
        assert f"{name}:" in text


def test_a_models_own_profile_comes_first(tmp_path):
    by_class = find_profile(tmp_path, "WanTransformer3DModel")
    assert by_class.source.endswith("WanTransformer3DModel.yaml")
    (tmp_path / "chipsparse.yaml").write_text(
        "model_class: WanTransformer3DModel\n"
        "generation: {height: 64, num_inference_steps: 7}\n"
        "sparsity: {seed: 3, mlp: {keep_fraction: 0.5}}\n"
    )
    own = find_profile(tmp_path, "WanTransformer3DModel")
    assert own.source == str(tmp_path / "chipsparse.yaml")
    assert own.generation == GenerationDefaults(height=64, num_inference_steps=7)
    assert own.sparsity == SparsityConfig().override({"seed": 3, "mlp.keep_fraction": 0.5})


def test_an_unknown_class_names_the_known_ones():
    with pytest.raises(ValueError, match=r"class UNet; known classes: .*WanTransformer3DModel"):
        find_profile(None, "UNet")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sparsity: {attention: {keep: 1}}", "sparsity.attention.keep: unknown field; allowed: "),
        ("sparsity: {seed: -1}", "sparsity.seed: expected a number at least 0, got -1"),
        ("generation: {height: tall}", "generation.height: expected a whole number, got 'tall'"),
        ("generation: {fps: 3}", "generation.fps: unknown field"),
        ("sparsity: 3", "sparsity: expected a mapping"),
        ("[1, 2]", "the top level: expected a mapping"),
        ("a: [", "not valid YAML"),
        ("sparsity:\n  schedule: {actions: [dense, all]}", "sparsity.schedule.actions[1]: expect"),
    ],
)
def test_bad_profiles_are_refused_by_path(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below
        load_profile(path)
    assert str(error.value).startswith(str(path))
    assert said in str(error.value)


def test_a_missing_profile_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot read the profile"):
        load_profile(tmp_path / "none.yaml")
