"""The MiniMax-H3 adapter: one packed sequence, of which the video's rows run sparse."""

from functools import partial

import pytest
import torch
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3TransformerOutput

import chipsparse
from benchmarks.models import keep_in_fp32
from benchmarks.work import DenseWork, WorkCounter
from chipsparse import SparsityConfig
from chipsparse.api import attach
from chipsparse.graphs.step_graph import StepGraphs
from chipsparse.kernels.mask_packing import unpack_mask
from chipsparse.pipelines.minimax_h3 import audio_rows
from chipsparse.session import Session
from tests.graph_stand_in import TapeRecorder
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
INDICES = ("video_indices", "audio_indices", "text_indices")
PER_ROW = ("position_ids", "token_tags", "timestep_indices")


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


@pytest.mark.parametrize("tile", [None, [2, 2, 2]])
def test_a_sequence_may_be_packed_in_another_order(pipe, tile):
    """The video first, text and sound behind it: what a row gives does not depend on its place."""
    call = first_call(pipe)
    order = torch.arange(call["token_tags"].numel()).roll(TOKENS)
    place = order.argsort()
    moved = {name: call[name][order] for name in PER_ROW}
    moved |= {name: place[call[name]] for name in INDICES}
    assert moved["video_indices"][0] == 0
    config = SPARSE.override({"tile": tile})
    for found, expected in zip(
        outputs(pipe, call, 3, config, **moved), outputs(pipe, call, 3, config), strict=True
    ):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_samples_of_a_batch_do_not_see_each_other(pipe):
    call = first_call(pipe, **VARIANTS["batch"])
    own = ("hidden_states", "audio_hidden_states", "encoder_hidden_states")
    together = outputs(pipe, call, 3)
    for row in (0, 1):
        alone = outputs(pipe, call, 3, **{name: call[name][[row]] for name in own})
        for both, one in zip(together, alone, strict=True):
            for each, other in zip(both, one, strict=True):
                torch.testing.assert_close(each[[row]], other, atol=1e-5, rtol=1e-4)


# Skipped steps, and other ways to be called.


def test_a_skipped_step_gives_both_outputs_again(pipe):
    *_, before, (video, audio), (again, audio_again) = outputs(pipe, first_call(pipe), 5)
    assert torch.equal(video, again)
    assert torch.equal(audio, audio_again)
    assert not torch.equal(video, before[0])
    assert not torch.equal(audio, before[1])


def test_a_skipped_step_returns_the_models_own_kind_of_output(pipe):
    call = first_call(pipe)
    *_, output = outputs(pipe, call, 5, return_dict=True)
    assert isinstance(output, MiniMaxH3TransformerOutput)
    assert output.sample.shape == call["hidden_states"].shape
    assert output.audio_sample.shape == call["audio_hidden_states"].shape


def test_positions_are_known_without_a_scheduler(pipe):
    """Timesteps rise, and rows have several; the video's tells the step."""
    call, steps = first_call(pipe, **VARIANTS["first frame"]), []
    pipe.scheduler = None
    with chipsparse.enable(pipe, SPARSE) as handle, torch.no_grad():
        condition = call["timestep_indices"].max()
        assert condition == 1
        for at in (0.0, 0.2, 0.7, 0.9995):
            timestep = torch.tensor([at, max(at, 0.999)])
            pipe.transformer(**{**call, "timestep": timestep})
        steps = [record.step for record in handle.report.steps]
        assert steps == [0, 1, 2, 3]
        assert {record.branch for record in handle.report.steps} == {"call0"}


def test_blocks_in_half_precision_under_latents_in_full(pipe):
    """As checkpoints have it: heads and embeddings of the timestep in fp32, blocks in bf16."""
    model = pipe.transformer.to(torch.bfloat16)
    keep_in_fp32(model)
    with chipsparse.enable(pipe, SPARSE) as handle:
        found = generate(pipe)
        assert handle.report.dtype == torch.bfloat16
        assert handle.report.fallbacks == []
        assert handle.report.actions()["sparse"] == 2
    assert found.dtype == torch.float32
    assert found.isfinite().all()


def test_captured_steps_give_the_same(pipe, monkeypatch):
    config = SPARSE.override(
        {"schedule.actions": ["dense", "refresh", *["sparse"] * 4], "cuda_graphs": "always"}
    )
    with chipsparse.enable(pipe, config):
        expected = generate(pipe, 6, **VARIANTS["first frame"])
    recorder = TapeRecorder()
    monkeypatch.setattr(
        "chipsparse.api.Session", lambda *a, **k: Session(*a, **k, graphs=StepGraphs(recorder))
    )
    with chipsparse.enable(pipe, config) as handle:
        found = generate(pipe, 6, **VARIANTS["first frame"])
        replayed = [record.step for record in handle.report.steps if record.replayed]
    assert torch.equal(found, expected)
    assert replayed == [3, 4, 5]
    assert (recorder.dangling, recorder.held) == (0, 0)


def test_conditions_that_take_up_the_density_are_noted(pipe):
    with chipsparse.enable(pipe, SPARSE.override({"attention.density": 0.4})) as handle:
        generate(pipe, **VARIANTS["first frame"])
        assert handle.report.notes == []
        generate(pipe, **VARIANTS["references"])
        (note,) = handle.report.notes
    assert note.startswith("136 of the 304 tokens are text, sound and conditions")
    assert "attention.density keeps 122:" in note


def test_the_work_of_a_step_counts_exact_rows_in_full(pipe):
    """As the tables of equal work estimate it, against what PyTorch really computes."""
    dense = DenseWork.measured(pipe.transformer, lambda: generate(pipe, 2))
    counter = WorkCounter()
    handle = attach(pipe, SPARSE, partial(Session, observer=counter))
    with counter.of(pipe.transformer):
        generate(pipe)
    handle.disable()
    assert handle.report.actions() == {"dense": 1, "refresh": 1, "sparse": 2}
    assert dense.of_report(handle.report) == pytest.approx(counter.multiply_adds, rel=0.01)


# What is refused.


def test_a_contradiction_is_one_sentence_and_leaves_no_trace(pipe):
    with chipsparse.enable(pipe, SPARSE):
        expected = generate(pipe)
        call = first_call(pipe)
        tags = call["token_tags"].clone()
        tags[0] = 2
        with torch.no_grad(), pytest.raises(ValueError, match="row 0 is tagged 2") as raised:
            pipe.transformer(**{**call, "token_tags": tags})
        assert "\n" not in str(raised.value)
        assert torch.equal(generate(pipe), expected)


def test_sizes_that_the_model_refuses_are_its_own_error(pipe):
    call = first_call(pipe)
    with (
        chipsparse.enable(pipe, SPARSE),
        torch.no_grad(),
        pytest.raises((RuntimeError, IndexError)),
    ):
        pipe.transformer(**{**call, "hidden_states": call["hidden_states"][:, :-1]})


# Sizes known from configs.


@pytest.mark.parametrize(("latents", "rows"), [(2, 16), (7, 74), (37, 414), (72, 810), (102, 1150)])
def test_rows_of_sound(latents, rows):
    """Frames of a video of 5 n + 2 latents are 17 n + 5; 40 latents of two channels a second."""
    frames = (latents - 2) // 5 * 17 + 5
    assert audio_rows(latents) == rows == 2 * round(frames / 24 * 40)
