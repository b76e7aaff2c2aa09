"""Transformers without an adapter: attention runs sparse, or there is a reason why it cannot."""

import inspect
import warnings
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    BriaTransformer2DModel,
    ErnieImageTransformer2DModel,
    PRXTransformer2DModel,
    SanaTransformer2DModel,
    SkyReelsV2Transformer3DModel,
    ZImageTransformer2DModel,
)
from diffusers.models.attention_dispatch import dispatch_attention_fn

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.bridge import attention_backend, make_tag
from chipsparse.pipelines.generic import LARGEST_DIFFERENCE, are_close, is_stateless, limits
from tests.pipelines import small_sparse
from tests.pipelines import test_wan as wan
from tests.pipelines.families import flux_kin
from tests.pipelines.families.loop import Loop
from tests.pipelines.model_state import actions, state_of
from tests.tiny_models import TRANSFORMER_CONFIG, random, seeded, tiny_wan_pipeline
from tests.variants import slow_unless

# The second branch that is called knows all sizes from the start, the first one a step later.
FIRST = ["dense", "dense", "refresh", "sparse", "sparse", "refresh", "sparse"]
SECOND = ["dense", "refresh", "sparse", "sparse", "sparse", "refresh", "sparse"]
STEPS = len(FIRST)
TEXT = flux_kin.TEXT
CONFIG = wan.SPARSE
EXACT = wan.EXACT

pytestmark = pytest.mark.filterwarnings("ignore:.*has no adapter of its own:UserWarning")


# As if diffusers had them since yesterday.


