"""The FLUX adapter on random-weight pipelines: all pipeline classes, tile order, adapters."""

import diffusers
import pytest
import torch
from diffusers import FluxControlNetModel
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux2 import Flux2FeedForward
from PIL import Image

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.flux import FluxAdapter
from chipsparse.pipelines.token_grids import grids_of
from tests.pipelines import small_sparse
from tests.pipelines.changes import add_lora, with_an_effect
from tests.pipelines.model_state import actions, calls_begun, state_of
from tests.pipelines.small_sparse import error, first_step
from tests.schedules import listed
from tests.tiny_models import FLUX_CONFIG, seeded, tiny_flux_pipeline, tiny_flux_transformer
from tests.variants import slow

STEPS = 7
LAYERS = FLUX_CONFIG["num_layers"] + FLUX_CONFIG["num_single_layers"]
TEXT = 16
IN_CHANNELS = FLUX_CONFIG["in_channels"]
SPARSE = small_sparse.SPARSE.override({"schedule.refresh_every": 4, "tile": [1, 4, 4]})
EXACT = SPARSE.override(small_sparse.EVERYTHING)
CLOSE = {"atol": 5e-5, "rtol": 5e-5}


def generate(pipe, prompt="a red circle", *, seed=0, **kwargs):
    batch = len(prompt) if isinstance(prompt, list) else 1
    batch *= kwargs.get("num_images_per_prompt", 1)
    settings = {
        "height": 32,
        "width": 48,
        "num_inference_steps": STEPS,
        "max_sequence_length": TEXT,
        **kwargs,
    }
    generators = [torch.Generator().manual_seed(seed + i) for i in range(batch)]
    return pipe(prompt=prompt, generator=generators, output_type="latent", **settings).images


@pytest.fixture
def pipe():
    return tiny_flux_pipeline()


@pytest.fixture(scope="module")
def dense():
    return generate(tiny_flux_pipeline())


@pytest.fixture(scope="module")
def sparse():
    pipe = tiny_flux_pipeline()
    with chipsparse.enable(pipe, SPARSE):
        return generate(pipe)


def test_first_layers_stay_dense(pipe, dense):
    config = SPARSE.override({"schedule.first_dense_layers": LAYERS})
    with chipsparse.enable(pipe, config) as handle:
        torch.testing.assert_close(generate(pipe), dense, **CLOSE)
    assert {record.attention_kept for record in handle.report.steps} == {None}
    only_single = SPARSE.override({"schedule.first_dense_layers": FLUX_CONFIG["num_layers"]})
    with chipsparse.enable(pipe, only_single) as handle:
        generate(pipe)
    last = handle.report.steps[-1]
    assert len(last.fractions("mlp")) == FLUX_CONFIG["num_single_layers"]


# Pipelines that tell less, and see more than one picture.


def picture(seed, width=48, height=32):
    pixels = torch.randint(
        0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed)
    )
    return Image.fromarray(pixels.to(torch.uint8).numpy())


def transformer_of(channels):
    return tiny_flux_transformer(in_channels=channels * IN_CHANNELS, out_channels=IN_CHANNELS)


def controlnet_components():
    config = {**FLUX_CONFIG, "num_layers": 1, "num_single_layers": 1}
    controlnet = seeded(FluxControlNetModel, **config)
    return {"transformer": tiny_flux_transformer(), "controlnet": with_an_effect(controlnet)}


