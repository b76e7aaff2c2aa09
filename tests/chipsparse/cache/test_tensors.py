"""Fields of a cache whose tensors know where they are."""

import copy

import pytest
import torch

from chipsparse import SparsityConfig
from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.kinds import kept_kinds
from chipsparse.cache.offload import HostedTensor, OffloadPool
from chipsparse.cache.tensors import AttentionCache, LayerCache, MLPCache

KEY = ("cond", 0, "residual")


@pytest.mark.parametrize("rewritten", [True, False])
def test_a_hosted_tensor_takes_no_memory_of_the_device_and_keeps_changes_of_its_kind(rewritten):
    pool, cache = OffloadPool(HostMemory(), pytest.fail, poison=True), AttentionCache()
    pool.open({KEY: 64}, torch.device("cpu"))
    cache.tensors["residual"] = owner = HostedTensor(pool, KEY, rewritten=rewritten)
    assert not owner.is_set
    cache.residual = torch.zeros(17)
    assert not owner.fits()
    cache.residual = torch.arange(16.0)
    assert owner.fits()
    for change in (1, 0):
        owner.put_away()
        pool.release(KEY)
        assert owner.is_set
        assert cache.residual is None
        assert list(cache.on_device()) == []
        owner.load()
        cache.residual += change
    assert torch.equal(cache.residual, torch.arange(16.0) + rewritten)


def test_a_copy_keeps_what_it_had():
    cache = AttentionCache()
    cache.lse = first = torch.zeros(2)
    other = copy.copy(cache)
    other.lse, other.capacity = torch.ones(3), 5
    assert cache.lse is first
    assert cache.capacity is None


def test_bytes_are_those_of_all_fields_and_each_memory_counts_once():
    cache = LayerCache()
    cache.attention.lse = cache.attention.lse_dense = torch.zeros(4)
    cache.mlp.mean = torch.zeros(2)
    cache.attention.kept_fraction = torch.zeros(())
    assert cache.nbytes() == 16 + 8 + 4


def test_the_fields_that_hold_tensors_are_declared():
    rewritten = {name for name, kept in MLPCache.kept.items() if kept.rewritten}
    assert rewritten == MLPCache.kept.keys() - {"token_scale"}
    assert not any(kept.rewritten for kept in AttentionCache.kept.values())
    config = SparsityConfig().override({"attention.delta_rule": "difference"})
    assert kept_kinds(config, "attention") == {"lse", "columns", "residual"}
    merged = config.override({"attention.delta_rule": "merge"})
    assert kept_kinds(merged, "attention") - kept_kinds(config, "attention") == {
        "lse_dense",
        "kept_mass",
    }