def without_adapter(name, base):
    """A class that computes as another one, by a ``forward`` of which that is not known."""
    compute = base.forward

    def forward(self, *args, **kwargs):
        return compute(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(compute)
    return type(name, (base,), {"forward": forward})


NewSkyReels = without_adapter("NewSkyReels", SkyReelsV2Transformer3DModel)
NewBria = without_adapter("NewBria", BriaTransformer2DModel)
NewZImage = without_adapter("NewZImage", ZImageTransformer2DModel)


def skyreels():
    """Self-attention and cross-attention, as in Wan, in a pipeline of Wan."""
    return tiny_wan_pipeline(transformer=seeded(NewSkyReels, **TRANSFORMER_CONFIG))


def bria(arguments=flux_kin.arguments):
    """Joint attention in two kinds of blocks, as in FLUX."""
    return Loop(seeded(NewBria, **flux_kin.CONFIG), arguments, flux_kin.shape, {})


def image(pipe, **changes):
    """What a loop gives."""
    return small_sparse.generate(pipe, {**flux_kin.IMAGE, "num_inference_steps": STEPS}, **changes)


def unpacked(transformer, text):
    """A loop around a model of images that are not packed, with other inputs for each branch."""

    def arguments(latents, timestep, branch, **_):
        states = random(1, TEXT, 16, seed=len(branch))
        return {"hidden_states": latents, "timestep": timestep, **text(states)}

    return Loop(transformer, arguments, lambda **_: (1, 4, 8, 6), {})


def prx():
    """Image queries, keys of text and image, and masks for the text alone."""
    transformer = seeded(
        PRXTransformer2DModel,
        in_channels=4,
        patch_size=2,
        context_in_dim=16,
        hidden_size=32,
        num_heads=2,
        depth=2,
        axes_dim=[8, 8],
    )
    return unpacked(transformer, lambda states: {"encoder_hidden_states": states})


def ernie():
    """Masks the padding of its text in every call."""
    transformer = seeded(
        ErnieImageTransformer2DModel,
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=4,
        out_channels=4,
        text_in_dim=16,
        rope_axes_dim=(4, 6, 6),
    )
    return unpacked(
        transformer, lambda states: {"text_bth": states, "text_lens": torch.tensor([TEXT])}
    )


MODELS = {"NewSkyReels": skyreels, "NewBria": bria}
RUN = {"NewSkyReels": wan.generate, "NewBria": image}
LAYERS = {"NewSkyReels": 3, "NewBria": 5}
TOKENS = {"NewSkyReels": 48, "NewBria": 48 + TEXT}
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def dense():
    return {name: RUN[name](make()) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def runs():
    """One generation of each: its result, its report and the adapter behind it."""
    found = {}
    for name, make in MODELS.items():
        pipe = make()
        handle = chipsparse.enable(pipe, CONFIG)
        found[name] = RUN[name](pipe), handle.report, handle._adapters[0]
    return found


@pytest.fixture(scope="module")
def sparse(runs):
    return {name: result for name, (result, *_) in runs.items()}


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


# What is computed.


@each_model
def test_it_is_said_once_when_enabled_and_in_every_report(name):
    pipe = MODELS[name]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = chipsparse.enable(pipe, CONFIG)
        for _ in range(2):
            RUN[name](pipe)
            assert handle.report.notes == [limits(name)]
    ours = [warning for warning in caught if "adapter" in str(warning.message)]
    assert [str(warning.message) for warning in ours] == [limits(name)]
    assert ours[0].filename == __file__


@each_model
def test_an_all_dense_plan_is_bit_equal_to_the_unpatched_model(name, dense):
    pipe = MODELS[name]()
    for config in (SparsityConfig.dense(), CONFIG.override({"schedule.actions": ["dense"]})):
        with chipsparse.enable(pipe, config) as handle:
            assert torch.equal(RUN[name](pipe), dense[name])
            assert set(handle.report.actions()) == {"dense"}
            assert handle.report.cache_bytes == 0
            assert (limits(name) in handle.report.notes) == config.attention.is_sparse


@pytest.mark.parametrize(("name", "rule"), [*zip(MODELS, ["merge", "difference"], strict=True)])
def test_keeping_everything_is_the_dense_result(name, rule, dense):
    pipe = MODELS[name]()
    with chipsparse.enable(pipe, EXACT.override({"attention.delta_rule": rule})) as handle:
        assert_close(RUN[name](pipe), dense[name])
    assert actions(handle) == FIRST
    assert actions(handle, "uncond") == SECOND


@each_model
def test_attention_runs_sparse_and_nothing_else(name, dense, runs):
    found, report, _ = runs[name]
    assert 0 < (found - dense[name]).norm() < 0.3 * dense[name].norm()
    assert report.cache_bytes > 0
    for record in report.steps:
        assert record.steps_total == STEPS
        assert record.seconds > 0
        assert record.mlp_kept is None
        if record.action == "sparse":
            assert record.attention_kept == pytest.approx(0.3, abs=1 / TOKENS[name])
            assert len(record.attention_fractions) == LAYERS[name]
        else:
            assert record.attention_kept is None


@each_model
def test_the_sizes_are_those_of_the_longest_attention(name, runs):
    adapter = runs[name][-1]
    assert len(adapter.self_attentions()) == LAYERS[name]
    layout = adapter.layout({})
    assert (layout.layers, layout.grids) == (LAYERS[name], ((1, 1, TOKENS[name]),))
    assert (layout.batch, layout.text_tokens) == (1, 0)
    attention = adapter.self_attentions()[0]
    assert layout.heads * layout.head_dim == attention.to_q.out_features


@pytest.mark.parametrize("name", slow_unless(("NewBria",), MODELS))
def test_a_second_generation_equals_the_first_whatever_came_between(name, sparse):
    pipe = MODELS[name]()
    other = {"height": 48, "width": 80} if name == "NewSkyReels" else {"height": 64, "batch": 2}
    expected = RUN[name](pipe, **other)
    with chipsparse.enable(pipe, CONFIG):
        changed = RUN[name](pipe, **other)
        for _ in range(2):
            assert torch.equal(RUN[name](pipe), sparse[name])
        assert torch.equal(RUN[name](pipe, **other), changed)
    with chipsparse.enable(pipe, EXACT):
        assert_close(RUN[name](pipe, **other), expected)


@each_model
def test_caches_in_host_memory_give_the_same_bits(name, sparse):
    pipe = MODELS[name]()
    with chipsparse.enable(pipe, CONFIG.override({"memory.offload": "always"})) as handle:
        assert torch.equal(RUN[name](pipe), sparse[name])
    assert handle.report.host_bytes > 0
    assert handle.report.notes == [limits(name)]


@each_model
def test_disable_restores_the_model_bit_for_bit(name, dense):
    pipe = MODELS[name]()
    before = state_of(pipe.transformer)
    for used in (False, True):
        handle = chipsparse.enable(pipe, CONFIG)
        if used:
            RUN[name](pipe)
        assert state_of(pipe.transformer) != before
        handle.disable()
        assert state_of(pipe.transformer) == before
    assert torch.equal(RUN[name](pipe), dense[name])


def test_an_aborted_call_leaves_no_trace(sparse):
    pipe = bria()
    blocks = pipe.transformer.transformer_blocks
    with chipsparse.enable(pipe, CONFIG):
        for call in (0, 3, 5):
            calls = iter(range(99))

            def fail(*_, calls=calls, call=call):
                if next(calls) == call:
                    raise RuntimeError("injected")

            hook = blocks[1].register_forward_hook(fail)
            with pytest.raises(RuntimeError, match="injected"):
                image(pipe)
            hook.remove()
            assert torch.equal(image(pipe), sparse["NewBria"])


@pytest.mark.slow
@each_model
def test_compiled_blocks_share_one_graph_for_each_kind(name, sparse):
    pipe = MODELS[name]()
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    graphs = []
    blocks = [m for m in pipe.transformer.modules() if type(m).__name__.endswith("Block")]
    with chipsparse.enable(pipe, CONFIG):
        for block in blocks:
            block.compile(backend="eager", fullgraph=True)
        for _ in range(2):
            assert_close(RUN[name](pipe), sparse[name])
            graphs.append(counters["stats"]["unique_graphs"])
    assert not counters["graph_break"]
    # As in FLUX, a single block behind another one gets its input with other strides.
    assert graphs == ([1, 1] if name == "NewSkyReels" else [3, 3])
    torch._dynamo.reset()


def test_a_model_without_a_profile_has_the_general_qualities():
    pipe, general = skyreels(), chipsparse.default_profile().qualities
    for quality, taken in ((None, "balanced"), ("fast", "fast")):
        said = "there is no profile for NewSkyReels: its qualities are those"
        with pytest.warns(UserWarning, match=said):
            handle = chipsparse.enable(pipe, quality=quality)
        with handle:
            assert (handle.config, handle.report.quality) == (general[taken], taken)


def test_models_without_diffusers_caches_are_patched_as_well():
    """Pipelines look for these methods, which the patched class has in any case."""
    pipe = ernie()
    with chipsparse.enable(pipe, CONFIG) as handle:
        (adapter,) = handle._adapters
        with pipe.transformer.cache_context("cond", step_index=3):
            assert adapter.named_position == {"name": "cond", "step_index": 3}
        assert adapter.named_position == {}
        pipe.transformer._reset_stateful_cache()
    assert not hasattr(pipe.transformer, "cache_context")


def test_both_experts_are_served():
    second = seeded(NewSkyReels, **TRANSFORMER_CONFIG)
    pipe = tiny_wan_pipeline(
        transformer=skyreels().transformer, transformer_2=second, boundary_ratio=0.85
    )
    expected = wan.generate(pipe)
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(wan.generate(pipe), expected)
    # Each of them begins as if it were alone; step 5 is a refresh anyway.
    assert actions(handle) == FIRST[:3] + FIRST[:4]
    assert actions(handle, "uncond") == [*SECOND[:3], "dense", "dense", "refresh", "sparse"]
    assert [limits("NewSkyReels")] == handle.report.notes


def test_gradients_are_left_alone():
    pipe = bria()
    with chipsparse.enable(pipe, CONFIG) as handle:
        image(pipe)
        seen = len(handle.report.steps)
        latents = random(1, 48, flux_kin.CHANNELS, seed=0)
        arguments = flux_kin.arguments(latents, torch.tensor([5.0]), "cond", **flux_kin.IMAGE)
        pipe.transformer(**arguments).sample.sum().backward()
        assert len(handle.report.steps) == seen
    assert pipe.transformer.transformer_blocks[0].attn.to_q.weight.grad is not None


def test_branches_of_different_length_are_dense_and_it_is_said():
    """Joint attention with prompts that are not padded: the sizes change from call to call."""

    def arguments(latents, timestep, branch, **call):
        text = {"cond": TEXT, "uncond": TEXT + 2}[branch]
        return flux_kin.arguments(latents, timestep, branch, **call, text=text)

    pipe = bria(arguments)
    expected = image(pipe)
    with chipsparse.enable(pipe, CONFIG) as handle:
        assert_close(image(pipe), expected)
    assert set(handle.report.actions()) == {"dense"}
    assert handle.report.fallbacks == ["attention runs dense: its calls differ in their tokens"]
    assert handle.report.nothing_sparse == f"nothing runs sparse: {handle.report.fallbacks[0]}"
    assert handle.report.notes == [
        limits("NewBria"),
        "its calls have 1 x 54 and 1 x 56 tokens, and what one of them records is forgotten by one "
        "of another size",
    ]


def test_other_lengths_of_cross_attention_change_nothing():
    """The prompts of both branches are in cross-attention only."""
    pipe = skyreels()
    embeds = {
        "prompt": None,
        "prompt_embeds": torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1)),
        "negative_prompt_embeds": torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(2)),
    }
    with chipsparse.enable(pipe, CONFIG) as handle:
        wan.generate(pipe, **embeds)
    assert handle.report.notes == [limits("NewSkyReels")]
    assert actions(handle)[3] == actions(handle, "uncond")[3] == "sparse"