MASK = Image.new("L", (48, 32), 0)
MASK.paste(255, (8, 8, 40, 24))
VARIANTS = {
    "FluxControlImg2ImgPipeline": (
        lambda: {"transformer": transformer_of(2)},
        {"image": picture(1), "control_image": picture(2), "strength": 0.7},
    ),
    "FluxControlNetPipeline": (controlnet_components, {"control_image": picture(2)}),
    "FluxControlNetImg2ImgPipeline": (
        controlnet_components,
        {"image": picture(1), "control_image": picture(2), "strength": 0.8},
    ),
    "FluxKontextPipeline": (
        dict,
        {"image": picture(1, 40, 24), "max_area": 32 * 48, "_auto_resize": False},
    ),
    "FluxFillPipeline": (
        # latents, masked latents, and the 16 mask pixels that belong to a token
        lambda: {
            "transformer": tiny_flux_transformer(
                in_channels=2 * IN_CHANNELS + 16, out_channels=IN_CHANNELS
            )
        },
        {"image": picture(1), "mask_image": MASK},
    ),
}
CFG = {"negative_prompt": "a blue square", "true_cfg_scale": 2.0}
QUICK = ("FluxControlImg2ImgPipeline", "FluxControlNetPipeline", "FluxKontextPipeline")
CALLS = [(name, {}) if name in QUICK else slow(name, {}) for name in VARIANTS]
CALLS += [slow(name, CFG) for name in ("FluxKontextPipeline", "FluxControlNetPipeline")]


def assert_said_of_a_controlnet(pipe, arguments):
    """That its outputs are not read at skipped steps, in each generation anew."""
    hooks = dict(pipe.controlnet._forward_hooks)
    with chipsparse.enable(pipe, EXACT.override(listed("DRSKSKRS"))) as handle:
        for _ in range(2):
            generate(pipe, **arguments)
            steps = handle.report.steps
            skipped = {record.step for record in steps if record.action == "skip"}
            (note,) = (note for note in handle.report.notes if "ControlNet" in note)
            start, _, seconds = note.removesuffix(" s)").partition(
                ", which do not read its outputs ("
            )
            assert start == f"a ControlNet ran {len(skipped)} times for skipped calls"
            assert 0 < float(seconds) < 60
    assert dict(pipe.controlnet._forward_hooks) == hooks


@pytest.mark.parametrize(("name", "guidance"), CALLS, ids=lambda part: str(part)[:30])
def test_further_pipelines_keep_their_result(name, guidance):
    components, arguments = VARIANTS[name]
    pipe = tiny_flux_pipeline(getattr(diffusers, name), **components())
    steps = 10
    arguments = {**arguments, **guidance, "num_inference_steps": steps}
    expected = generate(pipe, **arguments)
    with chipsparse.enable(pipe, EXACT) as handle:
        found = generate(pipe, **arguments)
        assert handle.report.fallbacks == []
        branches = {record.branch for record in handle.report.steps}
        assert branches == ({"call0", "call1"} if guidance else {"call0"})
        for branch in branches:
            made = actions(handle, branch)
            # Late ones have a dense step more, and so have all where a refresh would be the last.
            start = made.index("refresh")
            assert made[:start] in (["dense"], ["dense", "dense"])
            assert "dense" not in made[start:-1]
            assert "sparse" in made
        made = [record.step for record in handle.report.steps if record.branch == "call0"]
        late = steps - int(steps * arguments.get("strength", 1.0))
        assert made == list(range(late, steps))
        assert not [note for note in handle.report.notes if "ControlNet" in note]
    if "controlnet" in components():
        assert_said_of_a_controlnet(pipe, arguments)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_the_reference_picture_of_kontext_has_a_grid_of_its_own():
    components, arguments = VARIANTS["FluxKontextPipeline"]
    pipe = tiny_flux_pipeline(diffusers.FluxKontextPipeline, **components())
    with chipsparse.enable(pipe, SPARSE) as handle:
        calls = calls_begun(handle)
        generate(pipe, **arguments)
    assert {layout.grids for _, layout in calls} == {((1, 8, 12), (1, 6, 10))}


