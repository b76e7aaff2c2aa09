"""What budgets leave on a GPU that is not here, and on a CPU whose weights are yet to be loaded."""

import pytest
import torch

from chipsparse.cache.memory_plan import UNLIMITED, Capacity, available, declared
from chipsparse.common.machine import host_budget
from chipsparse.config import MemoryConfig

FREE = 100 << 30


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.setattr("chipsparse.cache.memory_plan.host_free_bytes", lambda: FREE)


@pytest.mark.parametrize(
    ("budgets", "capacity"),
    [
        ({}, Capacity(UNLIMITED, FREE * 9 // 10)),
        ({"ram": 7}, Capacity(UNLIMITED, 7)),
        ({"vram": 1000, "ram": 7}, Capacity(1000 - 10 - 200, 7)),
        ({"vram": 1000, "ram": 2 * FREE}, Capacity(790, 2 * FREE)),  # of another machine
        ({"vram": 1000, "offload": "never"}, Capacity(790, 0)),
    ],
)
def test_a_gpu_that_is_not_here(budgets, capacity):
    assert declared(MemoryConfig(**budgets), working=10, pending=200) == capacity


def test_weights_that_are_yet_to_be_loaded_take_host_memory_on_a_cpu():
    found = available(MemoryConfig(), torch.device("cpu"), working=10, pending=FREE // 2)
    assert found == Capacity(host_budget(FREE - FREE // 2 - 10), 0)
    loaded = available(MemoryConfig(), torch.device("cpu"), working=10)
    assert loaded == Capacity(host_budget(FREE - 10), 0)