# What cannot run sparse.


def test_models_that_dispatch_nothing_are_refused_when_enabled():
    pipe = tiny_wan_pipeline()
    pipe.transformer = seeded(
        SanaTransformer2DModel,
        num_layers=1,
        num_attention_heads=1,
        attention_head_dim=8,
        num_cross_attention_heads=1,
        cross_attention_head_dim=8,
        cross_attention_dim=8,
        caption_channels=8,
        sample_size=8,
    )
    with pytest.raises(
        ValueError,
        match="transformer is a SanaTransformer2DModel, and none of its attention passes a mask on",
    ):
        chipsparse.enable(pipe, CONFIG)


def test_models_that_are_called_in_another_way_are_refused_when_enabled():
    pipe = tiny_wan_pipeline()
    with torch.device("meta"):
        pipe.transformer = NewZImage(n_layers=1, n_refiner_layers=1)
    with pytest.raises(
        ValueError, match="is a NewZImage, and its forward does not take hidden_stat"
    ):
        chipsparse.enable(pipe, CONFIG)


def test_a_unet_is_refused():
    pipe = SimpleNamespace(components={"unet": torch.nn.Conv2d(1, 1, 1)})
    with pytest.raises(ValueError, match="unet is a Conv2d, and it is no transformer"):
        chipsparse.enable(pipe, CONFIG)


