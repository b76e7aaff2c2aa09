"""The pool of caches in host memory: values, order of copies, room, reuse."""

import pytest
import torch

from chipsparse.report.recorder import Traffic
from chipsparse.sparse.cache.host_memory import HostMemory
from chipsparse.sparse.cache.offload import OffloadPool
from chipsparse.sparse.cache.tensors import Kept
from tests.chipsparse.sparse.cache.races import TracedCopies, WatchComputation

CPU = torch.device("cpu")
LAYERS = 5
RESIDUAL = Kept.RESIDUAL


def key(layer, part="attention", branch="cond"):
    return branch, layer, part


def pool_with(layers=LAYERS, size=64, make=OffloadPool, **options):
    pool = make(HostMemory(), pytest.fail, **options)
    pool.open({key(layer): {RESIDUAL: size, Kept.LSE: size} for layer in range(layers)}, CPU)
    return pool


def store(pool, layer, tensor):
    pool.store(key(layer), {RESIDUAL: tensor})


def load(pool, layer):
    return pool.load(key(layer), {RESIDUAL})[RESIDUAL]


def prefetch(pool, layer):
    pool.prefetch(key(layer), {RESIDUAL})


def numbers(layer, *shape):
    return torch.arange(layer, layer + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_a_tensor_comes_back_with_its_strides_and_dtype(dtype):
    pool = pool_with(size=4096)
    whole = torch.arange(2 * 6 * 8).to(dtype).view(2, 6, 8)
    tensors = [whole, whole[:, :, :5].transpose(1, 2), whole.mT, whole[1, 2], whole[:0]]
    for layer, tensor in enumerate(tensors):
        assert key(layer) in pool
        assert not pool.has(key(layer), RESIDUAL)
        store(pool, layer, tensor)
        pool.release(key(layer))
        assert pool.has(key(layer), RESIDUAL)
    for layer, tensor in enumerate(tensors):
        loaded = load(pool, layer)
        assert torch.equal(loaded, tensor)
        assert (loaded.dtype, loaded.stride()) == (dtype, tensor.stride())
        pool.release(key(layer))
    assert key(LAYERS) not in pool


def test_there_are_two_slots_per_part_of_its_largest_tensors():
    pool = OffloadPool(HostMemory(), pytest.fail)
    sizes = {key(0): {RESIDUAL: 100, Kept.LSE: 9}, key(1): {RESIDUAL: 300, Kept.LSE: 5}}
    pool.open(sizes | {key(1, "mlp"): {Kept.OUTPUT: 5}}, CPU)
    assert pool.slots == {"attention": {RESIDUAL: 300, Kept.LSE: 9}, "mlp": {Kept.OUTPUT: 5}}
    assert [len(slots) for slots in pool._opened.slots.values()] == [2, 2]
    pool.open({key(0, branch="uncond"): {RESIDUAL: 500}}, CPU)
    assert pool.slots == {"attention": {RESIDUAL: 500, Kept.LSE: 9}, "mlp": {Kept.OUTPUT: 5}}


def test_traffic_is_counted_and_what_is_larger_than_planned_is_refused():
    pool = pool_with()
    store(pool, 0, numbers(0, 16))
    pool.release(key(0))
    assert pool.stored_bytes == 64
    assert pool.take_traffic() == {(0, "attention"): Traffic(to_host=64)}
    store(pool, 0, load(pool, 0))
    assert pool.take_traffic() == {(0, "attention"): Traffic(to_device=64, to_host=64)}
    assert pool.take_traffic() == {}
    for larger in (numbers(0, 17), numbers(0, 3, 16)[:, 0]):  # gaps between elements count
        with pytest.raises(RuntimeError, match=r"residual of layer 0 takes .* 64 were planned"):
            store(pool, 0, larger)
    pool.drop(key(0))
    assert key(0) not in pool


def walk(pool, *, rewritten=False, layers=LAYERS):
    """Refresh, then sparse calls as a session makes them; checks every value."""
    for layer in range(layers):
        store(pool, layer, numbers(layer, 16).mul(1.0))
        pool.release(key(layer))
    for call in range(3):
        prefetch(pool, 0)
        for layer in range(layers):
            tensor = load(pool, layer)
            if layer + 1 < layers:
                prefetch(pool, layer + 1)
            if rewritten:
                assert torch.equal(tensor, numbers(layer, 16) + call)
                tensor += 1
                store(pool, layer, tensor)
            else:
                assert torch.equal(tensor, numbers(layer, 16))
            pool.release(key(layer))


def traced(forget=None, **options):
    copies = TracedCopies(forget)
    return pool_with(copies=lambda _: copies, **options), copies


@pytest.mark.parametrize("layers", [1, 2, 3, LAYERS])
@pytest.mark.parametrize("rewritten", [False, True])
def test_no_copy_can_overtake_the_computation(rewritten, layers):
    pool, copies = traced(layers=layers)
    with WatchComputation(pool):
        walk(pool, rewritten=rewritten, layers=layers)
        walk(pool, rewritten=rewritten, layers=layers)  # a refresh after sparse calls
    assert copies.races == []
    assert len(copies.accesses) > layers


@pytest.mark.parametrize(
    "forget",
    [
        ("to_device", 0),  # a slot is filled while a layer still reads it
        ("to_device", 1),  # ... or before what was in it was written back
        ("to_device", 2),  # a load before the write-back to its place
        ("to_host", 0),  # a write-back before the computation
        ("wait", 0),  # a computation before its slot is filled
        ("wait", 1),  # a new tensor over one that is still written back
    ],
)
def test_every_wait_is_needed(forget):
    races = []
    for layers in (1, 2, LAYERS):
        for rewritten in (False, True):
            pool, copies = traced(forget, layers=layers)
            with WatchComputation(pool):
                walk(pool, rewritten=rewritten, layers=layers)
                walk(pool, rewritten=rewritten, layers=layers)
            races += copies.races
    assert races


def test_a_write_back_waits_for_a_load_that_nobody_used():
    """A call that was expected and did not come: what it had fetched is refreshed instead."""
    for forget in (None, ("to_host", 1)):
        pool, copies = traced(forget)
        store(pool, 0, numbers(0, 16))
        pool.release(key(0))
        copies.wait = lambda marks: None  # as if the computation had waited for nothing since
        prefetch(pool, 0)
        for other in (1, 2):  # the second takes the slot of what was fetched
            store(pool, other, numbers(1, 16))
        pool.release(key(1))
        store(pool, 0, numbers(5, 16))
        assert any("to_host writes" in race for race in copies.races) == (forget is not None)


def test_slots_wait_for_what_had_their_memory_and_memory_for_copies_of_its_last_tensor():
    """Before slots grow, and before all is freed."""
    pool, copies = traced(layers=1)
    assert all(slot.used is not None for slot in pool._opened.slots["attention"])
    waits = []
    copies.synchronize = lambda: waits.append(None)
    store(pool, 0, numbers(0, 16))
    pool.release(key(0))
    pool.open({key(1): {RESIDUAL: 64}}, CPU)
    assert waits == []
    pool.open({key(2): {RESIDUAL: 128}}, CPU)
    assert waits == [None]
    pool.drop(key(0))
    pool.reset()
    assert waits == [None, None]


def test_a_second_generation_allocates_nothing_in_and_out_of_inference_mode():
    host = HostMemory()
    pool = OffloadPool(host, pytest.fail)
    sizes = {key(layer): {RESIDUAL: 1000 + layer} for layer in range(3)}
    addresses = set()
    for inference in (True, False, True):
        with torch.inference_mode(inference), torch.no_grad():
            pool.open(sizes, CPU)
            addresses.add(pool._opened.homes[key(0)].memory[RESIDUAL].data_ptr())
            walk(pool, layers=3, rewritten=True)
        pool.reset()
        assert not pool.has(key(0), RESIDUAL)
        assert pool.slots == {}
    assert len(addresses) == 1
    assert (host.lent_bytes, host.nbytes) == (0, 3 * 1024)
    pool.close()
    assert host.nbytes == 0


def test_refused_memory_leaves_the_pool_as_it_was():
    host = HostMemory()
    pool = OffloadPool(host, pytest.fail)
    pool.open({key(0): {RESIDUAL: 64}}, CPU)
    store(pool, 0, numbers(0, 16))
    pool.release(key(0))
    with pytest.raises(MemoryError, match="of host memory"):
        pool.open({key(1): {RESIDUAL: 1 << 60}}, CPU)
    assert key(1) not in pool
    assert torch.equal(load(pool, 0), numbers(0, 16))
