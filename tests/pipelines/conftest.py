"""Fixtures of several files: kernels that round alike, and CUDA graphs in software."""

from functools import partial

import pytest

from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.sparse.session import SparseSession
from tests.graph_stand_in import TapeRecorder
from tests.tiny_models import tiny_wan_pipeline


@pytest.fixture
def pipe():
    return tiny_wan_pipeline()


@pytest.fixture
def first_dense_kernel(monkeypatch):
    """Two sessions may find another dense kernel the fastest, and so round otherwise."""
    monkeypatch.setattr(FastestKernel, "pick", lambda _, kernels, *inputs: next(iter(kernels)))


@pytest.fixture
def recorder(monkeypatch):
    """A CPU's stand-in for CUDA graphs, with which all sessions of the test record their steps."""
    stand_in = TapeRecorder()
    monkeypatch.setattr("chipsparse.api.SparseSession", partial(SparseSession, capturer=stand_in))
    yield stand_in
    assert (stand_in.dangling, stand_in.held) == (0, 0)
