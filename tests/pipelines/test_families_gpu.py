"""Model families on a GPU: kernels for half precision, recorded steps, prompts of any length."""

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map

import chipsparse
from chipsparse import SparsityConfig
from tests.pipelines import test_families

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("first_dense_kernel")]

# Of these every call is made with recorded steps, of the others one.
OFTEN = (
    "chroma",
    "flux",
    "flux control",
    "flux image to image",
    "hunyuan video 1.5",
    "minimax h3",
    "wan 2.1",
    "wan 2.2 two experts",
)
each_family = pytest.mark.parametrize("name", test_families.FAMILIES)
# Two steps in a row are sparse, so that the second can be recorded, and the one after a refresh.
STEPS = 8
UNSKIPPED = test_families.SPARSE.override({"schedule": {"periodic": {"refresh_every": 4}}})


def make(name, dtype=torch.bfloat16):
    """In half precision but for the modules that stay in fp32 where diffusers loads the class.

    Not single parameters: under those, Helios' own attention mixes dtypes.
    """
    pipe = test_families.FAMILIES[name].make().to("cuda", dtype)
    for model in pipe.components.values():
        kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
        for place, module in model.named_modules() if kept else ():
            if kept & set(place.split(".")):
                module.float()
    return pipe


def generate(pipe, *args, **options):

    def moved(field, value):
        if not isinstance(value, torch.Tensor):
            return value
        wide = value.is_floating_point() and "image" not in field  # those are still to be encoded
        return value.to("cuda", pipe.transformer.dtype if wide else None)

    def place(field, value):
        return tree_map(partial(moved, field), value)

    return test_families.as_batch(test_families.generate(pipe, *args, place=place, **options))


@pytest.mark.parametrize(
    ("name", "variant"),
    [call for call in test_families.CALLS if call[0] in OFTEN or call[1] == test_families.BASE],
)
def test_recorded_steps_give_what_launched_ones_do(name, variant):
    pipe = make(name)
    results = []
    for mode in ("never", "always"):
        config = UNSKIPPED.override({"cuda_graphs": mode})
        with chipsparse.enable(pipe, config) as handle:
            results += [generate(pipe, name, variant, steps=STEPS) for _ in range(2)]
        test_families.assert_expected(handle.report, test_families.FAMILIES[name], variant)
        assert handle.report.actions()["sparse"] > 0
    replayed = [record.step for record in handle.report.steps if record.replayed]
    assert replayed or [note for note in handle.report.notes if "CUDA graph" in note]
    assert results[0].isfinite().all()
    for result in results[1:]:
        assert torch.equal(result, results[0])


@each_family
def test_an_all_dense_plan_is_bit_equal_to_the_unpatched_pipeline(name):
    pipe = make(name)
    expected = generate(pipe, name)
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        assert torch.equal(generate(pipe, name), expected)
    assert torch.equal(generate(pipe, name), expected)


@each_family
def test_keeping_everything_is_the_dense_result(name):
    pipe = make(name, torch.float32)
    expected = generate(pipe, name)
    with chipsparse.enable(pipe, test_families.EXACT):
        found = generate(pipe, name)
    assert (found - expected).norm() < 1e-3 * expected.norm()
