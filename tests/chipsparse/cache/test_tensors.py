"""Fields of a cache that hold tensors."""

import copy

import torch

from chipsparse import SparsityConfig
from chipsparse.cache.kinds import KINDS, kept_kinds
from chipsparse.cache.tensors import AttentionCache, LayerCache


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
    rewritten = {name for name, kept in KINDS.items() if kept.rewritten}
    of_mlp = {name for name, kept in KINDS.items() if kept.part == "mlp"}
    assert rewritten == of_mlp - {"token_scale"} == {"mean", "output", "activation"}
    config = SparsityConfig().override({"attention.delta_rule": "difference"})
    assert kept_kinds(config, "attention") == {"lse", "columns", "residual"}
    merged = config.override({"attention.delta_rule": "merge"})
    assert kept_kinds(merged, "attention") - kept_kinds(config, "attention") == {
        "lse_dense",
        "kept_mass",
    }
