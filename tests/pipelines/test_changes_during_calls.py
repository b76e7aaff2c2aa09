"""`enable` and `disable` while a call runs: between calls of the transformer, and by one thread."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import chipsparse
from chipsparse import SparsityConfig
from chipsparse.pipelines.runner import RUNNER
from tests.pipelines.changes import at_step
from tests.pipelines.model_state import state_of
from tests.pipelines.tiny_runs import STILL
from tests.tiny_models import tiny_wan_pipeline

CONFIG = STILL.SPARSE
wan = STILL.generate
DENSE = SparsityConfig.dense()
VERBS = {
    "handle.disable": lambda _pipe, handle: handle.disable(),
    "disable": lambda pipe, _handle: chipsparse.disable(pipe),
    "enable": lambda pipe, _handle: chipsparse.enable(pipe, DENSE),
}
each_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)


@pytest.fixture(scope="module")
def shared():
    return tiny_wan_pipeline()


@pytest.fixture
def pipe(shared):
    """One pipeline for all of these tests, each of which must leave it as it was."""
    before = state_of(shared.transformer)
    kind = type(shared.scheduler)
    yield shared
    assert not [name for name in vars(shared) if "chipsparse" in name]
    assert type(shared.scheduler) is kind
    assert state_of(shared.transformer) == before


@pytest.fixture(scope="module")
def sparse(shared):
    with chipsparse.enable(shared, CONFIG):
        return wan(shared)


def in_a_thread(act):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(act).exception()


@contextlib.contextmanager
def hooked(pipe, call, act):
    """Acts once in a call of the transformer, between its blocks."""
    calls = []

    def hook(*_):
        calls.append(None)
        if len(calls) == call:
            act()

    handle = pipe.transformer.blocks[1].register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@each_verb
@pytest.mark.parametrize("place", ["a callback", "a call of the transformer"])
def test_another_thread_is_refused_during_a_call_which_goes_on(pipe, sparse, verb, place):
    errors = []

    def disturb():
        errors.append(in_a_thread(lambda: verb(pipe, handle)))

    with chipsparse.enable(pipe, CONFIG) as handle:
        handle._is_open = False  # a handle within its block refuses enable() in any case
        if place == "a callback":
            assert torch.equal(wan(pipe, callback_on_step_end=at_step(2, disturb)), sparse)
        else:
            with hooked(pipe, 3, disturb):
                assert torch.equal(wan(pipe), sparse)
        assert handle.enabled
        assert handle.report.error is None
    (error,) = errors
    assert isinstance(error, RuntimeError)
    assert "this WanPipeline is in use by another thread; chipsparse patches and" in str(error)


@each_verb
def test_a_hook_within_a_call_of_the_transformer_is_refused(pipe, sparse, verb):
    def disturb():
        with pytest.raises(RuntimeError, match="a call of this WanTransformer3DModel is under way"):
            verb(pipe, handle)

    handle = chipsparse.enable(pipe, CONFIG)
    with hooked(pipe, 3, disturb):
        assert torch.equal(wan(pipe), sparse)
    assert handle.enabled
    handle.disable()


@pytest.mark.parametrize("verb", [VERBS["handle.disable"], VERBS["disable"]])
@pytest.mark.parametrize(
    "config",
    [DENSE, CONFIG.override({"schedule": {"listed": {"full": [0, 1]}}})],
)
def test_a_call_whose_handle_is_disabled_in_a_callback_ends_as_stock(pipe, verb, config):
    counts = []
    stock = wan(pipe)
    behind = at_step(2, lambda: (verb(pipe, handle), counts.append(len(handle.report.steps))))
    calls = []
    counting = pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(None))
    handle = chipsparse.enable(pipe, config)
    found = wan(pipe, callback_on_step_end=behind)
    counting.remove()
    assert not handle.enabled
    assert counts == [3]
    assert len(handle.report.steps) == 3
    assert len(calls) == (5 if config is DENSE else 4)  # of five steps one was skipped before
    assert torch.equal(found, stock) == (config is DENSE)


def test_two_threads_that_enable_and_disable_at_once_leave_a_whole_patch_or_none(pipe, sparse):
    stock = wan(pipe)
    together = threading.Barrier(4)
    handles = []

    def change(enables):
        together.wait(timeout=60)
        for _ in range(10):
            if enables:
                handles.append(chipsparse.enable(pipe, CONFIG))
            else:
                with contextlib.suppress(ValueError):  # not patched now
                    chipsparse.disable(pipe)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(change, [True, True, False, False]))
    enabled = [handle for handle in handles if handle.enabled]
    assert len(enabled) == int(RUNNER in vars(pipe.transformer)) <= 1
    assert torch.equal(wan(pipe), sparse if enabled else stock)
    handle = chipsparse.enable(pipe, CONFIG)
    assert [each for each in handles if each.enabled] == []
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda _: handle.disable(), range(4))] == [None] * 4
    assert torch.equal(wan(pipe), stock)


def test_calls_that_begin_while_another_thread_restores_run_as_stock(pipe):
    """They have found what is patched, and get their turn behind it."""
    stock = wan(pipe)
    handle = chipsparse.enable(pipe, CONFIG)
    runner = handle._runners[0]
    calls = handle._calls
    handle.disable()
    pipe.chipsparse_calls = calls
    pipe.transformer.chipsparse_runner = runner
    with calls.around({}):
        assert torch.equal(wan(pipe), stock)
    del pipe.chipsparse_calls
    del pipe.transformer.chipsparse_runner
    output = runner.call(lambda given: given + 1, (1,), {})
    assert output == 2
    assert runner.sparse.session.cache_bytes() == 0