def refuses(pipe, reason, run=None):
    """That the first call fails with this reason, every time, and the model runs afterwards."""
    run = run or (lambda: image(pipe))
    expected = run()
    name = type(pipe.transformer).__name__
    before = state_of(pipe.transformer)
    with chipsparse.enable(pipe, CONFIG) as handle:
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"^{name} has no adapter .*: {reason}"):
                run()
            assert [record.action.value for record in handle.report.steps] == ["dense"]
    assert state_of(pipe.transformer) == before
    assert torch.equal(run(), expected)


def test_attention_masks_are_refused_by_the_first_call():
    refuses(ernie(), "the model passes attention masks; call disable")


def test_masks_of_a_form_of_its_own_are_refused_by_the_first_call():
    refuses(prx(), r"its processor changes attention masks \(Unsupported attention_mask shape")


def test_cross_attention_alone_is_refused_by_the_first_call():
    pipe = skyreels()
    for block in pipe.transformer.blocks:
        stock = block.attn1.processor
        block.attn1.processor = lambda *args, stock=stock: stock(*args)
    refuses(pipe, "none of it is self-attention; call disable", lambda: wan.generate(pipe))


def replace_processors(pipe, mixin):
    """Gives the self-attention modules of SkyReels a processor of another class."""
    for block in pipe.transformer.blocks:
        base = type(block.attn1.processor)
        block.attn1.set_processor(type("Changed", (mixin, base), {})())


class Reshapes:
    def __call__(self, attn, hidden, encoder=None, attention_mask=None, rotary_emb=None):
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None, :]
        return super().__call__(attn, hidden, encoder, attention_mask, rotary_emb)


class Drops:
    def __call__(self, attn, hidden, encoder=None, attention_mask=None, rotary_emb=None):
        return super().__call__(attn, hidden, encoder, None, rotary_emb)


class Scales:
    def __call__(self, attn, hidden, encoder=None, attention_mask=None, rotary_emb=None):
        if attention_mask is not None:
            hidden = hidden * 0.5
        return super().__call__(attn, hidden, encoder, attention_mask, rotary_emb)


@pytest.mark.parametrize(
    ("mixin", "reason"),
    [
        (Reshapes, r"its processor changes attention masks \(too many indices"),
        (Drops, "its attention mask does not reach diffusers' dispatcher"),
        (Scales, "its processor computes something else where there is a mask"),
    ],
)
def test_processors_that_use_the_mask_otherwise_are_refused(mixin, reason):
    """Although cross-attention and the text's own would do."""
    pipe = skyreels()
    replace_processors(pipe, mixin)
    refuses(pipe, reason, lambda: wan.generate(pipe))


