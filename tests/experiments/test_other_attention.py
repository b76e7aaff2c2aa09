"""Stock attention by another kernel: which calls change, and what is left behind."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from chipsparse.experiments.other_attention import other_attention
from tests.tiny_models import random

QUERY = random(1, 2, 67, 32, seed=0)


class Attending(torch.nn.Module):
    """Attends, or raises where it is given an error."""

    def forward(self, query):
        if isinstance(query, BaseException):
            raise query
        return scaled_dot_product_attention(query, query, query)


def test_only_inside_the_models_another_kernel_computes():
    model = Attending()
    stock = model(QUERY)
    with sdpa_kernel(SDPBackend.MATH):
        formula = model(QUERY)
    assert not torch.equal(stock, formula)
    with other_attention([model]) as which:
        assert which() is None
        assert torch.equal(model(QUERY), formula)
        assert torch.equal(Attending()(QUERY), stock)
        assert which() == "math attention instead of flash"
    for error in (ValueError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), other_attention([model]):
            model(error)
    assert torch.equal(model(QUERY), stock)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
