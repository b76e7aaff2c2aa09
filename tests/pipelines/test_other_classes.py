"""The record of diffusers' transformer classes: complete, and right as far as configs can tell."""

import importlib
import inspect
import pkgutil
from types import SimpleNamespace

import pytest
import torch
from diffusers import ModelMixin, SanaTransformer2DModel, WanTransformer3DModel
from diffusers.models import transformers

import chipsparse
from chipsparse.pipelines.registry import FAMILIES, OTHER_CLASSES


def test_every_transformer_class_of_diffusers_has_an_adapter_or_a_line():
    names = set()
    for module in pkgutil.iter_modules(transformers.__path__):
        imported = importlib.import_module(f"{transformers.__name__}.{module.name}")
        for name, value in vars(imported).items():
            own = getattr(value, "__module__", None) == imported.__name__
            if own and inspect.isclass(value) and issubclass(value, ModelMixin):
                names.add(name)
    assert names == FAMILIES.keys() | OTHER_CLASSES.keys()


class OfItsOwn(WanTransformer3DModel):
    def forward(self, hidden_states, timestep, **others):
        return hidden_states  # and nothing of Wan's


@pytest.mark.parametrize(
    ("components", "said"),
    [
        ({"transformer": OfItsOwn}, "not hand its arguments on to that of WanTransformer3DModel"),
        ({"transformer": SanaTransformer2DModel}, "Sana.*, and its self-attention is linear"),
        ({"transformer": torch.nn.Identity}, "a Identity, and chipsparse has no adapter for it"),
        ({"unet": torch.nn.Identity}, "unet is a Identity, and it is no transformer"),
        ({}, "it has none"),
    ],
)
def test_a_pipeline_without_an_adapter_is_refused(components, said):
    with torch.device("meta"):
        pipe = SimpleNamespace(components={name: make() for name, make in components.items()})
    with pytest.raises(
        ValueError,
        match=rf"{said}.*; the command chipsparse models lists the 30 classes",
    ):
        chipsparse.enable(pipe)
