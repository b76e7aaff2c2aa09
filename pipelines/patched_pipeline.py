"""The frame around the calls of a patched pipeline.

The transformer sees single calls; only the pipeline knows when a generation begins and ends. So the
pipeline, too, gets another class at run time, which wraps ``__call__`` and is the stock one in
everything else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from chipsparse.config import FallbackError
from chipsparse.pipelines.denoising_loop import DenoisingLoop
from chipsparse.pipelines.one_thread import OneThread
from chipsparse.pipelines.patches import Patches, WholePatched
from chipsparse.pipelines.runner import RUNNER, Runner
from chipsparse.reasons import calls as reasons
from chipsparse.report.generation import GenerationReport

CALLS = "chipsparse_calls"
CALLBACK = "callback_on_step_end"
BETWEEN_CALLS = (
    "chipsparse patches and restores a model between its calls: behind the pipeline's call, or in "
    "its callback_on_step_end"
)


class PatchedPipeline(WholePatched):
    """Mixin of a patched pipeline: its calls run within `PipelineCalls.around`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)

        signature = inspect.signature(cls.chipsparse_base.__call__)

        @functools.wraps(cls.chipsparse_base.__call__)  # the signature that callers look at
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls = getattr(self, CALLS, None)
            if calls is None:  # a bound method that somebody kept from before disable()
                return type(self).__call__(self, *args, **kwargs)
            if callable(callback := kwargs.get(CALLBACK)):
                names = getattr(callback, "tensor_inputs", None)
                if isinstance(names, list):  # of diffusers' own, at whose class pipelines look
                    kwargs[f"{CALLBACK}_tensor_inputs"] = names
                kwargs[CALLBACK] = calls.outside(callback)
            with calls.around(_by_name(signature, self, *args, **kwargs)):
                return super(cls, self).__call__(*args, **kwargs)  # type: ignore[misc]

        cls.__call__ = call  # type: ignore[method-assign]
        if not hasattr(cls.chipsparse_base, "interrupt"):
            return

        def interrupt(self: Any) -> bool:
            """True if the remaining steps are passed over, and the latents decoded as they are."""
            interrupted = bool(super(cls, self).interrupt)  # type: ignore[misc]
            if interrupted:
                getattr(self, CALLS).interrupted()
            return interrupted

        cls.interrupt = property(interrupt)  # type: ignore[attr-defined]


@dataclass(eq=False)
class PipelineCalls:
    """Looks after the calls of one patched pipeline."""

    _pipe: Any
    _runners: Mapping[str, Runner]  # by the pipeline's names for their transformers
    _report: GenerationReport  # of these transformers
    _loop: DenoisingLoop
    _turn: OneThread = field(default_factory=OneThread)
    _is_restored: bool = False  # a call may have waited for that in another thread

    def __post_init__(self) -> None:
        for runner in self._runners.values():
            runner.turn = self._turn

    def patch(self, patches: Patches) -> None:
        """Follow the schedulers, and wrap the pipeline's call if its class can be subclassed."""
        patches.add_undo(self._restore)
        self._loop.follow_schedulers()
        if not callable(self._pipe):
            return
        try:
            patches.set_class(self._pipe, PatchedPipeline)
        except TypeError:  # its instances have another layout in memory
            return
        patches.set_attribute(self._pipe, CALLS, self)

    def _restore(self) -> None:
        self._is_restored = True
        self._loop.correction.follow([])

    @contextlib.contextmanager
    def kept_out(self) -> Iterator[None]:
        """Lets no call of the pipeline begin within; a `RuntimeError` where one is under way.

        In a callback the pipeline's own call is, and no call of a transformer.
        """
        with self._turn.only(type(self._pipe).__name__, BETWEEN_CALLS):
            for runner in self._runners.values():
                if runner.is_calling:
                    raise RuntimeError(
                        f"a call of this {type(runner.transformer).__name__} is under way; "
                        f"{BETWEEN_CALLS}",
                    )
            yield

    def around(self, arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
        """Runs a call of the pipeline, and leaves no caches behind whatever ends it."""
        return self._generation(self._loop.watched(arguments))

    def generation(self, scheduler: Any) -> contextlib.AbstractContextManager[None]:
        """Like `around`, for an explicit loop with a scheduler; None: that of the pipeline."""
        return self._generation(self._loop.explicit(scheduler))

    @contextlib.contextmanager
    def _generation(self, loop: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._turn.only(type(self._pipe).__name__))
            if self._is_restored:
                yield
                return
            stack.enter_context(loop)
            finished = False
            try:
                self._check_transformers()
                yield
                finished = not getattr(self._pipe, "_interrupt", False)
            except BaseException as error:  # also one beside the transformer's calls
                for runner in self._runners.values():
                    if runner.team is not None:
                        runner.team.failed(error, runner.device)
                raise
            finally:
                self._loop.note_uncorrected()
                for runner in self._runners.values():
                    runner.finish_generation()
                self._report.end_call(finished=finished)

    def outside(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """A callback whose calls of the transformer belong to no step of the pipeline's loop."""

        @functools.wraps(callback)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self._loop.suspended():
                return callback(*args, **kwargs)

        return called

    def interrupted(self) -> None:
        """Frees the caches of a call whose loop is set to pass over the steps that are left."""
        if self._turn.is_inside():  # not where somebody else asks
            self._loop.note_uncorrected()
            for runner in self._runners.values():
                runner.finish_generation()

    def _check_transformers(self) -> None:
        """Says which transformers were exchanged: those run as without chipsparse."""
        runners = self._runners.items()
        exchanged = [name for name, runner in runners if _is_exchanged(self._pipe, name, runner)]
        if not exchanged:
            return
        self._report.begin_call()
        of_some, of_all = reasons.exchanged(exchanged)
        try:
            self._report.add(of_all if len(exchanged) == len(self._runners) else of_some)
        except FallbackError as error:
            self._report.fail(error)
            raise


def _by_name(signature: inspect.Signature, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call and its defaults; nothing where they do not fit the signature."""
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError:  # which the pipeline says itself
        return {}
    bound.apply_defaults()
    return dict(bound.arguments)


def _is_exchanged(pipe: Any, name: str, runner: Runner) -> bool:
    """Return whether the pipeline has a model under this name that nobody patched."""
    now = getattr(pipe, name, None)
    now = getattr(now, "_orig_mod", now)  # of one that was compiled as a whole since
    return now is not runner.transformer and RUNNER not in getattr(now, "__dict__", {})