def test_control_residuals_follow_the_tile_order():
    """They are per token: in another order the result would be another picture."""
    model = tiny_flux_transformer()
    generator = torch.Generator().manual_seed(3)
    arguments = {
        **call_arguments(generator),
        "controlnet_block_samples": [torch.randn(1, 96, 32, generator=generator)] * 2,
        "controlnet_single_block_samples": [torch.randn(1, 96, 32, generator=generator)],
    }
    found, expected, plain = ordered_and_not(model, arguments)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert not torch.equal(found, expected)  # the order did change
    assert error(plain, expected) > 0.1


def call_arguments(generator, dtype=torch.float32):
    rows, columns = torch.meshgrid(torch.arange(8), torch.arange(12), indexing="ij")
    ids = torch.stack([0 * rows, rows, columns], dim=-1).view(-1, 3)
    return {
        "hidden_states": torch.randn(1, 96, IN_CHANNELS, generator=generator).to(dtype),
        "encoder_hidden_states": torch.randn(1, TEXT, 32, generator=generator).to(dtype),
        "pooled_projections": torch.randn(1, 32, generator=generator).to(dtype),
        "timestep": torch.tensor([0.9], dtype=dtype),
        "img_ids": ids.to(dtype),
        "txt_ids": torch.zeros(TEXT, 3, dtype=dtype),
        "return_dict": False,
    }


def ordered_and_not(model, arguments):
    """One call in our tile order, one unpatched, and one unpatched without control residuals."""
    pipe = tiny_flux_pipeline(transformer=model)
    with torch.no_grad():
        expected = model(**arguments)[0]
        bare = {key: value for key, value in arguments.items() if "controlnet" not in key}
        plain = model(**bare)[0]
        with chipsparse.enable(pipe, SPARSE), first_step(pipe):
            found = model(**arguments)[0]
    return found, expected, plain


def test_positions_that_form_no_grid_stay_in_order_and_are_reported(pipe):
    arguments = call_arguments(torch.Generator().manual_seed(4))
    arguments["img_ids"] = torch.randint(0, 99, (96, 3)).float()
    with torch.no_grad():
        expected = pipe.transformer(**arguments)[0]
        with chipsparse.enable(pipe, SPARSE) as handle, first_step(pipe):
            found = pipe.transformer(**arguments)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (
        "image tokens stay in the pipeline's order: their img_ids form no full grids"
        in handle.report.notes
    )


def ids_of(*grids, dtype=torch.float32):
    parts = []
    for picture_index, (rows, columns) in enumerate(grids):
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        parts.append(torch.stack([0 * row + picture_index, row, column], dim=-1).view(-1, 3))
    return torch.cat(parts).to(dtype)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (ids_of((4, 6)), ((1, 4, 6),)),
        (ids_of((4, 6))[None], ((1, 4, 6),)),
        (ids_of((1, 6)), ((1, 1, 6),)),
        (ids_of((6, 1)), ((1, 6, 1),)),
        (ids_of((4, 6), (4, 6)), ((1, 4, 6), (1, 4, 6))),
        (ids_of((4, 6), (3, 5), (7, 2)), ((1, 4, 6), (1, 3, 5), (1, 7, 2))),
        (ids_of((2, 300), dtype=torch.bfloat16), ((1, 2, 300),)),
        (ids_of((300, 2), dtype=torch.bfloat16), ((1, 300, 2),)),
        (ids_of((4, 6)) + torch.tensor([0, 7, 9]), ((1, 4, 6),)),
        (torch.zeros(50, 3), None),
        (ids_of((30, 30))[torch.randperm(900, generator=torch.Generator().manual_seed(0))], None),
    ],
)
def test_grids_are_read_from_the_position_ids(ids, expected):
    assert grids_of(ids) == expected


def test_the_size_that_the_pipeline_chooses(pipe):
    assert FluxAdapter.default_latents == pipe.default_sample_size


# Position.


