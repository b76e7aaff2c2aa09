"""Blocks of host memory: pinned where that works, kept, given back."""

import gc
import weakref

import pytest
import torch

from chipsparse.sparse.cache import host_memory
from chipsparse.sparse.cache.host_memory import HostMemory


@pytest.fixture
def pinned(monkeypatch):
    """Bytes by address of what a stand-in for the driver has pinned."""
    pinned = {}

    def register(memory):
        assert memory.data_ptr() not in pinned
        pinned[memory.data_ptr()] = memory.numel()

    monkeypatch.setattr(host_memory, "_register", register)
    monkeypatch.setattr(host_memory, "_unregister", lambda memory: pinned.pop(memory.data_ptr()))
    return pinned


def acquire(memory, nbytes, pin=True):
    return memory.acquire(nbytes, pin=pin, notify=pytest.fail)


def test_pins_exactly_what_was_asked_for_and_once(pinned):
    memory = HostMemory()
    block = acquire(memory, 12_345)
    assert block.pinned
    assert block.memory.numel() == memory.nbytes == memory.pinned_bytes == 12_345
    assert pinned == {block.memory.data_ptr(): 12_345}
    assert memory.untouched_bytes == 0
    acquire(memory, 8192, pin=False)  # mapped, but not used yet
    assert (memory.untouched_bytes, memory.lent_bytes) == (8192, 20_537)
    memory.release(block)
    assert memory.nbytes - memory.lent_bytes == 12_345
    assert acquire(memory, 9_900) is block  # serves a little less than before
    assert memory.nbytes == memory.lent_bytes
    memory.release(block)
    assert acquire(memory, 9_800) is not block  # more than a quarter would be wasted
    assert memory.nbytes == memory.lent_bytes == 8192 + 9_800


def test_a_refusal_is_noted_and_the_memory_serves_unpinned(monkeypatch):
    def refuse(memory):
        raise RuntimeError("CUDA error 2")

    monkeypatch.setattr(host_memory, "_register", refuse)
    notes = []
    memory = HostMemory()
    block = memory.acquire(3 << 20, pin=True, notify=notes.append)
    assert (block.pinned, memory.pinned_bytes) == (False, 0)
    block.memory.fill_(7)
    assert [reason.text for reason in notes] == [
        "3.0 MiB of host memory for caches could not be pinned (CUDA error 2): copies to the GPU "
        "are slower and hold up the host",
    ]


def test_another_size_frees_what_is_spare_and_only_that(pinned):
    memory = HostMemory()
    held, spare = (acquire(memory, 4096) for _ in range(2))
    memory.release(spare)
    del spare
    acquire(memory, 8192)
    assert sorted(pinned.values()) == [4096, 8192]
    assert held.memory.data_ptr() in pinned
    assert memory.nbytes == 12_288


def test_memory_is_unpinned_when_the_last_one_forgets_it(pinned):
    memory = HostMemory()
    pages = weakref.ref(acquire(memory, 4096).memory)
    assert len(pinned) == 1
    del memory
    gc.collect()
    assert pinned == {}
    assert pages() is None


def test_nothing_is_unpinned_on_a_gpu_that_is_stuck(pinned):
    memory = HostMemory()
    acquire(memory, 8192)
    memory.release(acquire(memory, 4096))
    memory.leave()
    assert (memory.nbytes, sorted(pinned.values())) == (0, [4096, 8192])


@pytest.mark.gpu
def test_cuda_pins_and_unpins_and_says_what_it_refuses():
    memory = HostMemory()
    block = acquire(memory, 5 << 20)
    assert block.memory.is_pinned()
    notes = []
    pages = block.memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "chipsparse.sparse.cache.host_memory._map",
            lambda nbytes: pages,
        )  # pinned already
        again = memory.acquire(5 << 20, pin=True, notify=notes.append)
    assert not again.pinned
    assert "could not be pinned (CUDA error" in notes[0].text
    assert torch.ones(3, device="cuda").sum().item() == 3  # the failure is not reported again
    memory.release(block)
    del block
    memory.free_spare()
    assert not pages.is_pinned()
