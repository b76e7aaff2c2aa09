"""Which profile a command takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from chipsparse.cli.errors import UserError
from chipsparse.cli.request import choose_profile
from chipsparse.config import SparsityConfig

MODEL: Any = SimpleNamespace(location="model", transformer_class="WanTransformer3DModel")


@pytest.fixture
def chosen(tmp_path):
    def choose(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        options: Any = SimpleNamespace(config=path, memory_budgets=lambda: {"memory.vram": "1G"})
        return choose_profile(options, MODEL)

    return choose


def test_a_profile_that_names_no_class_is_for_every_model(chosen):
    assert chosen("").sparsity == SparsityConfig().override({"memory.vram": "1G"})
    assert chosen("sparsity: {seed: 3}").sparsity.seed == 3


def test_a_profile_for_another_class_is_refused(chosen):
    said = r"mine.yaml is for FluxTransformer2DModel, but the model model has a WanTransformer3DM"
    with pytest.raises(UserError, match=said):
        chosen("model_class: FluxTransformer2DModel")
