"""The FLUX.2 adapter: feed-forward layers in the attention, reference images, kept keys."""

import diffusers
import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2ParallelSelfAttnProcessor
from PIL import Image

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.layers.mlp import MLPLayer
from chipsparse.pipelines import bridge
from chipsparse.pipelines.flux2 import Flux2Adapter
from chipsparse.pipelines.token_grids import grids_of
from tests.pipelines import small_sparse
from tests.pipelines.changes import add_lora
from tests.pipelines.families.flux2 import (
    FLUX2_CONFIG,
    GUIDED,
    HEIGHT,
    PICTURE,
    VARIANTS,
    klein,
    picture,
    random,
    tiny_flux2_pipeline,
)
from tests.pipelines.families.flux2 import WIDTH as PIXELS
from tests.pipelines.model_state import actions, calls_begun, state_of
from tests.pipelines.small_sparse import EXACT, SPARSE, STEPS, assert_close, error
from tests.variants import slow

CHANNELS = FLUX2_CONFIG["in_channels"]
DOUBLE = FLUX2_CONFIG["num_layers"]
LAYERS = DOUBLE + FLUX2_CONFIG["num_single_layers"]
WIDTH = FLUX2_CONFIG["num_attention_heads"] * FLUX2_CONFIG["attention_head_dim"]
ONLY_MLP = {"attention.density": "dense"}
REFERENCES = VARIANTS["two references"]


def generate(pipe, **changes):
    return small_sparse.generate(pipe, PICTURE, **changes)


@pytest.fixture
def pipe():
    return tiny_flux2_pipeline()


@pytest.fixture(scope="module")
def dense():
    return generate(tiny_flux2_pipeline())


@pytest.fixture(scope="module")
def sparse():
    pipe = tiny_flux2_pipeline()
    with chipsparse.enable(pipe, SPARSE):
        return generate(pipe)


# The feed-forward layer of a single block.


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gate", ["none", "first", "second"])
@pytest.mark.parametrize("fused_rows", [0, 12])
def test_the_op_is_the_plain_formula(bias, gate, fused_rows):
    attention, channels, neurons = 6, 8, 10
    rows = neurons * (1 if gate == "none" else 2)
    joined = random(2, 5, attention + channels, seed=1)
    up, up_bias = random(fused_rows + rows, channels, seed=2), random(fused_rows + rows, seed=3)
    out, out_bias = random(channels, attention + neurons, seed=4), random(channels, seed=5)

    pipe = tiny_flux2_pipeline()
    with chipsparse.enable(pipe, SparsityConfig.dense()) as handle:
        tag = bridge.make_tag(bridge.register_runner(handle._adapters[0]), 0)
        found = torch.ops.chipsparse.parallel_feed_forward(
            joined,
            up,
            up_bias if bias else None,
            out,
            out_bias if bias else None,
            tag,
            "silu",
            gate,
        )

    hidden = joined[..., attention:].double() @ up[fused_rows:].double().T
    hidden = hidden + (up_bias[fused_rows:].double() if bias else 0)
    first, second = hidden.split(neurons, -1) if gate != "none" else (hidden, None)
    if gate == "second":
        first, second = second, first
    neurons_out = first / (1 + torch.exp(-first)) * (1 if second is None else second)
    whole = torch.cat([joined[..., :attention].double(), neurons_out], dim=-1)
    expected = whole @ out.double().T + (out_bias.double() if bias else 0)
    assert_close(found.double(), expected, 1e-5)


def test_more_neurons_give_a_smaller_error(pipe, dense):
    """Also says that the kept neurons are the right ones: errors would not shrink otherwise."""
    errors = []
    for keep in (0.0, 0.2, 0.5, 0.9):
        config = SPARSE.override({**ONLY_MLP, "mlp.density": keep})
        with chipsparse.enable(pipe, config):
            errors.append(error(generate(pipe), dense))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 3
    assert errors[0] > 1e-3


def test_the_weights_are_views_of_the_models(pipe, monkeypatch):
    attention = pipe.transformer.single_transformer_blocks[1].attn
    first, second = attention.to_qkv_mlp_proj.weight, attention.to_out.weight
    seen = []
    run = MLPLayer.__call__

    def look(layer, state, hidden, weights, **options):
        if layer.number == DOUBLE + 1:
            seen.append(weights)
        return run(layer, state, hidden, weights, **options)

    monkeypatch.setattr(MLPLayer, "__call__", look)
    with chipsparse.enable(pipe, SPARSE):
        generate(pipe)
        assert attention.to_qkv_mlp_proj.weight is first
        assert attention.to_out.weight is second
    assert len(seen) == STEPS
    neurons = attention.mlp_hidden_dim
    for weights in seen:
        assert weights.gate.data_ptr() == first[3 * WIDTH].data_ptr()
        assert weights.up.data_ptr() == first[3 * WIDTH + neurons].data_ptr()
        assert weights.up.shape == weights.gate.shape == (neurons, WIDTH)
        assert weights.down.data_ptr() == second[:, WIDTH:].data_ptr()
        assert weights.down.shape == (WIDTH, neurons)


