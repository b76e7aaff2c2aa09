"""Wan: nothing of a call shows in another, and what else diffusers does to a model."""

import contextlib
import gc
import weakref

import pytest
import torch
from accelerate import cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import apply_group_offloading

import chipsparse
from chipsparse.pipelines.adapter import ADAPTER
from tests.pipelines.model_state import actions, state_of
from tests.pipelines.tiny_runs import STEPS, WAN
from tests.schedules import listed
from tests.tiny_models import random, tiny_wan_pipeline, tiny_wan_transformer
from tests.variants import slow

SPARSE, generate = WAN.SPARSE, WAN.generate
CPU = torch.device("cpu")


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


def test_the_order_of_calls_does_not_matter(pipe):
    changes = [
        {},
        {"height": 32, "width": 48},
        {"num_frames": 5, "num_inference_steps": STEPS - 2},
        {"prompt": "a green square moves up", "guidance_scale": 1.0},
    ]
    other = tiny_wan_pipeline()
    with chipsparse.enable(pipe, SPARSE), chipsparse.enable(other, SPARSE):
        forward = [generate(pipe, **change) for change in changes]
        backward = [generate(other, **change) for change in reversed(changes)]
    assert all(map(torch.equal, forward, reversed(backward)))


def test_branches_never_share_state():
    texts = {"cond": random(1, 16, 32, seed=1), "uncond": random(1, 16, 32, seed=2)}

    def run(model, order):
        """The outputs of each branch over four steps."""
        outputs = {branch: [] for branch in order}
        for step in range(4):
            for branch in order:
                arguments = {
                    "hidden_states": random(1, 4, 3, 8, 8, seed=step),
                    "timestep": torch.tensor([900 - 100 * step]),
                    "encoder_hidden_states": texts[branch],
                    "return_dict": False,
                }
                with torch.no_grad(), model.cache_context(branch, step_index=step):
                    outputs[branch].append(model(**arguments)[0])
        return {branch: torch.cat(values) for branch, values in outputs.items()}

    alone, together = tiny_wan_pipeline(), tiny_wan_pipeline()
    with chipsparse.enable(alone, SPARSE), chipsparse.enable(together, SPARSE):
        both = run(together.transformer, [*texts])
        for branch in texts:
            assert torch.equal(run(alone.transformer, [branch])[branch], both[branch])


def test_pipelines_that_name_no_step_or_branch(pipe, sparse, monkeypatch):
    """As image-to-image pipelines: the position comes from the scheduler's timesteps."""
    with chipsparse.enable(pipe, SPARSE) as handle:
        unnamed = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
        monkeypatch.setattr(type(pipe.transformer), "cache_context", unnamed)
        found = generate(pipe)
    assert actions(handle, "call0") == actions(handle, "call1")
    assert actions(handle, "call0").count("sparse") == 4
    # Only the seeds of the random columns see the name of a branch.
    assert (found - sparse).norm() < 0.3 * sparse.norm()


# Enabling.


def test_a_failing_enable_leaves_the_pipeline_as_it_was():
    pipe = tiny_wan_pipeline(transformer_2=tiny_wan_transformer(seed=9), boundary_ratio=0.5)
    del pipe.transformer_2.blocks[1].attn1.processor
    before = state_of(pipe.transformer)
    with pytest.raises(AttributeError):
        chipsparse.enable(pipe, SPARSE)
    assert state_of(pipe.transformer) == before
    assert ADAPTER not in vars(pipe.transformer_2)


def test_unsupported_models_are_refused_and_other_compiled_components_are_no_obstacle(pipe):
    pipe.vae = torch.compile(pipe.vae, backend="eager")
    chipsparse.enable(pipe, SPARSE).disable()
    pipe.transformer = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"transformer is a Linear.*WanTransformer3DModel"):
        chipsparse.enable(pipe, SPARSE)


def test_nothing_keeps_a_dropped_pipeline_alive():
    pipe = tiny_wan_pipeline()
    chipsparse.enable(pipe, SPARSE)
    generate(pipe, num_inference_steps=2)
    transformer = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert transformer() is None


# Offloading.


def test_group_offload_by_block(pipe, sparse):
    with chipsparse.enable(pipe, SPARSE) as handle:
        options = {"offload_type": "block_level", "num_blocks_per_group": 1}
        apply_group_offloading(pipe.transformer, onload_device=CPU, offload_device=CPU, **options)
        assert torch.equal(generate(pipe), sparse)
    assert handle.report.fallbacks == []


def test_group_offload_by_leaf_runs_the_mlp_dense_and_says_so(pipe):
    with chipsparse.enable(pipe, SPARSE.override({"mlp.density": "dense"})):
        attention_only = generate(pipe)
    options = {"offload_type": "leaf_level"}
    apply_group_offloading(pipe.transformer, onload_device=CPU, offload_device=CPU, **options)
    with chipsparse.enable(pipe, SPARSE) as handle:
        assert torch.equal(generate(pipe), attention_only)
    assert handle.report.fallbacks == [
        "MLP runs dense in 3 of 3 layers (first: layer 0): "
        "its first linear has hooks of its own (offloading or casting)"
    ]


@pytest.mark.parametrize("enable_first", [True, slow(False)])
def test_model_offload_hooks_may_come_and_go(pipe, sparse, dense, enable_first):
    """What `enable_model_cpu_offload` does, with the CPU in the place of the accelerator."""
    handle = chipsparse.enable(pipe, SPARSE) if enable_first else None
    for _ in range(2):
        cpu_offload_with_hook(pipe.transformer, CPU)
        handle = handle or chipsparse.enable(pipe, SPARSE)
        assert torch.equal(generate(pipe), sparse)
        remove_hook_from_module(pipe.transformer, recurse=True)
    cpu_offload_with_hook(pipe.transformer, CPU)
    handle.disable()
    assert torch.equal(generate(pipe), dense)
    assert hasattr(pipe.transformer, "_hf_hook")
