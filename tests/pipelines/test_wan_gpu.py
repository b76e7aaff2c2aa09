"""The Wan adapter on a GPU: the CPU's results, repeatable, beside diffusers' offloading."""

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from tests.pipelines.test_wan import EXACT, SPARSE, actions, generate
from tests.schedules import listed
from tests.tiny_models import tiny_wan_pipeline

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def sparse_on_cpu():
    pipe = tiny_wan_pipeline()
    with chipsparse.enable(pipe, SPARSE):
        return generate(pipe)


def test_agrees_with_the_cpu(sparse_on_cpu):
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE) as handle:
        found = generate(pipe).cpu()
    assert handle.report.fallbacks == []
    # Rounding may tip the choice of a column; everything else agrees.
    assert (found - sparse_on_cpu).norm() < 0.02 * sparse_on_cpu.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keeping_everything_is_the_dense_result(dtype):
    pipe = tiny_wan_pipeline().to("cuda", dtype)
    expected = generate(pipe)
    with chipsparse.enable(pipe, SparsityConfig.dense()):
        assert torch.equal(generate(pipe), expected)
    with chipsparse.enable(pipe, EXACT):
        found = generate(pipe)
    tolerance = 1e-3 if dtype is torch.float32 else 0.05
    assert (found - expected).norm() < tolerance * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generations_are_bit_equal(dtype):
    pipe = tiny_wan_pipeline().to("cuda", dtype)
    with chipsparse.enable(pipe, SPARSE):
        first = generate(pipe)
        generate(pipe, "a green square grows", num_frames=5)
        assert torch.equal(generate(pipe), first)


def test_step_times_are_measured_on_the_device():
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE.override(listed("DRSKSRS"))) as handle:
        generate(pipe)
    for record in handle.report.steps:
        assert (record.seconds > 0) == (record.action.value != "skip")


@pytest.mark.parametrize("offload_first", [True, False])
def test_model_cpu_offload(offload_first):
    expected_pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(expected_pipe, SPARSE):
        expected = generate(expected_pipe)
    pipe = tiny_wan_pipeline()
    if offload_first:
        pipe.enable_model_cpu_offload()
    handle = chipsparse.enable(pipe, SPARSE)
    if not offload_first:
        pipe.enable_model_cpu_offload()
    for _ in range(2):
        assert torch.equal(generate(pipe), expected)
        assert "sparse" in actions(handle)
        assert next(pipe.transformer.parameters()).device.type == "cpu"
    handle.disable()
    assert generate(pipe).device.type == "cuda"


@pytest.mark.parametrize("use_stream", [True, False])
def test_group_offload(use_stream):
    expected_pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(expected_pipe, SPARSE):
        expected = generate(expected_pipe)
    pipe = tiny_wan_pipeline()
    pipe.enable_group_offload(
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=use_stream,
    )
    with chipsparse.enable(pipe, SPARSE) as handle:
        for _ in range(2):
            assert torch.equal(generate(pipe), expected)
        assert handle.report.fallbacks == []
        assert "sparse" in actions(handle)


def test_compiled_blocks():
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE):
        expected = generate(pipe)
        pipe.transformer.compile_repeated_blocks(fullgraph=True)
        found = generate(pipe)
    assert (found - expected).norm() < 0.02 * expected.norm()


def test_out_of_memory_frees_everything_and_the_next_call_is_right():
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE) as handle:
        expected = generate(pipe)
        calls = []

        def run_out(*_):
            calls.append(None)
            if len(calls) == 8:
                torch.empty(1 << 50, device="cuda")

        hook = pipe.transformer.blocks[1].register_forward_hook(run_out)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            generate(pipe)
        hook.remove()
        assert handle._adapters[0].session.cache_bytes() == 0
        assert torch.equal(generate(pipe), expected)