def test_timesteps_are_matched_as_the_pipeline_rounds_them(pipe):
    with chipsparse.enable(pipe, SPARSE) as handle:
        (adapter,) = handle._adapters
        pipe.scheduler.set_timesteps(28)
        schedule = pipe.scheduler.timesteps
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for value in schedule:
                called = value.expand(2).to(dtype) / 1000
                assert adapter.scheduled_timestep(called, schedule) == float(value)
        assert adapter.scheduled_timestep(torch.tensor([0.3]), None) == pytest.approx(300)


def test_many_steps_in_half_precision_are_told_apart():
    """1,000 steps: neighbouring timesteps are the same number in bfloat16."""
    pipe = tiny_flux_pipeline(transformer=tiny_flux_transformer(num_layers=1, num_single_layers=1))
    pipe.transformer.to(torch.bfloat16)
    pipe.text_encoder.to(torch.bfloat16)
    pipe.text_encoder_2.to(torch.bfloat16)
    with chipsparse.enable(pipe, SPARSE) as handle:

        def stop(pipe, step, _t, tensors):
            pipe._interrupt = step == 6
            return tensors

        generate(pipe, num_inference_steps=1000, height=8, width=8, callback_on_step_end=stop)
    assert [record.step for record in handle.report.steps] == list(range(7))
    assert len({record.generation for record in [handle.report]}) == 1
    assert actions(handle)[:3] == ["dense", "refresh", "sparse"]


# Living with what else diffusers does to a model.


def offload_in_groups(pipe, kind):
    cpu = torch.device("cpu")
    options = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    apply_group_offloading(
        pipe.transformer, onload_device=cpu, offload_device=cpu, offload_type=kind, **options
    )


def test_a_replaced_processor_runs_dense(pipe, dense):
    config = SPARSE.override({"mlp.density": "dense", "tile": None})
    with chipsparse.enable(pipe, config) as handle:
        processor = type(pipe.transformer.transformer_blocks[0].attn.processor)
        pipe.transformer.set_attn_processor(processor())
        assert torch.equal(generate(pipe), dense)
        assert handle.report.fallbacks == [
            f"attention runs dense in {LAYERS} of {LAYERS} layers (first: layer 0): "
            "its processor was replaced"
        ]


def test_fused_projections_stay_fused(pipe):
    expected = generate(pipe)
    pipe.transformer.fuse_qkv_projections()
    with chipsparse.enable(pipe, EXACT) as handle:
        torch.testing.assert_close(generate(pipe), expected, **CLOSE)
        assert handle.report.fallbacks == []


# LoRA and other weights.

LORA_TARGETS = {
    "ff.net.0.proj": (0, "first"),
    "ff.net.2": (0, "second"),
    "proj_mlp": (2, "first"),
    "single_transformer_blocks.1.proj_out": (3, "second"),
}


