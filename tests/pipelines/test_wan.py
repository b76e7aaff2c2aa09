"""The Wan adapter on random-weight pipelines: exactness, isolation, restoring, odd shapes."""

import gc
import weakref

import pytest
import torch
from diffusers.hooks import apply_group_offloading
from diffusers.models.attention_dispatch import attention_backend

import chipsparse
from chipsparse.pipelines.adapter import ADAPTER
from tests.pipelines import small_sparse
from tests.pipelines.model_state import actions, state_of
from tests.schedules import listed
from tests.tiny_models import tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow

STEPS = 7
SPARSE = small_sparse.SPARSE.override({"schedule.refresh_every": 4, "tile": [2, 2, 4]})
EXACT = SPARSE.override(small_sparse.EVERYTHING)


def generate(pipe, prompt="a red circle moves left", *, seed=0, **kwargs):
    batch = len(prompt) if isinstance(prompt, list) else 1
    settings = {
        "height": 64,
        "width": 64,
        "num_frames": 9,
        "num_inference_steps": STEPS,
        "guidance_scale": 4.0,
        "max_sequence_length": 16,
        **kwargs,
    }
    generators = [torch.Generator().manual_seed(seed + i) for i in range(batch)]
    return pipe(prompt, generator=generators, output_type="latent", **settings).frames


@pytest.fixture
def pipe():
    return tiny_wan_pipeline()


@pytest.fixture(scope="module")
def dense():
    return generate(tiny_wan_pipeline())


@pytest.fixture(scope="module")
def sparse():
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, SPARSE):
        return generate(pipe)


# What is computed.


def test_the_report_says_what_was_done(pipe):
    with chipsparse.enable(pipe, SPARSE.override(listed("DRSKSRS"))) as handle:
        generate(pipe)
    expected = ["dense", "refresh", "sparse", "skip", "sparse", "refresh", "sparse"]
    assert actions(handle) == actions(handle, "uncond") == expected
    report = handle.report
    assert report.actions() == {"dense": 1, "refresh": 2, "sparse": 3, "skip": 1}
    assert report.fallbacks == []
    assert report.cache_bytes > 0
    assert report.backends["sparse_mlp_up"] == report.backends["sparse_mlp_down"] == "reference"
    for record in report.steps:
        assert record.steps_total == STEPS
        assert (record.seconds > 0) == (record.action.value != "skip")
        if record.action.value == "sparse":
            assert record.attention_kept == pytest.approx((12 + 2) / 48)
            assert record.mlp_kept == pytest.approx(38 / 128)
            assert len(record.fractions("mlp")) == len(record.fractions("attention")) == 3
        else:
            assert record.attention_kept is record.mlp_kept is None


# Isolation: nothing of a call shows in another.


CHANGES = [
    {},
    {"height": 96, "width": 48},
    {"num_frames": 5},
    {"num_inference_steps": STEPS + 3},
    {"prompt": "a green square moves up"},
    {"guidance_scale": 1.0},
    {"prompt": ["a red circle", "a blue square moves right"]},
]


def test_the_order_of_calls_does_not_matter(pipe):
    other = tiny_wan_pipeline()
    with chipsparse.enable(pipe, SPARSE), chipsparse.enable(other, SPARSE):
        forward = [generate(pipe, **change) for change in CHANGES]
        backward = [generate(other, **change) for change in reversed(CHANGES)]
    assert all(map(torch.equal, forward, reversed(backward)))


def run_branches(model, order):
    """Calls a transformer over four steps; returns the outputs of each branch."""
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(1, 4, 3, 8, 8, generator=generator) for _ in range(4)]
    texts = {
        "cond": torch.randn(1, 16, 32, generator=generator),
        "uncond": torch.randn(1, 16, 32, generator=generator),
    }
    outputs = {branch: [] for branch in texts}
    for step, latents in enumerate(noise):
        for branch in order:
            arguments = {
                "hidden_states": latents,
                "timestep": torch.tensor([900 - 100 * step]),
                "encoder_hidden_states": texts[branch],
                "return_dict": False,
            }
            with torch.no_grad(), model.cache_context(branch, step_index=step):
                outputs[branch].append(model(**arguments)[0])
    return {branch: torch.cat(values) for branch, values in outputs.items() if values}


