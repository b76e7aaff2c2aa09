"""Which profile a command takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from chipsparse.cli.errors import UserError
from chipsparse.cli.planning.request import choose_profile
from chipsparse.config import SparsityConfig

MODEL: Any = SimpleNamespace(location="model", transformer_class="WanTransformer3DModel")


@pytest.fixture
def chosen(tmp_path):
    def choose(text=None, *, quality=None, steps=None, model=MODEL, **more):
        path = None
        if text is not None:
            path = tmp_path / "mine.yaml"
            path.write_text(text)
        options: Any = SimpleNamespace(
            config=path,
            quality=quality,
            steps=steps,
            memory_budgets=lambda: {"memory.vram": "1G"},
        )
        return choose_profile(options, model, **more)

    return choose


def test_a_profile_that_names_no_class_is_for_every_model(chosen):
    assert chosen("").sparsity == SparsityConfig().override({"memory.vram": "1G"})
    assert chosen("sparsity: {tile: null}").sparsity.tile is None


def test_a_profile_for_another_class_is_refused(chosen):
    said = r"mine.yaml is for FluxTransformer2DModel, but the model model has a WanTransformer3DM"
    with pytest.raises(UserError, match=said):
        chosen("model_class: FluxTransformer2DModel")


def test_a_models_own_profile_for_another_class_is_named(chosen, tmp_path):
    (tmp_path / "chipsparse.yaml").write_text("model_class: FluxTransformer2DModel")
    model: Any = SimpleNamespace(location=str(tmp_path), transformer_class="WanTransformer3DModel")
    with pytest.raises(UserError, match=r"chipsparse.yaml is for FluxTransformer2DModel, but the"):
        chosen(model=model, optional=True)


def test_a_quality_is_one_of_the_profile_that_is_given(chosen):
    text = "qualities: {fast: {tile: null}}"
    found = chosen(text, quality="fast")
    assert (found.quality, found.sparsity.tile) == ("fast", None)
    assert found.sparsity.memory.vram == found.qualities["fast"].memory.vram == 1 << 30
    with pytest.raises(UserError, match=r"mine.yaml does not say what faithful is; it has fast"):
        chosen(text, quality="faithful")
    assert chosen().quality == "balanced"
    assert chosen(quality="published").sparsity.schedule.warmup_steps == 6


def test_a_model_without_a_profile_takes_a_quality_that_is_asked_for(chosen):
    other: Any = SimpleNamespace(location="model", transformer_class="NewTransformer3DModel")
    with pytest.raises(UserError, match=r"class NewTransformer3DModel .* --quality balanced"):
        chosen(model=other)
    assert chosen(model=other, optional=True) is None
    found = chosen(model=other, quality="fast")
    assert found.is_general
    assert found.quality == "fast"


def test_what_was_tuned_for_many_steps_is_not_used_for_few(chosen):
    tuned = "tuned: {model: mine, num_inference_steps: 50}\nsparsity: {schedule: {full_share: 0.1}}"
    assert chosen(tuned).instead is None
    taken = chosen(tuned, steps=4, quality="fast")
    assert "was tuned for 50 steps and is not used for 4" in taken.instead
    assert taken.quality == "fast"
    assert taken.sparsity.memory.vram is not None
    assert taken.sparsity.schedule.least_full == 8
