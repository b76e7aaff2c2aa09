"""Blocks of host memory: pinned where that works, kept, given back."""

import gc
import weakref

import pytest
import torch

from chipsparse.cache.host_memory import HostMemory


class Driver:
    """Stands in for the driver that pins memory, and keeps what it has pinned."""

    def __init__(self):
        self.pinned = {}

    def register(self, address, nbytes):
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unregister(self, address):
        del self.pinned[address]


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def memory(driver):
    return HostMemory(driver.register, driver.unregister)


def acquire(memory, nbytes, pin=True):
    return memory.acquire(nbytes, pin=pin, notify=pytest.fail)


def test_pins_exactly_what_was_asked_for_and_once(driver, memory):
    block = acquire(memory, 12_345)
    assert block.pinned
    assert block.memory.numel() == memory.nbytes == memory.pinned_bytes == 12_345
    assert driver.pinned == {block.memory.data_ptr(): 12_345}
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


def test_a_refusal_is_noted_and_the_memory_serves_unpinned(driver):
    def refuse(address, nbytes):
        raise RuntimeError("CUDA error 2")

    notes, memory = [], HostMemory(refuse, driver.unregister)
    block = memory.acquire(3 << 20, pin=True, notify=notes.append)
    assert not block.pinned
    assert memory.pinned_bytes == 0
    block.memory.fill_(7)
    assert notes == [
        "3.0 MiB of host memory for caches could not be pinned (CUDA error 2): copies to the GPU "
        "are slower and hold up the host"
    ]


def test_another_size_frees_what_is_spare_and_only_that(driver, memory):
    held, spare = (acquire(memory, 4096) for _ in range(2))
    memory.release(spare)
    del spare
    acquire(memory, 8192)
    assert sorted(driver.pinned.values()) == [4096, 8192]
    assert held.memory.data_ptr() in driver.pinned
    assert memory.nbytes == 12_288


def test_memory_is_unpinned_when_the_last_one_forgets_it(driver):
    memory = HostMemory(driver.register, driver.unregister)
    pages = weakref.ref(acquire(memory, 4096).memory)
    assert len(driver.pinned) == 1
    del memory
    gc.collect()
    assert driver.pinned == {}
    assert pages() is None


@pytest.mark.gpu
def test_cuda_pins_and_unpins_and_says_what_it_refuses():
    memory = HostMemory()
    block = acquire(memory, 5 << 20)
    assert block.memory.is_pinned()
    notes, pages = [], block.memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("chipsparse.cache.host_memory._map", lambda nbytes: pages)  # pinned already
        again = memory.acquire(5 << 20, pin=True, notify=notes.append)
    assert not again.pinned
    assert "could not be pinned (CUDA error" in notes[0]
    assert torch.ones(3, device="cuda").sum().item() == 3  # the failure is not reported again
    memory.release(block)
    del block
    memory.free_spare()
    assert not pages.is_pinned()
