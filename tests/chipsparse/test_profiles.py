"""Profiles: found by folder and class, complete, and refused with the field's path."""

import dataclasses
import os

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
        (
            "sparsity: {seed: 1}\nsparsity: {seed: 2}",
            "not valid YAML (sparsity stands twice, in line 2, column 1)",
        ),
        ("sparsity: {mlp: {enabled: true, enabled: false}}", "enabled stands twice"),
        (f"sparsity: {'[' * 3000}{']' * 3000}", "not valid YAML (nested too deeply)"),
        (f"sparsity: {{seed: {'9' * 5000}}}", "not valid YAML (Exceeds the limit"),
        ("description: 2024-99-99", "not valid YAML (month must be"),
        ("#" + "x" * (1 << 20), "1,048,577 bytes are too many for a profile"),
        ("sparsity: {schedule: {actions: []}}", "sparsity.schedule.actions: the first step must"),
        (
            "sparsity: {schedule: {actions: [dense, sparse]}}",
            "sparsity.schedule.actions[1]: a sparse",
        ),
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


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ValueError, match=r"cannot read the profile .it is no regular file"):
        load_profile(tmp_path / "pipe.yaml")


ANCHORS = "a0: &a0 {x0: 1, y0: 1}\n" + "".join(
    f"a{n}: &a{n} {{{{<<: [{{merged}}], x{n}: 1}}}}\n".format(merged=", ".join([f"*a{n - 1}"] * 9))
    for n in range(1, 9)
)


@pytest.mark.parametrize("text", [ANCHORS, ANCHORS.replace("<<", "z")], ids=["merged", "nested"])
def test_aliases_of_aliases_are_refused_with_a_short_message(tmp_path, text):
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is checked below
        load_profile(path)
    assert str(error.value).startswith(str(path))
    assert len(str(error.value)) < 1000


def test_anchors_and_merged_fields_may_be_used(tmp_path):
    path = tmp_path / "anchors.yaml"
    path.write_text(
        "sparsity:\n  layers:\n    - &first {layers: 0, mlp: 0.5}\n    - {<<: *first, layers: 1}\n"
    )
    assert [budget.mlp for budget in load_profile(path).sparsity.layers] == [0.5, 0.5]


def test_every_field_may_be_left_out(tmp_path):
    path = tmp_path / "nothing.yaml"
    path.write_text("")
    profile = load_profile(path)
    assert profile.sparsity == SparsityConfig()
    assert profile.serves("WanTransformer3DModel")
    assert repr(profile) == f"<Profile for any model from {path}>"
    other = dataclasses.replace(profile, model_class="FluxTransformer2DModel")
    assert not other.serves("WanTransformer3DModel")
