"""Launches on pretended compiled kernels: which one is found again, and what it is called with."""

from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import pytest
import torch

from chipsparse.kernels.kinds import known_of

launching = pytest.importorskip("chipsparse.kernels.launch")


class Kernel:
    """A kernel with the parameters x, n, TILE and num_warps that notes how it is launched."""

    arg_names = ("x", "n", "TILE", "num_warps")

    def __init__(self):
        self.compiled = []
        self.launches = []

    def __getitem__(self, grid):
        def compile_and_launch(*args, **constants):
            self.compiled.append((grid, args, constants))
            return Compiled(self.launches, len(self.compiled) - 1)

        return compile_and_launch


class Compiled:
    def __init__(self, launches, number):
        self.launches = launches
        self.number = number

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((self.number, grid, args))


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "JITFunction", Kernel)
    known_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    return Kernel()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_repeated_launch_finds_the_compiled_kernel_and_runs_where_its_tensors_are(
    prepared,
    kernel,
    monkeypatch,
):
    options = {"num_warps": 4, "TILE": 64, "maxnreg": None}
    entered = []
    once = launching.Launch(kernel, (6, 2), 7, **options)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: entered.append(x) or nullcontext())
    tensors = torch.zeros(3, 16)
    for x, current in zip(tensors, (0, 0, 1), strict=True):
        monkeypatch.setattr(torch.cuda, "current_device", lambda number=current: number)
        once(x) if prepared else launching.launch(kernel, (6, 2), x, 7, **options)
    assert len(kernel.compiled) == 1
    for (_, grid, (x, *rest)), given in zip(kernel.launches, tensors[1:], strict=True):
        assert (grid[:3], x.data_ptr(), rest) == ((6, 2, 1), given.data_ptr(), [7, 64, 4])
    assert [x.data_ptr() for x in entered] == [tensors[0].data_ptr(), tensors[2].data_ptr()]


@pytest.mark.parametrize(
    ("tensor", "number", "constants"),
    [
        (torch.zeros(16).half(), 7, {"TILE": 64, "num_warps": 4}),
        (torch.zeros(17)[1:], 7, {"TILE": 64, "num_warps": 4}),
        (torch.zeros(16, device="meta"), 7, {"TILE": 64, "num_warps": 4}),
        (torch.zeros(16), 8, {"TILE": 64, "num_warps": 4}),
        (torch.zeros(16), 7, {"TILE": 32, "num_warps": 4}),
        (torch.zeros(16), 7, {"TILE": 64, "num_warps": 8}),
    ],
    ids=["dtype", "alignment", "device", "number", "constant", "option"],
)
def test_other_arguments_ask_triton(kernel, tensor, number, constants):
    launching.launch(kernel, (5,), torch.zeros(16), 7, TILE=64, num_warps=4)
    launching.launch(kernel, (5,), tensor, number, **constants)
    launching.launch(other := Kernel(), (5,), torch.zeros(16), 7, TILE=64, num_warps=4)
    assert (len(kernel.compiled), len(other.compiled)) == (2, 1)
    assert kernel.launches == []


FOLDER = Path(__file__).parents[2] / "kernels"
SOURCES = [path for path in sorted(FOLDER.glob("*/*.py")) if "launch(\n" in path.read_text()]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_constants_are_the_last_parameters(source):
    """A compiled kernel takes them by position."""
    module = import_module(f"chipsparse.kernels.{source.parent.name}.{source.stem}")
    kernels = [each for each in vars(module).values() if isinstance(each, launching.JITFunction)]
    assert kernels
    for each in kernels:
        numbers = list(each.constexprs)
        assert numbers == list(range(len(each.arg_names) - len(numbers), len(each.arg_names)))
