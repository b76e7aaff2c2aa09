"""A GPU: the CPU's results, streams, pinned memory, diffusers' own offloading, compilation."""

import gc

import pytest
import torch

import chipsparse
from chipsparse.sparse.cache.copies import StreamCopies
from chipsparse.sparse.cache.host_memory import HostMemory
from chipsparse.sparse.cache.offload import OffloadPool
from chipsparse.sparse.cache.placement import Capacity
from tests.chipsparse.sparse.cache.races import PoisonedPool
from tests.pipelines.test_memory import HOSTED, IN_FULL, memory_of
from tests.pipelines.tiny_runs import WAN
from tests.schedules import listed
from tests.tiny_models import tiny_wan_pipeline

pytestmark = pytest.mark.gpu

CYCLES = 2_000_000  # about a millisecond, longer than any layer here
ON_HOST = WAN.SPARSE.override(HOSTED)


def sparse_on(device):
    pipe = tiny_wan_pipeline().to(device)
    with chipsparse.enable(pipe, WAN.SPARSE):
        return WAN.generate(pipe)


@pytest.fixture(scope="module")
def expected():
    return sparse_on("cuda")


def test_agrees_with_the_cpu_and_measures_its_steps(expected):
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, WAN.SPARSE.override(listed("DRSKSRS"))) as handle:
        WAN.generate(pipe)
        WAN.generate(pipe, num_frames=5)
    assert handle.report.fallbacks == []
    for record in handle.report.steps:
        assert (record.seconds > 0) == (record.action.value != "skip")
    # Rounding may tip the choice of a column; everything else agrees.
    on_cpu = sparse_on("cpu")
    assert (expected.cpu() - on_cpu).norm() < 0.02 * on_cpu.norm()


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
@pytest.mark.parametrize("make", [OffloadPool, PoisonedPool])
def test_no_stream_overtakes_another(copies, make, expected):
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, ON_HOST) as handle:
        (runner,) = handle._runners
        pool = make(HostMemory(), handle.report.add, copies=copies)
        runner.sparse.session._pool = runner.sparse.session._caches._pool = pool
        for _ in range(2):
            assert torch.equal(WAN.generate(pipe), expected)


@pytest.mark.usefixtures("first_dense_kernel")
@pytest.mark.parametrize("activations", ["model", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_the_gpu_kernels_from_slots(dtype, activations):
    pipe = tiny_wan_pipeline().to("cuda", dtype)
    config = WAN.SPARSE.override({"memory.cache_precision": activations})
    with chipsparse.enable(pipe, config):
        plain = WAN.generate(pipe)
    with chipsparse.enable(pipe, config.override(HOSTED)) as handle:
        assert torch.equal(WAN.generate(pipe), plain)
    assert handle.report.backends["sparse_mlp_up"] != "reference"


def test_a_budget_that_holds_a_part_moves_the_rest_to_the_host(expected, monkeypatch):
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, WAN.SPARSE) as handle:
        WAN.generate(pipe)
    need = handle.report.cache_bytes
    capacity = Capacity(need * 3 // 4, need)
    monkeypatch.setattr("chipsparse.sparse.cache.store.available", lambda *_, **__: capacity)
    worth = "chipsparse.sparse.cache.memory_plan.worth_moving"
    monkeypatch.setattr(worth, lambda _, sizes, **__: set(sizes))
    with chipsparse.enable(pipe, WAN.SPARSE.override(IN_FULL)) as handle:
        assert torch.equal(WAN.generate(pipe), expected)
    assert 0 < handle.report.host_bytes < handle.report.cache_bytes


def test_out_of_memory_in_the_middle_leaks_nothing(expected):
    pipe = tiny_wan_pipeline().to("cuda")
    with chipsparse.enable(pipe, ON_HOST) as handle:

        def held():
            """After a whole generation: its report has a few numbers on the GPU."""
            assert torch.equal(WAN.generate(pipe), expected)
            gc.collect()
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated(), memory_of(handle).nbytes

        before = held()
        calls = []

        def run_out(*_):
            calls.append(None)
            if len(calls) == 8:
                torch.empty(1 << 50, device="cuda")

        hook = pipe.transformer.blocks[1].register_forward_hook(run_out)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            WAN.generate(pipe)
        hook.remove()
        assert handle._runners[0].sparse.session.cache_bytes() == 0
        assert held() == before


@pytest.mark.parametrize("config", [WAN.SPARSE, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("offload_first", [True, False])
def test_beside_model_offload(config, offload_first, expected):
    pipe = tiny_wan_pipeline()
    if offload_first:
        pipe.enable_model_cpu_offload()
    handle = chipsparse.enable(pipe, config)
    if not offload_first:
        pipe.enable_model_cpu_offload()
    for _ in range(2):
        assert torch.equal(WAN.generate(pipe), expected)
        assert next(pipe.transformer.parameters()).device.type == "cpu"
    assert (handle.report.host_bytes > 0) == (config is ON_HOST)
    handle.disable()
    assert WAN.generate(pipe).device.type == "cuda"


@pytest.mark.parametrize("config", [WAN.SPARSE, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("use_stream", [True, False])
def test_beside_group_offload(config, use_stream, expected):
    pipe = tiny_wan_pipeline()
    pipe.enable_group_offload(
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=use_stream,
    )
    with chipsparse.enable(pipe, config) as handle:
        for _ in range(2):
            assert torch.equal(WAN.generate(pipe), expected)
    assert handle.report.fallbacks == []


def test_beside_compiled_blocks(expected):
    pipe = tiny_wan_pipeline().to("cuda")
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    with chipsparse.enable(pipe, WAN.SPARSE):
        plain = WAN.generate(pipe)
    assert (plain - expected).norm() < 0.02 * expected.norm()
    with chipsparse.enable(pipe, ON_HOST):
        assert torch.equal(WAN.generate(pipe), plain)


def test_two_pipelines_take_turns_on_one_gpu(expected):
    pipes = [tiny_wan_pipeline().to("cuda") for _ in range(2)]
    handles = [chipsparse.enable(pipe, ON_HOST) for pipe in pipes]
    found = []

    def other(_pipe, step, _t, tensors):
        if step == 2:
            found.append(WAN.generate(pipes[1]))
        return tensors

    assert torch.equal(WAN.generate(pipes[0], callback_on_step_end=other), expected)
    assert torch.equal(found[0], expected)
    for handle in handles:
        handle.disable()
