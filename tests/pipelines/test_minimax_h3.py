"""The MiniMax-H3 adapter: one packed sequence, of which the video's rows run sparse."""

from functools import partial

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.api import attach
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.session import Session
from tests.pipelines.families.minimax_h3 import H3_CONFIG, VARIANTS, VIDEO, tiny_h3_pipeline

LAYERS = H3_CONFIG["num_layers"]
GRID, TOKENS, OTHERS = (7, 4, 6), 168, 83  # rows of the video, and of text and sound
ROWS = 16
KEPT = 0.48  # of all columns, the others among them
CHANGED = 12  # 0.3 of the neurons
SPARSE = SparsityConfig().override(
    {
        "attention.density": KEPT,
        "attention.random_fraction": 0.0,
        "block_size": ROWS,
        "mlp.density": 0.3,
        "tile": [2, 2, 2],
        "schedule.actions": ["dense", "refresh", "sparse", "sparse", "skip"],
    }
)


def generate(pipe, steps=4, **changes):
    return pipe(
        **{**VIDEO, **changes},
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(0),
    )[0]


@pytest.fixture
def pipe():
    return tiny_h3_pipeline()


def first_call(pipe, **changes):
    """What the transformer is called with at the first step."""
    calls = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _module, _args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    generate(pipe, 1, **changes)
    hook.remove()
    return calls[0]


# What is computed, against float64.


class Probe:
    """Keeps what the layers of a session are called with, and what they give."""

    def __init__(self):
        self.attentions, self.mlps = {}, {}

    def attention(self, layer, state, *tensors, **options):
        output = layer(state, *tensors, **options)
        kept = [tensor.double() for tensor in (*tensors, output)]
        self.attentions[layer.number, state.context.step] = kept
        return output

    def mlp(self, layer, state, hidden, weights):
        output = layer(state, hidden, weights)
        self.mlps[layer.number, state.context.step] = hidden.double(), weights, output.double()
        return output


def probed(pipe, config, **changes):
    probe = Probe()
    handle = attach(pipe, config, partial(Session, observer=probe))
    generate(pipe, 3, **changes)
    handle.disable()
    return probe


