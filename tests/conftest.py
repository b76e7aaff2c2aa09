"""For all tests."""

import gc


def pytest_collection_finish():
    """What is imported by now stays: no collection has to look at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()
