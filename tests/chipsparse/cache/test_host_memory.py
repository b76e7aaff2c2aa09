"""Blocks of host memory: pinned where that works, kept, given back."""

import gc
import weakref

import pytest
import torch

from chipsparse.cache.host_memory import HostMemory


class Driver:
    """What pins memory, and what it was asked."""

    def __init__(self, refuse=False):
        self.refuse = refuse
        self.pinned = {}

    def register(self, address, nbytes):
        if self.refuse:
            raise RuntimeError("CUDA error 2")
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unregister(self, address):
        del self.pinned[address]

    def memory(self):
        return HostMemory(self.register, self.unregister)


def test_pins_exactly_what_was_asked_for():
    driver = Driver()
    memory = driver.memory()
    block = memory.acquire(12_345, pin=True, notify=pytest.fail)
    assert block.pinned
    assert block.memory.numel() == memory.nbytes == memory.pinned_bytes == 12_345
    assert driver.pinned == {block.memory.data_ptr(): 12_345}


def test_a_refusal_is_noted_and_the_memory_serves_unpinned():
    notes = []
    memory = Driver(refuse=True).memory()
    block = memory.acquire(3 << 20, pin=True, notify=notes.append)
    assert not block.pinned
    assert memory.pinned_bytes == 0
    block.memory.fill_(7)
    assert notes == [
        "3.0 MiB of host memory for caches could not be pinned (CUDA error 2): copies to the GPU "
        "are slower and hold up the host"
    ]


def test_what_comes_back_serves_again_and_is_pinned_once():
    driver = Driver()
    memory = driver.memory()
    first = memory.acquire(4096, pin=True, notify=pytest.fail)
    memory.release(first)
    assert memory.nbytes - memory.lent_bytes == 4096
    assert memory.acquire(4096, pin=True, notify=pytest.fail) is first
    assert memory.nbytes - memory.lent_bytes == 0
    assert len(driver.pinned) == 1


def test_another_size_frees_what_is_spare_and_only_that():
    driver = Driver()
    memory = driver.memory()
    held, spare = (memory.acquire(4096, pin=True, notify=pytest.fail) for _ in range(2))
    memory.release(spare)
    del spare
    memory.acquire(8192, pin=True, notify=pytest.fail)
    assert sorted(driver.pinned.values()) == [4096, 8192]
    assert held.memory.data_ptr() in driver.pinned
    assert memory.nbytes == 12_288


def test_a_little_less_than_before_is_served_by_the_same_block():
    memory = Driver().memory()
    block = memory.acquire(10_000, pin=True, notify=pytest.fail)
    memory.release(block)
    assert memory.acquire(8_000, pin=True, notify=pytest.fail) is block
    memory.release(block)
    other = memory.acquire(7_999, pin=True, notify=pytest.fail)  # a quarter more would be wasted
    assert other is not block
    assert memory.nbytes == memory.lent_bytes == 7_999


def test_what_is_mapped_but_not_pinned_is_not_used_yet():
    driver = Driver()
    memory = driver.memory()
    memory.acquire(4096, pin=True, notify=pytest.fail)
    assert memory.untouched_bytes == 0
    memory.acquire(8192, pin=False, notify=pytest.fail)
    assert (memory.untouched_bytes, memory.lent_bytes) == (8192, 12_288)


def test_memory_is_unpinned_when_the_last_one_forgets_it():
    driver = Driver()
    memory = driver.memory()
    memory.acquire(4096, pin=True, notify=pytest.fail)
    pages = weakref.ref(memory.acquire(4096, pin=True, notify=pytest.fail).memory)
    del memory
    gc.collect()
    assert driver.pinned == {}
    assert pages() is None


def test_too_much_is_a_memory_error_and_takes_nothing():
    memory = Driver().memory()
    with pytest.raises(MemoryError, match=r"GiB of host memory: "):
        memory.acquire(1 << 60, pin=True, notify=pytest.fail)
    assert memory.nbytes == 0


@pytest.mark.gpu
def test_cuda_pins_and_unpins_and_says_what_it_refuses():
    memory = HostMemory()
    block = memory.acquire(5 << 20, pin=True, notify=pytest.fail)
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