def test_a_block_may_be_called_by_itself(pipe):
    """Between generations, and where gradients are recorded."""
    block = pipe.transformer.single_transformer_blocks[0]
    arguments = {
        "hidden_states": random(1, 9, WIDTH, seed=1),
        "encoder_hidden_states": None,
        "temb_mod": random(1, 3 * WIDTH, seed=2),
    }
    expected = block(**arguments).detach()
    with chipsparse.enable(pipe, SPARSE):
        generate(pipe)
        block(**arguments).sum().backward()
        assert block.attn.to_qkv_mlp_proj.weight.grad is not None
        assert torch.equal(block(**arguments), expected)
        with torch.no_grad():
            assert_close(block(**arguments), expected)


def test_disable_gives_the_widths_back(pipe, dense):
    before = state_of(pipe.transformer)
    attention = pipe.transformer.single_transformer_blocks[0].attn
    widths = (attention.mlp_hidden_dim, attention.mlp_mult_factor)
    with chipsparse.enable(pipe, SPARSE):
        generate(pipe)
        with torch.no_grad():
            assert (attention.mlp_hidden_dim, attention.mlp_mult_factor) == (WIDTH, 1)
    assert (attention.mlp_hidden_dim, attention.mlp_mult_factor) == widths
    assert state_of(pipe.transformer) == before
    assert torch.equal(generate(pipe), dense)


@pytest.mark.parametrize("name", ["to_qkv_mlp_proj", "mlp_act_fn", "to_out"])
def test_a_replaced_module_runs_dense_and_says_so(pipe, dense, name):
    attention = pipe.transformer.single_transformer_blocks[1].attn
    with chipsparse.enable(pipe, EXACT) as handle:
        generate(pipe)
        old = getattr(attention, name)
        new = type(attention.mlp_act_fn).chipsparse_base()
        if name != "mlp_act_fn":
            new = torch.nn.Linear(old.in_features, old.out_features, bias=False)
            new.load_state_dict(old.state_dict())
        setattr(attention, name, new)
        found = generate(pipe)
        assert handle.report.fallbacks == [
            f"MLP runs dense in 1 of {LAYERS} layers (first: layer {LAYERS - 1}): "
            f"its {name} was replaced"
        ]
    assert_close(found, dense)


class OwnProcessor(Flux2ParallelSelfAttnProcessor):
    """Splits the projection as it likes."""

    def __call__(self, attn, hidden_states, attention_mask=None, image_rotary_emb=None):
        assert attn.to_qkv_mlp_proj(hidden_states).shape[-1] > 6 * attn.inner_dim
        return super().__call__(attn, hidden_states, attention_mask, image_rotary_emb)


def test_another_processor_runs_all_of_its_block_dense(pipe):
    with chipsparse.enable(pipe, SPARSE.override({"tile": None})) as handle:
        for block in pipe.transformer.single_transformer_blocks:
            block.attn.set_processor(OwnProcessor())
        generate(pipe)
        where = f"in {LAYERS - DOUBLE} of {LAYERS} layers (first: layer {DOUBLE})"
        assert handle.report.fallbacks == [
            f"attention runs dense {where}: its processor was replaced",
            f"MLP runs dense {where}: the attention's processor, which computes it, was replaced",
        ]
        last = handle.report.steps[-1]
        assert len(last.fractions("attention")) == len(last.fractions("mlp")) == DOUBLE


@pytest.mark.parametrize(
    "target", ["to_qkv_mlp_proj", slow("single_transformer_blocks.1.attn.to_out")]
)
def test_an_active_lora_runs_dense_a_fused_one_sparse(pipe, dense, sparse, target):
    add_lora(pipe, target)
    expected = generate(pipe)
    assert error(expected, dense) > 0.005
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe), expected)
        which = "first" if target == "to_qkv_mlp_proj" else "second"
        (line,) = handle.report.fallbacks
        assert line.endswith(f"its {which} linear has an active adapter that is not fused: style")
        pipe.transformer.fuse_lora()
        assert_close(generate(pipe), expected)
        assert handle.report.fallbacks == []
        pipe.transformer.unfuse_lora()
        pipe.transformer.disable_adapters()
        assert_close(generate(pipe), dense)
        assert handle.report.fallbacks == []
    with chipsparse.enable(pipe, SPARSE):
        assert_close(generate(pipe), sparse)


def test_second_weights_are_turned_around_and_restored(pipe, sparse, dense, monkeypatch):
    """As kernels on a GPU want them; the attention's part of the projection turns with them."""
    monkeypatch.setattr(Flux2Adapter, "_wants_contiguous_channels", lambda *_: True)
    before = state_of(pipe.transformer)
    weights = [block.attn.to_out.weight for block in pipe.transformer.single_transformer_blocks]
    weights += [block.ff.linear_out.weight for block in pipe.transformer.transformer_blocks]
    with chipsparse.enable(pipe, SPARSE):
        assert_close(generate(pipe), sparse)
        assert all(weight.stride(0) == 1 for weight in weights)
    assert state_of(pipe.transformer) == before
    assert torch.equal(generate(pipe), dense)


