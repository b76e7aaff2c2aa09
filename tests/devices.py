"""Devices that a test runs on, as parameters."""

import pytest
import torch

GPU = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", GPU] if torch.cuda.is_available() else ["cpu"]
