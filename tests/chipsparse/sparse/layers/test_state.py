"""What a layer does at a step, given what its cache has."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from chipsparse.config import Action
from chipsparse.sparse.cache.tensors import Kept
from chipsparse.sparse.layers.state import OpenCall, split_full_attention_rows
from tests.chipsparse.sparse.sessions import layout_of


class Caches:
    """The cache of one layer, as a store gives it."""

    def __init__(self, refreshed_at, kept):
        self.refreshed_at = refreshed_at
        self.kept = kept

    def part(self, _branch, _layer, _part):
        return self

    def has(self, _branch, _layer, kept):
        return kept in self.kept


def state_of(action, refreshed_at):
    record = SimpleNamespace(action=action)
    context = SimpleNamespace(branch="cond", step=9)
    return OpenCall(None, context, record, True, refreshed_at, {}, None)


LSE = {Kept.LSE}


@pytest.mark.parametrize(
    ("part", "planned", "layer_refreshed_at", "kept", "expected"),
    [
        pytest.param("attention", Action.SPARSE, 4, LSE, Action.SPARSE, id="all there"),
        pytest.param("attention", Action.SPARSE, 3, LSE, Action.REFRESH, id="stale"),
        pytest.param("attention", Action.SPARSE, -1, LSE, Action.REFRESH, id="never refreshed"),
        pytest.param("attention", Action.SPARSE, -1, set(), Action.DENSE, id="empty"),
        pytest.param("attention", Action.REFRESH, -1, set(), Action.DENSE, id="no LSE"),
        pytest.param("attention", Action.REFRESH, -1, LSE, Action.REFRESH, id="first refresh"),
        pytest.param("attention", Action.DENSE, -1, set(), Action.DENSE, id="dense"),
        pytest.param("mlp", Action.SPARSE, 4, set(), Action.SPARSE, id="MLP, all there"),
        pytest.param("mlp", Action.SPARSE, 3, set(), Action.REFRESH, id="MLP, stale"),
        pytest.param("mlp", Action.REFRESH, -1, set(), Action.REFRESH, id="MLP, first refresh"),
        pytest.param("mlp", Action.DENSE, -1, set(), Action.DENSE, id="MLP, dense"),
    ],
)
def test_the_action_is_raised_where_inputs_are_missing(
    part,
    planned,
    layer_refreshed_at,
    kept,
    expected,
):
    caches = Caches(layer_refreshed_at, kept)
    assert state_of(planned, 4).layer_action(0, part, caches) is expected


def test_a_sparse_step_without_any_refresh_is_raised():
    assert state_of(Action.SPARSE, -1).layer_action(0, "mlp", Caches(-1, set())) is Action.REFRESH


def test_full_attention_rows_are_the_first_and_may_be_missing():
    plain = layout_of()
    assert split_full_attention_rows(torch.zeros(1, 63), plain, 1)[1] is None
    layout = replace(plain, exact_text=True, text_first=True)
    rows = torch.arange(63).unsqueeze(0)
    sparse, full = split_full_attention_rows(rows, layout, 1)
    assert (sparse.tolist(), full.tolist()) == ([[*range(3, 63)]], [[0, 1, 2]])
    sparse, full = split_full_attention_rows(rows[:, 2:], layout, 1)
    assert (sparse.tolist(), full.tolist()) == ([[*range(3, 63)]], [[2]])
    assert split_full_attention_rows(rows[:, 3:], layout, 1)[1] is None
