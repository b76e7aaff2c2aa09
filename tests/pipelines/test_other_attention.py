"""Stock attention by another kernel: which calls change, and what is left behind."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from chipsparse.pipelines.other_attention import other_attention
from tests.pipelines import test_flux as flux
from tests.pipelines import test_wan as wan
from tests.tiny_models import tiny_flux_pipeline, tiny_wan_pipeline


class Attending(torch.nn.Module):
    def forward(self, query):
        return scaled_dot_product_attention(query, query, query)


class Failing(torch.nn.Module):
    def forward(self, error):
        raise error


@pytest.fixture
def query():
    return torch.randn(1, 2, 67, 32, generator=torch.Generator().manual_seed(0))


def test_only_inside_the_models_another_kernel_computes(query):
    model = Attending()
    stock = model(query)
    with sdpa_kernel(SDPBackend.MATH):
        formula = model(query)
    assert not torch.equal(stock, formula)
    with other_attention([model]) as which:
        assert which() is None
        assert torch.equal(model(query), formula)
        assert torch.equal(Attending()(query), stock)
        assert which() == "math attention instead of flash"
    assert torch.equal(model(query), stock)


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_broken_call_leaves_nothing(query, error):
    failing = Failing()
    with pytest.raises(type(error)), other_attention([failing]):
        failing(error)
    stock = Attending()(query)
    with sdpa_kernel(SDPBackend.MATH):
        assert not torch.equal(Attending()(query), stock)
    assert torch.equal(Attending()(query), stock)
    assert not failing._forward_hooks
    assert not failing._forward_pre_hooks


@pytest.mark.parametrize(("make", "family"), [(tiny_wan_pipeline, wan), (tiny_flux_pipeline, flux)])
def test_a_generation_hardly_differs(make, family):
    pipe = make()
    dense = family.generate(pipe)
    with other_attention([pipe.transformer]) as which:
        floor = family.generate(pipe)
    assert which() == "math attention instead of flash"
    assert not torch.equal(floor, dense)
    torch.testing.assert_close(floor, dense, atol=1e-4, rtol=1e-4)
    assert torch.equal(family.generate(pipe), dense)