def test_one_such_processor_is_refused_as_well():
    """It has as many tokens as the others: a model is served as a whole or not at all."""
    pipe = skyreels()
    block = pipe.transformer.blocks[1]
    base = type(block.attn1.processor)
    block.attn1.set_processor(type("Changed", (Drops, base), {})())
    refuses(pipe, "its attention mask does not reach", lambda: wan.generate(pipe))


def test_modules_that_share_a_processor_are_told_apart(sparse):
    pipe = skyreels()
    processor = pipe.transformer.blocks[0].attn1.processor
    for block in pipe.transformer.blocks:
        block.attn1.set_processor(processor)
        block.attn2.set_processor(processor)
    with chipsparse.enable(pipe, CONFIG):
        assert torch.equal(wan.generate(pipe), sparse["NewSkyReels"])


def test_a_mask_that_comes_later_is_heeded():
    """It is the model's own: the layers that get it run dense."""
    pipe = skyreels()
    mask = torch.ones(1, 1, 1, 48, dtype=torch.bool)
    mask[..., 40:] = False
    masked_from = [99]
    calls = []

    def pass_mask(_module, args):
        hidden, encoder, attention_mask, rotary = args
        calls.append(None)
        return hidden, encoder, mask if len(calls) > masked_from[0] else attention_mask, rotary

    for block in pipe.transformer.blocks:
        block.attn1.register_forward_pre_hook(pass_mask)
    masked_from[0] = 6  # the first step of both branches
    expected = wan.generate(pipe)
    calls.clear()
    with chipsparse.enable(pipe, EXACT) as handle:
        assert_close(wan.generate(pipe), expected)
    assert {record.attention_kept for record in handle.report.steps} == {None}


def test_skipping_needs_a_single_output(monkeypatch):
    pipe = bria()
    forward = NewBria.forward

    def two(self, *args, **kwargs):
        return *forward(self, *args, **kwargs), torch.zeros(1)

    two.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(NewBria, "forward", two)
    with chipsparse.enable(pipe, CONFIG) as handle:
        image(pipe)
        assert actions(handle) == FIRST
    skipping = CONFIG.override({"schedule": {"actions": ["dense", "dense", "skip"]}})
    with (
        chipsparse.enable(pipe, skipping),
        pytest.raises(ValueError, match="more than one tensor, so its steps cannot be skipped"),
    ):
        image(pipe)


@pytest.mark.parametrize("shared", [False, True])
def test_causal_attention_passes_by_the_tag(shared):
    options = {"is_causal": True, "enable_gqa": shared}
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 9, 4, 8, generator=generator) for _ in range(3))
    if shared:
        key, value = key[:, :, :2], value[:, :, :2]
    found = dispatch_attention_fn(
        query, key, value, make_tag(0, 0), backend=attention_backend(), **options
    )
    assert torch.equal(found, dispatch_attention_fn(query, key, value, **options))


def test_what_a_call_could_add_to_is_told_apart():
    tensor = torch.zeros(2)
    assert is_stateless({"a": [tensor, (1, 2.0, None)], "b": "text", "c": True})
    assert not is_stateless({"cache": object()})
    assert not is_stateless([{"keys": [torch.nn.Linear(1, 1)]}])


def test_outputs_are_compared_part_by_part():
    one, other = torch.ones(3), torch.full((3,), 1 + 2 * LARGEST_DIFFERENCE)
    assert are_close((one, one), (one, one * (1 + 0.5 * LARGEST_DIFFERENCE)))
    assert not are_close(one, other)
    assert not are_close((one, one), (one, other))
    assert not are_close(one[:2], one)
    assert not are_close(one * float("nan"), one)


@pytest.mark.parametrize(
    "passed",
    [
        lambda value: value,
        lambda value: value / 1000,  # as AuraFlow
        lambda value: 1 - value / 1000,  # as Lumina 2
        lambda value: (1000 - value) / 1000,
        lambda value: 1000 - value,
    ],
)
def test_timesteps_are_known_as_pipelines_pass_them(passed):
    """That tells other loops by the scheduler from those without."""
    pipe = skyreels()
    pipe.scheduler.set_timesteps(STEPS)
    with chipsparse.enable(pipe, CONFIG) as handle:
        (adapter,) = handle._adapters
        schedule = pipe.scheduler.timesteps
        for value in schedule:
            timestep = passed(value).expand(2)
            assert adapter.scheduled_timestep(timestep, schedule) == value
        assert adapter.scheduled_timestep(torch.tensor([3.5]), schedule) == 3.5
