"""Feed-forward layers: which run sparse, what makes one dense, and how their weights are stored."""

import pytest
import torch
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux2 import Flux2ParallelSelfAttnProcessor

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.model_patch import ModelPatch
from chipsparse.sparse.layers.mlp import MLPLayer
from tests.pipelines.changes import Adapted, Packed, add_lora, offload_groups
from tests.pipelines.families import flux2, stable_diffusion3
from tests.pipelines.model_state import state_of
from tests.pipelines.small_sparse import EXACT, SPARSE, assert_close, error, generate
from tests.pipelines.tiny_runs import FLUX
from tests.tiny_models import FLUX_CONFIG, seeded, tiny_flux_pipeline
from tests.variants import slow

LAYERS = FLUX_CONFIG["num_layers"] + FLUX_CONFIG["num_single_layers"]
# A model of joint blocks and single ones, whose linears attention and neurons share; its call.
MODELS = {
    "flux": (tiny_flux_pipeline, FLUX.generate),
    "flux2": (flux2.tiny_flux2_pipeline, lambda pipe: generate(pipe, flux2.PICTURE)),
}


@pytest.fixture
def pipe():
    return tiny_flux_pipeline()


@pytest.fixture(scope="module")
def dense():
    return {name: run(make()) for name, (make, run) in MODELS.items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "gelu", "linear-silu"])
def test_gated_and_other_feed_forwards_run_sparse(activation, bias, pipe):
    for seed, block in enumerate(pipe.transformer.transformer_blocks):
        block.ff = seeded(FeedForward, 32, 32, activation_fn=activation, bias=bias, seed=seed)
        for parameter in block.ff.parameters():
            parameter.data.mul_(3)
    expected = FLUX.generate(pipe)
    with chipsparse.enable(pipe, FLUX.EXACT) as handle:
        assert_close(FLUX.generate(pipe), expected)
    assert handle.report.fallbacks == []
    assert len(handle.report.steps[-1].fractions("mlp")) == LAYERS


@pytest.mark.parametrize(
    ("change", "layer", "reason"),
    [
        ("activation", 1, "its activation ApproximateGELU is not supported"),
        ("weight", 3, "the weight of its first linear is a Packed"),
        ("linear", 0, "its second linear is of class Adapted (an adapter, or quantized)"),
        ("hook", 2, "its first linear has hooks of its own (offloading or casting)"),
    ],
)
def test_a_layer_that_is_not_understood_runs_dense_and_says_so(change, layer, reason, pipe):
    double = pipe.transformer.transformer_blocks
    single = pipe.transformer.single_transformer_blocks
    if change == "activation":
        double[1].ff = FeedForward(32, 32, activation_fn="geglu-approximate")
    elif change == "weight":
        single[1].proj_mlp.weight = Packed(single[1].proj_mlp.weight.data)
    elif change == "linear":
        double[0].ff.net[2].__class__ = Adapted
    else:
        single[0].proj_mlp.register_forward_hook(lambda *_: None)
    expected = FLUX.generate(pipe)
    with chipsparse.enable(pipe, FLUX.EXACT) as handle:
        assert_close(FLUX.generate(pipe), expected)
    where = f"MLP runs dense in 1 of {LAYERS} layers (first: layer {layer}): "
    assert handle.report.fallbacks == [where + reason]
    assert len(handle.report.steps[-1].fractions("mlp")) == LAYERS - 1


@pytest.mark.parametrize(
    ("model", "name"),
    [
        *(("flux", name) for name in ("proj_mlp", "act_mlp", "proj_out")),
        *(("flux2", f"attn.{name}") for name in ("to_qkv_mlp_proj", "mlp_act_fn", "to_out")),
    ],
)
def test_a_module_that_was_replaced_runs_dense_and_says_so(model, name, dense):
    make, run = MODELS[model]
    pipe = make()
    block = pipe.transformer.single_transformer_blocks[1]
    with chipsparse.enable(pipe, FLUX.EXACT) as handle:
        old = block.get_submodule(name)
        if isinstance(old, torch.nn.Linear):
            new = torch.nn.Linear(old.in_features, old.out_features, old.bias is not None)
            new.load_state_dict(old.state_dict())
        else:
            stock = getattr(type(old), "chipsparse_base", type(old))
            new = stock() if model == "flux2" else stock(approximate="tanh")
        block.set_submodule(name, new)
        found = run(pipe)
    (sentence,) = handle.report.fallbacks
    assert sentence.startswith("MLP runs dense in 1 of ")
    assert sentence.endswith(f"its {name.removeprefix('attn.')} was replaced")
    assert_close(found, dense[model])


