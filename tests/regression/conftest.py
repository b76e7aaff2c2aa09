"""What the regression tests share: models and results, each made once."""

import pytest
import torch

from tests.regression.runs import Runs


@pytest.fixture(scope="session")
def runs():
    return Runs(torch.device("cpu"), torch.float32)