def attend(query, key, value, allowed=None):
    """Softmax attention over the allowed columns, and its log-sum-exp."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def kept_columns(query, key, lse, others):
    """A mask ``[B, H, N, M]``: others always, and the columns with the largest sums of a block."""
    weights = (query @ key.mT / query.shape[-1] ** 0.5 - lse[..., None]).exp()
    allowed = torch.zeros_like(weights, dtype=torch.bool)
    count = round(KEPT * key.shape[2])
    assert count > others
    for first in range(0, query.shape[2], ROWS):
        block = slice(first, first + ROWS)
        sums = weights[:, :, block].sum(2)
        sums[..., :others] = torch.inf
        chosen = torch.zeros_like(sums, dtype=torch.bool)
        chosen.scatter_(-1, sums.topk(count).indices, True)
        allowed[:, :, block] = chosen[:, :, None]
    return allowed


@pytest.mark.parametrize("variant", [{}, VARIANTS["batch"], VARIANTS["first frame"]])
@pytest.mark.parametrize("rule", ["merge", "difference"])
def test_attention_is_the_formula(pipe, rule, variant):
    probe = probed(pipe, SPARSE.override({"attention.delta_rule": rule}), **variant)
    assert probe.attentions.keys() == {
        (layer, step) for layer in range(LAYERS) for step in (0, 1, 2)
    }
    others = probe.attentions[0, 0][0].shape[2] - TOKENS
    assert others == (OTHERS + 24 if "keyframes" in variant else OTHERS)
    for layer in range(LAYERS):
        calls = [probe.attentions[layer, step] for step in (0, 1, 2)]
        for query, key, value, output in calls:  # text, sound and conditions see everything
            expected, _ = attend(query[:, :, :others], key, value)
            torch.testing.assert_close(output[:, :, :others], expected, atol=1e-6, rtol=1e-5)
        rows = [query[:, :, others:] for query, *_ in calls]
        (_, key0, value0, output0), (_, key1, value1, output1), (_, key2, value2, output2) = calls
        dense, lse0 = attend(rows[0], key0, value0)
        torch.testing.assert_close(output0[:, :, others:], dense, atol=1e-6, rtol=1e-5)
        dense, lse1 = attend(rows[1], key1, value1)
        torch.testing.assert_close(output1[:, :, others:], dense, atol=1e-6, rtol=1e-5)
        allowed = kept_columns(rows[1], key1, lse0, others)
        before, kept_lse = attend(rows[1], key1, value1, allowed)
        now, now_lse = attend(rows[2], key2, value2, allowed)
        if rule == "difference":
            expected = now + dense - before
        else:
            w, a = (kept_lse - lse1).exp()[..., None], (now_lse - lse1).exp()[..., None]
            expected = (a * now + dense - w * before) / (a + 1 - w)
        torch.testing.assert_close(output2[:, :, others:], expected, atol=1e-5, rtol=1e-4)
        # It would show if the rows were dense, or kept other columns.
        for wrong in (attend(rows[2], key2, value2)[0], now):
            assert (output2[:, :, others:] - wrong).norm() > 1e-3 * expected.norm()


def gated(hidden, weights):
    up, gate = (hidden @ weight.double().T for weight in (weights.up, weights.gate))
    return up * gate * gate.sigmoid()


def block_means(hidden):
    return torch.stack([block.mean(1) for block in hidden.split(ROWS, dim=1)], dim=1)


@pytest.mark.parametrize("variant", [{}, VARIANTS["batch"]])
def test_the_mlp_is_the_formula(pipe, variant):
    probe = probed(pipe, SPARSE, **variant)
    for layer in range(LAYERS):
        (before, weights, _), (now, _, output) = (probe.mlps[layer, step] for step in (1, 2))
        down = weights.down.double().T
        expected = gated(now[:, :OTHERS], weights) @ down
        torch.testing.assert_close(output[:, :OTHERS], expected, atol=1e-6, rtol=1e-5)
        old, new = (gated(each[:, OTHERS:], weights) for each in (before, now))
        moved = [gated(block_means(each[:, OTHERS:]), weights) for each in (before, now)]
        chosen = (moved[1] - moved[0]).abs().topk(CHANGED).indices
        changed = torch.zeros_like(moved[0]).scatter_(-1, chosen, 1.0)
        changed = changed.repeat_interleave(ROWS, dim=1)[:, :TOKENS]
        expected = (old + changed * (new - old)) @ down
        torch.testing.assert_close(output[:, OTHERS:], expected, atol=1e-5, rtol=1e-4)
        assert (output[:, OTHERS:] - new @ down).norm() > 1e-3 * expected.norm()


def test_columns_of_text_sound_and_conditions_are_always_kept(pipe):
    config = SPARSE.override({"attention.density": 0.05})
    with chipsparse.enable(pipe, config) as handle, torch.no_grad():
        generate(pipe, 3, **VARIANTS["references"])
        pipe.scheduler.set_timesteps(9)
        call = first_call(tiny_h3_pipeline(), **VARIANTS["references"])
        for step in range(2):
            at = pipe.scheduler.timesteps[step : step + 1]
            pipe.transformer(**{**call, "timestep": at.repeat(call["timestep"].numel())})
        session = handle._adapters[0].session
        others = session.plan.layout.text_tokens
        caches = [session._caches["call0", layer] for layer in range(LAYERS)]
        assert others > 0.05 * session.plan.layout.tokens
        for cache in caches:
            kept = unpack_mask(cache.attention.columns, others + TOKENS)
            assert kept.shape[2] == -(-TOKENS // ROWS)
            assert kept[..., :others].all()
            assert not kept[..., others:].any()
        columns = handle.kept_columns()
        assert [each.text for each in columns] == [1.0] * LAYERS


# The order of the rows.


def outputs(pipe, call, steps, config=SPARSE, **changes):
    """Both outputs of the first steps of a longer loop that call the transformer with the same."""
    pipe.scheduler.set_timesteps(9)
    found = []
    with chipsparse.enable(pipe, config) as handle, torch.no_grad():
        for at in pipe.scheduler.timesteps[:steps]:
            timestep = at.repeat(call["timestep"].numel())
            found.append(pipe.transformer(**{**call, **changes, "timestep": timestep}))
        assert handle.report.fallbacks == handle.report.notes == []
    return found


@pytest.mark.parametrize("name", ["", *VARIANTS])
def test_one_call_gives_the_same_in_our_order(pipe, name):
    """Rows carry their positions, tags and timesteps along; both outputs keep the caller's."""
    call = first_call(pipe, **(VARIANTS[name] if name else {}))
    timestep = torch.linspace(0.0, 0.9, call["timestep"].numel())
    pipe.scheduler.set_timesteps(9)
    with torch.no_grad():
        expected = pipe.transformer(**{**call, "timestep": timestep})
        with chipsparse.enable(pipe, SPARSE) as handle:
            found = pipe.transformer(**{**call, "timestep": timestep})
            assert handle.report.fallbacks == handle.report.notes == []
            assert handle.report.cache_bytes > 0
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, atol=2e-5, rtol=1e-4)
    assert not torch.equal(found[0], expected[0])  # sums in another order: that did change


# Skipped steps, and other ways to be called.


def test_conditions_that_take_up_the_density_are_noted(pipe):
    with chipsparse.enable(pipe, SPARSE.override({"attention.density": 0.4})) as handle:
        generate(pipe, **VARIANTS["first frame"])
        assert handle.report.notes == []
        generate(pipe, **VARIANTS["references"])
        (note,) = handle.report.notes
    assert note.startswith("136 of the 304 tokens are text, sound and conditions")
    assert "attention.density keeps 122:" in note


# What is refused.


# Sizes known from configs.