def test_layers_in_chunks_run_dense_and_say_so():
    pipe = stable_diffusion3.tiny_pipeline()
    call = {**stable_diffusion3.PICTURE, **stable_diffusion3.GUIDED}
    expected = generate(pipe, call)
    pipe.transformer.enable_forward_chunking(chunk_size=2, dim=1)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(generate(pipe, call), expected)
        assert handle.report.fallbacks == [
            "MLP runs dense in 3 of 3 layers (first: layer 0): its block runs it in chunks",
        ]
        pipe.transformer.disable_forward_chunking()
        generate(pipe, call)
        assert handle.report.fallbacks == []


@pytest.mark.parametrize(
    ("model", "target", "which"),
    [
        slow("flux", "ff.net.0.proj", "first"),
        slow("flux", "ff.net.2", "second"),
        slow("flux", "proj_mlp", "first"),
        ("flux", "single_transformer_blocks.1.proj_out", "second"),
        ("flux2", "to_qkv_mlp_proj", "first"),
        slow("flux2", "single_transformer_blocks.1.attn.to_out", "second"),
    ],
)
def test_an_active_lora_runs_dense_a_fused_one_sparse(model, target, which, dense):
    make, run = MODELS[model]
    pipe = make()
    with chipsparse.enable(pipe, FLUX.EXACT) as handle:
        run(pipe)
        add_lora(pipe, target)  # while enabled
        found = run(pipe)
        (sentence,) = handle.report.fallbacks
        reason = f"its {which} linear has an active adapter that is not fused: style"
        assert sentence.endswith(reason)
        assert error(found, dense[model]) > 1e-3
        pipe.transformer.fuse_lora()
        assert_close(run(pipe), found)
        assert handle.report.fallbacks == []
        pipe.transformer.unfuse_lora()
        pipe.transformer.disable_adapters()
        assert_close(run(pipe), dense[model])
        assert handle.report.fallbacks == []
        pipe.transformer.enable_adapters()
    assert_close(run(pipe), found)  # it stays
    pipe.transformer.delete_adapters("style")
    assert_close(run(pipe), dense[model])


@pytest.fixture
def turned(monkeypatch):
    """Turns the weights on a CPU, too, as long as the list's last entry says so."""
    wanted = [True]
    monkeypatch.setattr(ModelPatch, "wants_contiguous_channels", lambda *_: wanted[-1])
    return wanted


def second_weights(pipe):
    ends = ("ff.net.2", "proj_out", "ff.linear_out", "attn.to_out")
    blocks = (*pipe.transformer.transformer_blocks, *pipe.transformer.single_transformer_blocks)
    named = [pair for block in blocks for pair in block.named_modules()]
    return [each.weight for name, each in named if name in ends and hasattr(each, "weight")]


@pytest.mark.parametrize("model", MODELS)
def test_second_weights_are_turned_around_and_restored(model, turned, dense):
    make, run = MODELS[model]
    pipe = make()
    with chipsparse.enable(pipe, FLUX.SPARSE):
        turned.append(False)
        expected = run(pipe)
    before = state_of(pipe.transformer)
    parameters = second_weights(pipe)
    values = [weight.clone() for weight in parameters]
    with chipsparse.enable(pipe, FLUX.SPARSE):
        turned.append(True)
        assert all(weight.is_contiguous() for weight in parameters)  # until it is needed
        assert_close(run(pipe), expected)
        for weight, value, now in zip(parameters, values, second_weights(pipe), strict=True):
            assert now is weight
            assert torch.equal(weight, value)
            assert weight.stride() == (1, weight.shape[0])
        if model == "flux":
            text = pipe.transformer.transformer_blocks[0].ff_context.net[2].weight
            assert text.is_contiguous()  # it stays dense
        pointers = [weight.data_ptr() for weight in parameters]
        run(pipe)
        assert [weight.data_ptr() for weight in second_weights(pipe)] == pointers
        pipe.transformer.to(torch.float64).to(torch.float32)  # a move is no reason to turn again
        assert all(weight.stride(0) == 1 for weight in second_weights(pipe))
        turned.append(False)  # as after a change of the dtype
        run(pipe)
        assert all(weight.is_contiguous() for weight in second_weights(pipe))
        turned.append(True)
        run(pipe)
    assert state_of(pipe.transformer) == before
    assert torch.equal(run(pipe), dense[model])


