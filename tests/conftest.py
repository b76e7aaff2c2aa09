"""For all tests."""

import gc

# Folders whose files take a few seconds each.
QUICK = ("tests/chipsparse/", "tests/kernels/")


def pytest_collection_modifyitems(items):
    """Quick files come last, so that no process waits for a long one of another at the end."""
    items.sort(key=lambda item: item.nodeid.startswith(QUICK))


def pytest_collection_finish():
    """What is imported by now stays: no collection has to look at it again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()
