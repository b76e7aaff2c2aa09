"""LPIPS is looked for without downloading anything."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from chipsparse.experiments.lpips import Lpips, find_lpips


class Metric:
    """Stands for torchmetrics' metric; notes what it is made and called with."""

    def __init__(self, **options):
        self.options = options
        self.calls = []
        Metric.made.append(self)

    def __call__(self, a, b):
        self.calls.append((a, b))
        return (a - b).abs().mean()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of torch.hub; torchmetrics and torchvision as far as they are needed."""
    Metric.made = []
    default = SimpleNamespace(url="https://example.org/models/alexnet-owt-7be5be79.pth")
    models = SimpleNamespace(AlexNet_Weights=SimpleNamespace(DEFAULT=default))
    lpip = SimpleNamespace(LearnedPerceptualImagePatchSimilarity=Metric)
    for name in ("torchmetrics", "torchmetrics.image", "torchvision"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "torchmetrics.image.lpip", lpip)
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def test_a_package_that_cannot_be_imported(hub, monkeypatch):
    def import_module(name):
        if name.partition(".")[0] == "torchvision":
            raise RuntimeError("no operator\nand more")
        return sys.modules[name]

    monkeypatch.setattr(importlib, "import_module", import_module)
    assert find_lpips(64, 64).why_not.startswith("torchvision cannot be imported: no operator")


def test_weights_are_missing_or_frames_too_small_or_everything_is_there(hub):
    assert find_lpips(64, 64) == Lpips(None, f"the weights of AlexNet are not in {hub}")
    assert Metric.made == []  # it would download them
    assert find_lpips(31, 640).why_not == "frames are smaller than 32x32"
    (hub / "alexnet-owt-7be5be79.pth").touch()
    lpips = find_lpips(32, 32)
    assert lpips.why_not is None
    a, b = torch.rand(2, 1, 32, 40, 3, dtype=torch.float64)
    assert lpips.measure(a, b) == pytest.approx(float((a - b).abs().mean()), rel=1e-5)
    assert lpips.measure(a, a) == 0.0
    (metric,) = Metric.made  # its weights are read once
    assert metric.options == {"net_type": "alex", "normalize": True}
    assert [tuple(frame.shape) for frame in metric.calls[0]] == [(1, 3, 32, 40)] * 2
    torch.testing.assert_close(metric.calls[0][0][0, 1], a[0, :, :, 1].float())