@pytest.mark.usefixtures("turned")
@pytest.mark.parametrize(
    ("loaded", "generated", "restored"),
    [(False, True, False), (False, False, True), (True, False, True), (True, True, False)],
)
def test_turned_weights_in_and_out_of_inference_mode(loaded, generated, restored, dense):
    mode = torch.inference_mode
    with mode(loaded):
        pipe = tiny_flux_pipeline()
    with mode(generated):
        handle = chipsparse.enable(pipe, FLUX.SPARSE)
        FLUX.generate(pipe, num_inference_steps=3)
    with mode(not generated):
        FLUX.generate(pipe, num_inference_steps=3)
    assert {weight.is_inference() for weight in second_weights(pipe)} == {loaded}
    with mode(restored):
        handle.disable()
    assert {weight.is_inference() for weight in second_weights(pipe)} == {loaded}
    assert torch.equal(FLUX.generate(pipe), dense["flux"])
    if not loaded:
        linear = pipe.transformer.transformer_blocks[0].ff.net[2]
        linear(torch.ones(1, linear.in_features)).sum().backward()
        assert linear.weight.grad is not None


@pytest.mark.usefixtures("turned")
def test_weights_that_are_not_needed_or_in_other_hands_are_not_turned(pipe, dense):
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        assert torch.equal(FLUX.generate(pipe), dense["flux"])
        assert all(weight.is_contiguous() for weight in second_weights(pipe))
    add_lora(pipe, "single_transformer_blocks.1.proj_out")
    pipe.transformer.transformer_blocks[0].ff.net[2].weight = Packed(second_weights(pipe)[0].data)
    with chipsparse.enable(pipe, FLUX.SPARSE):
        FLUX.generate(pipe)
        turned = [not weight.is_contiguous() for weight in second_weights(pipe)]
    assert turned == [False, True, True, False, True]


@pytest.mark.usefixtures("turned")
def test_weights_that_are_offloaded_in_groups_are_not_turned_and_run_dense(pipe):
    offload_groups(pipe.transformer)
    with chipsparse.enable(pipe, FLUX.SPARSE) as handle:
        FLUX.generate(pipe)
        assert all(weight.is_contiguous() for weight in second_weights(pipe))
        assert handle.report.fallbacks == [
            f"MLP runs dense in {LAYERS} of {LAYERS} layers (first: layer 0): "
            "its weights are offloaded in groups, so they cannot be laid out for the kernels",
        ]


def test_weights_within_the_attention_are_views_of_the_models(monkeypatch):
    pipe = flux2.tiny_flux2_pipeline()
    seen = []
    run = MLPLayer.__call__
    attention = pipe.transformer.single_transformer_blocks[1].attn
    first = attention.to_qkv_mlp_proj.weight
    second = attention.to_out.weight
    inner = attention.inner_dim
    neurons = attention.mlp_hidden_dim

    def look(layer, state, hidden, weights, **options):
        if layer.number == 3:
            seen.append([part.data_ptr() for part in (weights.gate, weights.up, weights.down)])
        return run(layer, state, hidden, weights, **options)

    monkeypatch.setattr(MLPLayer, "__call__", look)
    with chipsparse.enable(pipe, FLUX.SPARSE):
        generate(pipe, flux2.PICTURE)
    parts = (first[3 * inner], first[3 * inner + neurons], second[:, inner:])
    assert seen == [[part.data_ptr() for part in parts]] * len(seen) != []


class OwnProcessor(Flux2ParallelSelfAttnProcessor):
    """Splits the projection as it likes."""

    def __call__(self, attn, hidden_states, attention_mask=None, image_rotary_emb=None):
        assert attn.to_qkv_mlp_proj(hidden_states).shape[-1] > 6 * attn.inner_dim
        return super().__call__(attn, hidden_states, attention_mask, image_rotary_emb)


def test_another_processor_runs_all_of_its_block_dense():
    pipe = flux2.tiny_flux2_pipeline()
    with chipsparse.enable(pipe, SPARSE.override({"tile": None})) as handle:
        for block in pipe.transformer.single_transformer_blocks:
            block.attn.set_processor(OwnProcessor())
        generate(pipe, flux2.PICTURE)
    where = "in 2 of 4 layers (first: layer 2)"
    assert handle.report.fallbacks == [
        f"attention runs dense {where}: its processor was replaced",
        f"MLP runs dense {where}: the attention's processor, which computes it, was replaced",
    ]
    assert len(handle.report.steps[-1].fractions("mlp")) == 2