def test_branches_never_share_state():
    alone, together = tiny_wan_pipeline(), tiny_wan_pipeline()
    with chipsparse.enable(alone, SPARSE), chipsparse.enable(together, SPARSE):
        both = run_branches(together.transformer, ["cond", "uncond"])
        for branch in ("cond", "uncond"):
            assert torch.equal(run_branches(alone.transformer, [branch])[branch], both[branch])


def test_samples_of_a_batch_are_independent(pipe):
    prompts = ["a red circle moves left", "a blue square moves up"]
    # The seeds of random columns differ along the batch, so leave them out.
    with chipsparse.enable(pipe, SPARSE.override({"attention.random_fraction": 0.0})):
        together = generate(pipe, prompts)
        for index, prompt in enumerate(prompts):
            alone = generate(pipe, prompt, seed=index)
            torch.testing.assert_close(alone[0], together[index], atol=1e-4, rtol=1e-4)


# Restoring.


def test_a_failing_enable_leaves_the_pipeline_as_it_was(dense):
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.5)
    del pipe.transformer_2.blocks[1].attn1.processor
    before = state_of(pipe.transformer)
    with pytest.raises(AttributeError):
        chipsparse.enable(pipe, SPARSE)
    assert state_of(pipe.transformer) == before
    assert ADAPTER not in vars(pipe.transformer_2)


def test_an_exception_in_the_with_block_restores(pipe):
    before = state_of(pipe.transformer)
    with pytest.raises(ZeroDivisionError), chipsparse.enable(pipe, SPARSE):
        1 / 0  # noqa: B018
    assert state_of(pipe.transformer) == before


def test_nothing_keeps_a_dropped_pipeline_alive():
    pipe = tiny_wan_pipeline()
    chipsparse.enable(pipe, SPARSE)
    generate(pipe, num_inference_steps=2)
    transformer = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert transformer() is None


def test_unsupported_pipelines_are_refused(pipe):
    pipe.transformer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"transformer is a Linear.*WanTransformer3DModel"):
        chipsparse.enable(pipe, SPARSE)


def test_a_transformer_compiled_as_a_whole_is_refused(pipe):
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    with pytest.raises(ValueError, match="compile_repeated_blocks"):
        chipsparse.enable(pipe, SPARSE)


# Shapes.


@pytest.mark.parametrize(
    "shape",
    [
        {"num_frames": 1, "height": 16, "width": 16},  # one token
        slow({"num_frames": 13, "height": 80, "width": 16}),
    ],
    ids=str,
)
def test_any_shape_that_the_pipeline_accepts(pipe, shape):
    expected = generate(pipe, **shape)
    for config, most in ((EXACT, 2e-4), (SPARSE, 0.3)):
        with chipsparse.enable(pipe, config) as handle:
            found = generate(pipe, **shape)
        assert found.shape == expected.shape
        assert "sparse" in actions(handle)
        assert (found - expected).norm() < most * expected.norm()


def test_per_token_timesteps_follow_the_tile_order(pipe):
    generator = torch.Generator().manual_seed(2)
    arguments = {
        "hidden_states": torch.randn(1, 4, 3, 8, 8, generator=generator),
        "timestep": torch.randint(0, 1000, (1, 48), generator=generator),
        "encoder_hidden_states": torch.randn(1, 16, 32, generator=generator),
        "return_dict": False,
    }
    with torch.no_grad():
        expected = pipe.transformer(**arguments)[0]
        with chipsparse.enable(pipe, SPARSE), pipe.transformer.cache_context("cond", step_index=0):
            found = pipe.transformer(**arguments)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found, expected)  # the order did change


# Living with what else diffusers does to a model.


def test_group_offload_by_block(pipe, sparse):
    with chipsparse.enable(pipe, SPARSE) as handle:
        apply_group_offloading(
            pipe.transformer,
            onload_device=torch.device("cpu"),
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
        )
        assert torch.equal(generate(pipe), sparse)
        assert handle.report.fallbacks == []


