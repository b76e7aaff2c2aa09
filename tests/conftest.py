"""For all tests."""

import gc
import signal

import pytest
import torch

from tests.variants import DEVICES

# Folders whose files take a few seconds each.
QUICK = ("tests/chipsparse/", "tests/kernels/")


def pytest_configure():
    """An interrupt is one, also where a shell runs the tests in the background and ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Tests of a GPU are skipped without one.

    Quick files come last, so that no process waits for a long one of another at the end.
    """
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    items.sort(key=lambda item: item.nodeid.startswith(QUICK))


def pytest_collection_finish():
    """Modules that are imported by now stay: no collection has to look at them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="session")
def tiny_models_run_sparse():
    """On a GPU too, by whose rates they would run dense."""
    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available():
            patch.setattr("chipsparse.sparse.session.known_rates", lambda *_: None)
        yield


def pytest_unconfigure():
    gc.unfreeze()
