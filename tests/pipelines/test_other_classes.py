"""The record of diffusers' transformer classes: complete, and right as far as configs can tell."""

import importlib
import inspect
import pkgutil

import pytest
import torch
from diffusers import ModelMixin
from diffusers.models import transformers

from chipsparse.pipelines.generic import why_not
from chipsparse.pipelines.other_classes import OTHER_CLASSES
from chipsparse.pipelines.registry import ADAPTERS

# What classes need that cannot be made without arguments; sizes do not matter here.
SIZES = {"num_attention_heads": 2, "attention_head_dim": 8}
ARGUMENTS = {
    "DreamLiteTransformer2DModel": {"in_channels": 32, **SIZES},
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "out_channels": 4, "patch_size": 2},
    "HunyuanDiT2DModel": {"patch_size": 2, "in_channels": 4, "sample_size": 32},
    "LatteTransformer3DModel": {
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": 32,
        "caption_channels": 8,
    },
    "LuminaNextDiT2DModel": {"num_kv_heads": 8},
    "OmniGenTransformer2DModel": {
        "rope_scaling": {"long_factor": [1.0], "short_factor": [1.0]},
        "in_channels": 4,
    },
    "Transformer2DModel": {"in_channels": 32, **SIZES},
    "TransformerTemporalModel": {"in_channels": 32, **SIZES},
}


def transformer_classes():
    """All models that the installed diffusers has among its transformers, by name."""
    found = {}
    for module in pkgutil.iter_modules(transformers.__path__):
        imported = importlib.import_module(f"{transformers.__name__}.{module.name}")
        for name, value in vars(imported).items():
            own = getattr(value, "__module__", None) == imported.__name__
            if own and inspect.isclass(value) and issubclass(value, ModelMixin):
                found[name] = value
    return found


def test_every_transformer_class_of_diffusers_has_an_adapter_or_a_line():
    assert transformer_classes().keys() == ADAPTERS.keys() | OTHER_CLASSES.keys()


def test_the_classes_are_in_order():
    assert list(OTHER_CLASSES) == sorted(OTHER_CLASSES)


@pytest.mark.slow
def test_what_is_refused_at_once_has_a_reason_and_what_is_served_is_not():
    for name, model_class in transformer_classes().items():
        if name not in OTHER_CLASSES:
            continue
        with torch.device("meta"):
            reason = why_not(model_class(**ARGUMENTS.get(name, {})))
        if reason is not None:
            assert OTHER_CLASSES[name] is not None, f"{name}: {reason}"