@pytest.mark.parametrize(
    ("target", "enable_first"),
    [
        slow("ff.net.0.proj", True),
        slow("ff.net.2", False),
        slow("proj_mlp", False),
        ("single_transformer_blocks.1.proj_out", True),
    ],
)
def test_an_active_lora_runs_dense_a_fused_one_sparse(pipe, sparse, target, enable_first):
    layer, which = LORA_TARGETS[target]
    if not enable_first:
        add_lora(pipe, target)
    with chipsparse.enable(pipe, SPARSE) as handle:
        if enable_first:
            assert torch.equal(generate(pipe), sparse)
            add_lora(pipe, target)
        generate(pipe)
        found = next(line for line in handle.report.fallbacks if which in line)
        assert f"(first: layer {layer}): " in found
        assert found.endswith(f"its {which} linear has an active adapter that is not fused: style")
        mlp_layers = len(handle.report.steps[-1].fractions("mlp"))
        assert 0 < mlp_layers < LAYERS

        pipe.transformer.fuse_lora()
        fused = generate(pipe)
        assert handle.report.fallbacks == []
        assert len(handle.report.steps[-1].fractions("mlp")) == LAYERS
        assert error(fused, sparse) > 1e-3

        pipe.transformer.unfuse_lora()
        pipe.transformer.disable_adapters()
        torch.testing.assert_close(generate(pipe), sparse, atol=1e-4, rtol=1e-4)
        assert handle.report.fallbacks == []

        pipe.transformer.enable_adapters()
        pipe.transformer.delete_adapters("style")
        torch.testing.assert_close(generate(pipe), sparse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fused", [slow(False), True])
def test_a_lora_counts_in_full(pipe, fused):
    """On every kind of linear at once, also on those around the tile order."""
    add_lora(pipe, "(x_embedder|context_embedder|proj_out|proj_mlp|to_q|to_out.0|net.2|net.0.proj)")
    expected = generate(pipe)
    assert error(expected, generate(tiny_flux_pipeline())) > 0.01
    with chipsparse.enable(pipe, EXACT) as handle:
        if fused:
            pipe.transformer.fuse_lora()
        torch.testing.assert_close(generate(pipe), expected, atol=2e-4, rtol=2e-4)
        assert (handle.report.fallbacks == []) == fused


def test_a_lora_may_come_while_enabled_and_stay_after(pipe):
    handle = chipsparse.enable(pipe, SPARSE)
    generate(pipe)
    add_lora(pipe, "(x_embedder|proj_mlp|proj_out|ff.net.2)")
    torch.testing.assert_close(
        *(self_made(pipe, config) for config in (handle, None)), atol=2e-4, rtol=2e-4
    )
    fresh = tiny_flux_pipeline()
    add_lora(fresh, "(x_embedder|proj_mlp|proj_out|ff.net.2)")
    assert torch.equal(generate(pipe), generate(fresh))
    block = pipe.transformer.single_transformer_blocks[0]
    assert type(block.proj_mlp.base_layer) is torch.nn.Linear


def self_made(pipe, handle):
    """The dense result in our tile order while enabled; after that the unpatched one."""
    if handle is None:
        return generate(pipe)
    dense_session = SPARSE.override({"schedule.first_dense_layers": LAYERS})
    handle.disable()
    with chipsparse.enable(pipe, dense_session):
        return generate(pipe)


class Packed(torch.nn.Parameter):
    """As quantizers have them: a parameter of another class."""


@pytest.mark.parametrize("name", ["proj_mlp", slow("proj_out")])
def test_a_weight_that_is_no_plain_parameter_runs_dense_and_says_so(pipe, sparse, name):
    linear = getattr(pipe.transformer.single_transformer_blocks[1], name)
    weight = linear.weight
    with chipsparse.enable(pipe, SPARSE) as handle:
        linear.weight = Packed(weight.data)
        generate(pipe)
        which = "first" if name == "proj_mlp" else "second"
        assert handle.report.fallbacks == [
            f"MLP runs dense in 1 of {LAYERS} layers (first: layer 3): "
            f"the weight of its {which} linear is a Packed"
        ]
        linear.weight = weight
        assert torch.equal(generate(pipe), sparse)
        assert handle.report.fallbacks == []


@pytest.mark.parametrize("name", ["proj_mlp", "act_mlp", "proj_out"])
def test_a_replaced_module_runs_dense_and_says_so(pipe, name):
    block = pipe.transformer.single_transformer_blocks[2]
    with chipsparse.enable(pipe, EXACT) as handle:
        old = getattr(block, name)
        new = torch.nn.GELU(approximate="tanh")
        if name != "act_mlp":
            new = torch.nn.Linear(old.in_features, old.out_features)
            new.load_state_dict(old.state_dict())
        setattr(block, name, new)
        found = generate(pipe)
        assert handle.report.fallbacks == [
            f"MLP runs dense in 1 of {LAYERS} layers (first: layer 4): its {name} was replaced"
        ]
    torch.testing.assert_close(found, generate(tiny_flux_pipeline()), **CLOSE)


def test_a_hook_on_a_linear_is_not_passed_over(pipe):
    seen = []
    linear = pipe.transformer.single_transformer_blocks[0].proj_mlp
    linear.register_forward_hook(lambda *call: seen.append(call[2].shape))
    with chipsparse.enable(pipe, SPARSE) as handle:
        generate(pipe)
    assert len(seen) == STEPS
    assert "its first linear has hooks of its own" in handle.report.fallbacks[0]


# Gated feed-forward layers.


def with_feed_forwards(make):
    """A pipeline whose double blocks have another feed-forward module."""
    pipe = tiny_flux_pipeline()
    for seed, block in enumerate(pipe.transformer.transformer_blocks):
        block.ff = seeded(make, seed=seed)
        for parameter in block.ff.parameters():
            parameter.data.mul_(3)
    return pipe


@pytest.mark.parametrize(
    "make",
    [
        lambda: FeedForward(32, 32, activation_fn="swiglu"),
        slow(lambda: FeedForward(32, 32, activation_fn="swiglu", bias=False)),
        slow(lambda: FeedForward(32, 32, activation_fn="geglu")),
        lambda: FeedForward(32, 32, activation_fn="gelu"),
        slow(lambda: FeedForward(32, 32, activation_fn="linear-silu")),
        slow(lambda: Flux2FeedForward(32, 32, mult=4.0)),
        lambda: Flux2FeedForward(32, 32, mult=4.0, bias=True),
    ],
    ids=["swiglu", "swiglu-no-bias", "geglu", "gelu", "silu", "flux2", "flux2-bias"],
)
def test_gated_and_other_feed_forwards_run_sparse(make):
    pipe = with_feed_forwards(make)
    expected = generate(pipe)
    with chipsparse.enable(pipe, EXACT) as handle:
        torch.testing.assert_close(generate(pipe), expected, atol=2e-4, rtol=2e-4)
        assert handle.report.fallbacks == []
        assert len(handle.report.steps[-1].fractions("mlp")) == LAYERS
    only_mlp = SPARSE.override({"attention.density": "dense"})
    with chipsparse.enable(pipe, only_mlp):
        assert 0 < error(generate(pipe), expected) < 0.3


def test_an_unknown_activation_runs_dense_and_says_so():
    pipe = with_feed_forwards(lambda: FeedForward(32, 32, activation_fn="geglu-approximate"))
    with chipsparse.enable(pipe, SPARSE) as handle:
        generate(pipe)
    assert handle.report.fallbacks == [
        f"MLP runs dense in 2 of {LAYERS} layers (first: layer 0): "
        "its activation ApproximateGELU is not supported"
    ]


# The storage of the second weights, which kernels on a GPU want turned around.


@pytest.fixture
def turned(monkeypatch):
    """Turns the weights on a CPU, too."""
    monkeypatch.setattr(FluxAdapter, "_wants_contiguous_channels", lambda *_: True)


def second_weights(pipe):
    model = pipe.transformer
    return [
        *(block.ff.net[2].weight for block in model.transformer_blocks),
        *(block.proj_out.weight for block in model.single_transformer_blocks),
    ]


@pytest.mark.usefixtures("turned")
def test_second_weights_are_turned_around_and_restored(pipe, sparse, dense):
    before, parameters = state_of(pipe.transformer), second_weights(pipe)
    values = [weight.clone() for weight in parameters]
    with chipsparse.enable(pipe, SPARSE):
        assert all(weight.is_contiguous() for weight in parameters)  # until it is needed
        torch.testing.assert_close(generate(pipe), sparse, atol=1e-4, rtol=1e-4)
        for weight, value, now in zip(parameters, values, second_weights(pipe), strict=True):
            assert now is weight
            assert torch.equal(weight, value)
            assert weight.stride() == (1, weight.shape[0])
        context = pipe.transformer.transformer_blocks[0].ff_context.net[2].weight
        assert context.is_contiguous()  # the text's stays dense
    assert state_of(pipe.transformer) == before
    assert torch.equal(generate(pipe), dense)


@pytest.mark.usefixtures("turned")
@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("generated", [False, True])
@pytest.mark.parametrize("restored", [False, True])
def test_turned_weights_in_and_out_of_inference_mode(loaded, generated, restored, dense):
    mode = torch.inference_mode
    with mode(loaded):
        pipe = tiny_flux_pipeline()
    with mode(generated):
        handle = chipsparse.enable(pipe, SPARSE)
        generate(pipe)
    with mode(not generated):
        generate(pipe)
    assert {weight.is_inference() for weight in second_weights(pipe)} == {loaded}
    with mode(restored):
        handle.disable()
    assert {weight.is_inference() for weight in second_weights(pipe)} == {loaded}
    assert torch.equal(generate(pipe), dense)
    if not loaded:
        linear = pipe.transformer.transformer_blocks[0].ff.net[2]
        linear(torch.ones(1, linear.in_features)).sum().backward()
        assert linear.weight.grad is not None


@pytest.mark.usefixtures("turned")
def test_moves_keep_the_storage_and_are_no_reason_to_turn_it_again(pipe):
    with chipsparse.enable(pipe, SPARSE):
        generate(pipe)
        pointers = [weight.data_ptr() for weight in second_weights(pipe)]
        generate(pipe)
        assert [weight.data_ptr() for weight in second_weights(pipe)] == pointers
        strides = [weight.stride() for weight in second_weights(pipe)]
        pipe.transformer.to(torch.float64).to(torch.float32)
        pipe.transformer.cpu()
        assert [weight.stride() for weight in second_weights(pipe)] == strides


def test_weights_are_turned_back_where_no_kernel_wants_them_so_any_more(pipe, monkeypatch):
    """As after `pipe.to(torch.float32)`: a product rounds otherwise in another layout."""
    wanted = [True]
    monkeypatch.setattr(FluxAdapter, "_wants_contiguous_channels", lambda *_: wanted[-1])
    with chipsparse.enable(pipe, SPARSE):
        for turned in (True, False, True):
            wanted.append(turned)
            generate(pipe)
            assert [weight.is_contiguous() for weight in second_weights(pipe)] == [
                not turned
            ] * len(second_weights(pipe))


@pytest.mark.usefixtures("turned")
def test_an_all_dense_plan_turns_nothing(pipe, dense):
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        assert torch.equal(generate(pipe), dense)
        assert all(weight.is_contiguous() for weight in second_weights(pipe))


@pytest.mark.usefixtures("turned")
def test_weights_in_other_hands_are_not_turned(pipe):
    add_lora(pipe, "single_transformer_blocks.1.proj_out")
    pipe.transformer.transformer_blocks[0].ff.net[2].weight = Packed(second_weights(pipe)[0].data)
    with chipsparse.enable(pipe, SPARSE):
        generate(pipe)
        turned = [not weight.is_contiguous() for weight in second_weights(pipe)]
    assert turned == [False, True, True, False, True]


@pytest.mark.usefixtures("turned")
def test_group_offloaded_weights_are_not_turned_and_run_dense(pipe):
    offload_in_groups(pipe, "block_level")
    with chipsparse.enable(pipe, SPARSE) as handle:
        generate(pipe)
        assert all(weight.is_contiguous() for weight in second_weights(pipe))
        assert handle.report.fallbacks == [
            f"MLP runs dense in {LAYERS} of {LAYERS} layers (first: layer 0): "
            "its weights are offloaded in groups, so they cannot be laid out for the kernels"
        ]


def test_an_unsupported_size_of_ids_is_the_models_own_error(pipe):
    arguments = call_arguments(torch.Generator().manual_seed(0))
    arguments["img_ids"] = ids_of((2, 3))
    with (
        chipsparse.enable(pipe, SPARSE),
        torch.no_grad(),
        pytest.raises((RuntimeError, IndexError)),
    ):
        pipe.transformer(**arguments)