def test_group_offload_by_leaf_runs_the_mlp_dense_and_says_so(pipe):
    config = SPARSE.override({"mlp.density": "dense"})
    with chipsparse.enable(pipe, config):
        attention_only = generate(pipe)
    apply_group_offloading(
        pipe.transformer,
        onload_device=torch.device("cpu"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
    )
    with chipsparse.enable(pipe, SPARSE) as handle:
        assert torch.equal(generate(pipe), attention_only)
        assert handle.report.fallbacks == [
            "MLP runs dense in 3 of 3 layers (first: layer 0): "
            "its first linear has hooks of its own (offloading or casting)"
        ]


@pytest.mark.parametrize("enable_first", [True, slow(False)])
def test_model_offload_hooks_may_come_and_go(pipe, sparse, dense, enable_first):
    """What `enable_model_cpu_offload` does, with the CPU in the place of the accelerator."""
    from accelerate import cpu_offload_with_hook
    from accelerate.hooks import remove_hook_from_module

    handle = chipsparse.enable(pipe, SPARSE) if enable_first else None
    for _ in range(2):
        cpu_offload_with_hook(pipe.transformer, torch.device("cpu"))
        handle = handle or chipsparse.enable(pipe, SPARSE)
        assert torch.equal(generate(pipe), sparse)
        remove_hook_from_module(pipe.transformer, recurse=True)
    cpu_offload_with_hook(pipe.transformer, torch.device("cpu"))
    handle.disable()
    assert torch.equal(generate(pipe), dense)
    assert hasattr(pipe.transformer, "_hf_hook")


def test_the_attention_backend_may_change_while_enabled(pipe):
    with attention_backend("native"):  # diffusers sets it globally, too: restore it
        before = tiny_wan_pipeline()
        before.transformer.set_attention_backend("_native_math")
        with chipsparse.enable(before, SPARSE):
            expected = generate(before)
    with attention_backend("native"), chipsparse.enable(pipe, SPARSE):
        pipe.transformer.set_attention_backend("_native_math")
        assert torch.equal(generate(pipe), expected)
    assert pipe.transformer.blocks[0].attn1.processor._attention_backend == "_native_math"


def test_the_attention_backend_may_be_reset_while_enabled(pipe, sparse):
    with attention_backend("native"), chipsparse.enable(pipe, SPARSE) as handle:
        pipe.transformer.set_attention_backend("_native_math")
        pipe.transformer.reset_attention_backend()
        with attention_backend("native"):
            assert torch.equal(generate(pipe), sparse)
        assert handle.report.fallbacks == []
    assert pipe.transformer.blocks[0].attn1.processor._attention_backend is None


def test_a_layer_that_missed_its_refresh_makes_up_for_it(pipe, dense):
    """As `EXACT` keeps everything, so must a layer that was passed over at the refresh."""
    with chipsparse.enable(pipe, EXACT) as handle:
        session = handle._adapters[0].session

        def forget(_pipe, step, _t, tensors):
            if step == 1:
                for cache in session._caches.values():
                    cache.attention.columns = cache.attention.residual = None
                    cache.mlp.activation = None
            return tensors

        found = generate(pipe, callback_on_step_end=forget)
    torch.testing.assert_close(found, dense, atol=2e-4, rtol=2e-4)


def test_the_first_experts_caches_are_freed_when_the_second_takes_over():
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.9)
    held = []
    with chipsparse.enable(pipe, SPARSE) as handle:
        sessions = [adapter.session for adapter in handle._adapters]

        def look(_pipe, _step, _t, tensors):
            held.append([session.cache_bytes() > 0 for session in sessions])
            return tensors

        generate(pipe, callback_on_step_end=look)
    assert held[1] == [True, False]
    assert held[-2:] == [[False, True], [False, False]]  # the last step needs no caches behind it


def test_a_profile_for_another_model_is_refused(pipe, tmp_path):
    path = tmp_path / "other.yaml"
    path.write_text("model_class: FluxTransformer2DModel\n")
    with pytest.raises(ValueError, match="profile for FluxTransformer2DModel, but the pipeline"):
        chipsparse.enable(pipe, path)


def test_other_compiled_components_are_no_obstacle(pipe):
    pipe.vae = torch.compile(pipe.vae, backend="eager")
    chipsparse.enable(pipe, SPARSE).disable()


def test_pipelines_that_name_no_step_or_branch(pipe, sparse, monkeypatch):
    """As image-to-image pipelines: the position comes from the scheduler's timesteps."""
    import contextlib

    with chipsparse.enable(pipe, SPARSE) as handle:
        monkeypatch.setattr(
            type(pipe.transformer), "cache_context", lambda *_, **__: contextlib.nullcontext()
        )
        found = generate(pipe)
    assert actions(handle, "call0") == actions(handle, "call1")
    assert actions(handle, "call0").count("sparse") == 4
    # Only the seeds of the random columns see the name of a branch.
    assert (found - sparse).norm() < 0.3 * sparse.norm()