# Position and pictures.


def ids_of(*grids, times=None):
    parts = []
    for index, (rows, columns) in enumerate(grids):
        time = torch.tensor([10 * index if times is None else times[index]])
        axes = (time, torch.arange(rows), torch.arange(columns), torch.arange(1))
        parts.append(torch.cartesian_prod(*axes))
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (ids_of((4, 6)), ((1, 4, 6),)),
        (ids_of((4, 6)).expand(2, -1, -1), ((1, 4, 6),)),
        (ids_of((4, 6), (4, 6)), ((1, 4, 6), (1, 4, 6))),
        (ids_of((4, 6), (3, 5), (7, 2)), ((1, 4, 6), (1, 3, 5), (1, 7, 2))),
        (ids_of((4, 6), (1, 6)), ((1, 4, 6), (1, 1, 6))),
        (ids_of((1, 1)), ((1, 1, 1),)),
        (torch.cartesian_prod(*(torch.arange(n) for n in (1, 1, 1, 50))), None),  # as of a text
    ],
)
def test_grids_are_read_from_four_axes(ids, expected):
    assert grids_of(ids) == expected


def test_reference_pictures_have_grids_of_their_own(pipe):
    expected = generate(pipe, **REFERENCES)
    with chipsparse.enable(pipe, EXACT) as handle:
        calls = calls_begun(handle)
        found = generate(pipe, **REFERENCES)
        assert handle.report.fallbacks == []
    assert [layout.grids for _, layout in calls] == [((1, 8, 6), (1, 9, 8), (1, 8, 10))] * STEPS
    assert_close(found, expected)


def test_inpainting_keeps_its_result():
    pipe = klein(diffusers.Flux2KleinInpaintPipeline)
    mask = Image.new("L", (PIXELS, HEIGHT), 0)
    mask.paste(255, (8, 8, 24, 40))
    arguments = {
        **GUIDED,
        "image": picture(1, PIXELS, HEIGHT),
        "mask_image": mask,
        "image_reference": picture(2),
        "strength": 0.9,
    }
    arguments["height"] = arguments["width"] = 64
    expected = generate(pipe, **arguments)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, **arguments), expected)
        assert handle.report.fallbacks == []
        assert actions(handle) == actions(handle, "uncond")
        assert "sparse" in actions(handle)


def kept_keys():
    """A pipeline that computes keys and values of its reference images in the first step only."""
    return klein(diffusers.Flux2KleinKVPipeline)


def generate_with_kept_keys(pipe, **changes):
    known = {name: value for name, value in PICTURE.items() if name != "guidance_scale"}
    return small_sparse.generate(pipe, {**known, **REFERENCES}, **changes)


@pytest.mark.parametrize("ids", ["grids", "none"])
def test_kept_keys_and_values_leave_the_attention_dense(ids, monkeypatch):
    pipe = kept_keys()
    if ids == "none":
        monkeypatch.setattr("chipsparse.pipelines.flux.grids_of", lambda _: None)
    expected = generate_with_kept_keys(pipe)
    with chipsparse.enable(pipe, SparsityConfig.dense()) as handle:
        assert torch.equal(generate_with_kept_keys(pipe), expected)
        assert handle.report.fallbacks == []
    with chipsparse.enable(pipe, EXACT) as handle:
        found = generate_with_kept_keys(pipe)
        lines = handle.report.fallbacks
        assert lines[-1] == (
            "attention runs dense: the pipeline keeps the keys and values of its reference images"
        )
        assert len(lines) == 1
        assert len(handle.report.notes) == (0 if ids == "grids" else 1)
        # The references are gone after the first step: the second begins anew.
        assert actions(handle, "call0")[:4] == ["dense", "dense", "refresh", "sparse"]
        assert {record.attention_kept for record in handle.report.steps} == {None}
        assert handle.report.steps[-1].mlp_kept == 1
    assert_close(found, expected)


def test_without_references_its_attention_runs_sparse():
    pipe = kept_keys()
    expected = generate_with_kept_keys(pipe, image=None)
    with chipsparse.enable(pipe, EXACT) as handle:
        found = generate_with_kept_keys(pipe, image=None)
        assert handle.report.fallbacks == []
        assert handle.report.steps[-1].attention_kept == 1
    assert_close(found, expected)


def test_dev_is_given_its_guidance_and_announces_none(pipe):
    with chipsparse.enable(pipe, SPARSE) as handle:
        generate(pipe, guidance_scale=7.0)
        assert {record.branch for record in handle.report.steps} == {"call0"}
        assert [record.step for record in handle.report.steps] == list(range(STEPS))
    high = generate(pipe, guidance_scale=7.0)
    assert not torch.equal(high, generate(pipe, guidance_scale=1.0))
