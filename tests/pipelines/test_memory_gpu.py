"""Caches in host memory beside a GPU: streams, pinning, diffusers' own offloading, compilation."""

import gc

import pytest
import torch

import chipsparse
from chipsparse.cache.copies import StreamCopies
from chipsparse.cache.host_memory import HostMemory
from chipsparse.cache.memory_plan import Capacity
from chipsparse.cache.offload import OffloadPool
from chipsparse.kernels.dense_attention.measure import FastestKernel
from tests.pipelines.test_memory import HOSTED, memory_of
from tests.pipelines.test_wan import SPARSE, generate
from tests.tiny_models import tiny_wan_pipeline

pytestmark = pytest.mark.gpu

CYCLES = 2_000_000  # about a millisecond, longer than any layer here


@pytest.fixture(scope="module")
def expected():
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE):
        return generate(pipe)


class LateCopies(StreamCopies):
    """Copies that start late: what does not wait for them meets the memory as it was before."""

    def _copy(self, stream, target, source, after):
        self._order(stream, after)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)
        return super()._copy(stream, target, source, ())


class LateLayers(StreamCopies):
    """A computation that lags behind: what does not wait for it copies what is not there yet."""

    def mark(self):
        torch.cuda._sleep(CYCLES)
        return super().mark()


@pytest.mark.parametrize("copies", [LateCopies, LateLayers])
@pytest.mark.parametrize("poison", [False, True])
def test_no_stream_overtakes_another(copies, poison, expected):
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE.override(HOSTED)) as handle:
        (adapter,) = handle._adapters
        pool = OffloadPool(HostMemory(), handle.report.fall_back, copies=copies, poison=poison)
        adapter.session._pool = adapter.session._caches._pool = pool
        for _ in range(2):
            assert torch.equal(generate(pipe), expected)


def test_memory_that_cannot_be_pinned_serves_unpinned(expected, monkeypatch):
    def refuse(address, nbytes):
        raise RuntimeError("CUDA error 2")

    monkeypatch.setattr("chipsparse.cache.host_memory._register", refuse)
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE.override(HOSTED)) as handle:
        assert torch.equal(generate(pipe), expected)
        assert memory_of(handle).pinned_bytes == 0
        assert memory_of(handle).nbytes > 0
    assert any("could not be pinned (CUDA error 2)" in each for each in handle.report.notes)


def test_beside_model_offload(expected):
    pipe = tiny_wan_pipeline()
    pipe.enable_model_cpu_offload()
    with chipsparse.enable(pipe, SPARSE.override(HOSTED)) as handle:
        for _ in range(2):
            assert torch.equal(generate(pipe), expected)
        assert handle.report.host_bytes > 0


@pytest.mark.parametrize("use_stream", [True, False])
def test_beside_group_offload(use_stream, expected):
    pipe = tiny_wan_pipeline()
    pipe.enable_group_offload(
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=use_stream,
    )
    with chipsparse.enable(pipe, SPARSE.override(HOSTED)) as handle:
        for _ in range(2):
            assert torch.equal(generate(pipe), expected)
        assert handle.report.host_bytes > 0


def test_beside_compiled_blocks():
    pipe = tiny_wan_pipeline().to("cuda")
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    with chipsparse.enable(pipe, SPARSE):
        plain = generate(pipe)
    with chipsparse.enable(pipe, SPARSE.override(HOSTED)):
        assert torch.equal(generate(pipe), plain)


@pytest.mark.parametrize("activations", ["full", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_the_gpu_kernels_from_slots(dtype, activations, monkeypatch):
    # Two sessions may find another dense kernel the fastest, and so round otherwise.
    monkeypatch.setattr(FastestKernel, "pick", lambda _, kernels, *inputs: next(iter(kernels)))
    pipe = tiny_wan_pipeline().to("cuda", dtype)
    config = SPARSE.override({"memory.cache_precision": activations})
    with chipsparse.enable(pipe, config):
        plain = generate(pipe)
    with chipsparse.enable(pipe, config.override(HOSTED)) as handle:
        assert torch.equal(generate(pipe), plain)
        assert handle.report.backends["sparse_mlp_up"] != "reference"


def test_a_budget_that_holds_a_part_moves_the_rest_to_the_host():
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE) as handle:
        plain = generate(pipe)
        need = handle.report.cache_bytes
    with pytest.MonkeyPatch.context() as patch:
        capacity = Capacity(need * 3 // 4, need)
        patch.setattr("chipsparse.cache.store.available", lambda *_, **__: capacity)
        patch.setattr(
            "chipsparse.cache.memory_plan.worth_moving", lambda _, sizes, **__: set(sizes)
        )
        in_full = {"memory.cache_precision": "full"}
        with chipsparse.enable(pipe, SPARSE.override(in_full)) as handle:
            assert torch.equal(generate(pipe), plain)
            assert 0 < handle.report.host_bytes < handle.report.cache_bytes


def test_out_of_memory_in_the_middle_leaks_nothing(expected):
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, SPARSE.override(HOSTED)) as handle:

        def held():
            """After a whole generation: its report has a few numbers on the GPU."""
            assert torch.equal(generate(pipe), expected)
            gc.collect()
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(), memory_of(handle).nbytes

        before, calls = held(), []

        def run_out(*_):
            calls.append(None)
            if len(calls) == 8:
                torch.empty(1 << 50, device="cuda")

        hook = pipe.transformer.blocks[1].register_forward_hook(run_out)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            generate(pipe)
        hook.remove()
        assert handle._adapters[0].session.cache_bytes() == 0
        assert held() == before


def test_two_pipelines_take_turns_on_one_gpu(expected):
    pipes = [tiny_wan_pipeline().to("cuda") for _ in range(2)]
    handles = [chipsparse.enable(pipe, SPARSE.override(HOSTED)) for pipe in pipes]
    found = []

    def other(_pipe, step, _t, tensors):
        if step == 2:
            found.append(generate(pipes[1]))
        return tensors

    assert torch.equal(generate(pipes[0], callback_on_step_end=other), expected)
    assert torch.equal(found[0], expected)
    for handle in handles:
        handle.disable()
