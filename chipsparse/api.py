"""The public verbs: `enable` patches a pipeline; its handle, or `disable`, restores it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bitarray import frozenbitarray

from chipsparse.common.validation import shown
from chipsparse.config import SparsityConfig
from chipsparse.parallel.degrees import Parallel
from chipsparse.pipelines.denoising_loop import (
    DenoisingLoop,
    check_denoises,
    check_scheduler,
    loop_of,
)
from chipsparse.pipelines.parallel.team import Team, team_of
from chipsparse.pipelines.patched_pipeline import PipelineCalls
from chipsparse.pipelines.patches import Patches
from chipsparse.pipelines.registry import FAMILIES, family_of, find_family, why_refused
from chipsparse.pipelines.runner import RUNNER, Runner
from chipsparse.pipelines.uncompiled import compiled_as_a_whole, is_compiled
from chipsparse.pipelines.whole_model import check_whole, why_wrapped
from chipsparse.profiles.profile import (
    DEFAULT_QUALITY,
    QUALITIES,
    Profile,
    find_profile,
    load_profile,
)
from chipsparse.report.generation import GenerationReport
from chipsparse.report.records import PipelineFacts
from chipsparse.report.summary import Facts, as_html, as_text, facts
from chipsparse.skip.position import Locator
from chipsparse.sparse.cache.host_memory import HostMemory
from chipsparse.sparse.cache.offload import OffloadPool
from chipsparse.sparse.layers.column_budget import StaticColumns, static_bits
from chipsparse.sparse.session import SparseSession

HANDLE = "chipsparse_handle"
# Held while a pipeline is patched or restored: two threads may do so at once.
_CHANGING = threading.RLock()


class Handle:
    """One patch of a pipeline: a context manager, or `disable` restores the pipeline."""

    def __init__(self, config: SparsityConfig, report: GenerationReport) -> None:
        self.config = config
        self.report = report  # of the current or last generation
        self._runners: list[Runner] = []
        self._patches = Patches()
        self._calls: PipelineCalls | None = None
        self._is_open = False

    @property
    def enabled(self) -> bool:
        """True until the patch is taken back."""
        return bool(self._runners)

    @contextlib.contextmanager
    def generation(self, scheduler: object = None) -> Iterator[Handle]:
        """Make a denoising loop of your own one generation, whose caches are freed at its end.

        >>> with handle.generation():
        ...     for t in pipe.scheduler.timesteps:
        ...         velocity = pipe.transformer(latents, timestep=t.expand(1), ...)[0]
        ...         latents = pipe.scheduler.step(velocity, t, latents)[0]

        A call at a timestep that the scheduler does not have next runs dense, and so do the later
        ones. Without this method, every call of such a loop runs as without chipsparse.

        Args:
            scheduler: the scheduler of the loop, with its timesteps set; by default the pipeline's.

        Raises:
            ValueError: if it is no scheduler.
            RuntimeError: if the handle is used up, another thread calls the pipeline, or a
                generation is open.
        """
        calls = self._calls
        if calls is None:
            raise _used_up()
        has_steps = hasattr(scheduler, "timesteps") and callable(getattr(scheduler, "step", None))
        if scheduler is not None and (isinstance(scheduler, type) or not has_steps):
            raise ValueError(f"expected a scheduler, got {shown(scheduler)}")
        with calls.generation(scheduler):
            yield self

    def disable(self) -> None:
        """Restore every patched model bit for bit and free all caches; may be called twice.

        In a callback of the pipeline, the rest of its call then runs as without chipsparse.

        Raises:
            RuntimeError: if another thread calls the pipeline, or a call of its transformer is
                under way in this one. Nothing is restored then.
        """
        with _CHANGING, contextlib.ExitStack() as stack:
            self._keep_calls_out(stack)
            self._restore()

    def _keep_calls_out(self, stack: contextlib.ExitStack) -> None:
        """Let no call begin until the stack is left; raise `RuntimeError` where one runs."""
        if self._calls is not None:
            stack.enter_context(self._calls.kept_out())

    def _restore(self) -> None:
        self._patches.undo()
        self._calls = None
        while self._runners:
            self._runners.pop().remove()

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise _used_up()

    def __enter__(self) -> Handle:
        self._check_enabled()
        if self._is_open:
            raise RuntimeError(
                "this handle's with block is open already, and its end restores the pipeline",
            )
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._is_open = False
        self.disable()

    def __repr__(self) -> str:
        of = f"a {self.report.pipeline.class_name or 'pipeline'}"
        return f"<Handle of {of}, {'enabled' if self.enabled else 'disabled'}: {self.config!r}>"

    def summary(self) -> str:
        """Return a few lines for people: the config, and the record of the last generation."""
        return as_text(self._facts())

    def _repr_html_(self) -> str:
        """Return `summary` as a table for notebooks."""
        return as_html(self._facts())

    def _facts(self) -> Facts:
        patch = "enabled" if self.enabled else "disabled: the pipeline is as it was"
        config = self.report.config_taken or self.config
        return [("chipsparse", patch), ("config", repr(config)), *facts(self.report)]

    def _patch(self, pipe: object, loop: DenoisingLoop, transformers: Mapping[str, Any]) -> None:
        runners = dict(zip(transformers, self._runners, strict=True))
        self._calls = PipelineCalls(pipe, runners, self.report, loop)
        self._calls.patch(self._patches)
        for owner in (pipe, *transformers.values()):
            if hasattr(owner, "__dict__"):
                self._patches.set_attribute(owner, HANDLE, self)


def _used_up() -> RuntimeError:
    return RuntimeError(
        "this handle is used up: its pipeline was restored; call chipsparse.enable() again",
    )


def enable(
    pipe: object,
    config: SparsityConfig | Profile | str | Path | None = None,
    *,
    quality: str | None = None,
    strict: bool = False,
    layer_times: bool = False,
    static_columns: StaticColumns | None = None,
    parallel: Parallel | None = None,
) -> Handle:
    """Patch a diffusers pipeline so that most of its denoising steps are sparse or skipped.

    >>> with chipsparse.enable(pipe, quality="balanced") as handle:
    ...     video = pipe("a red circle moves left over a blue gradient").frames[0]
    >>> print(handle.summary())

    On a pipeline that is patched already, the new patch replaces the old one, whose handle is used
    up. Inside the ``with`` block of that handle this is refused.

    Args:
        pipe: a plain or modular pipeline. All its transformers are patched, each with its own
            caches.
        config: a config, a profile, or the path of one. By default the profile in the folder of the
            pipeline, else that of its transformer's class.
        quality: a named quality of the profile: ``"faithful"``, ``"balanced"`` (the default),
            ``"fast"``, ``"draft"`` (the fastest) or ``"chipmunk"``. A `SparsityConfig` has none.
        strict: raise `FallbackError` where anything would run denser than the config asks.
        layer_times: measure the time of every layer for the report, by events of the device.
        static_columns: columns of attention that every query block keeps: one bool for each video
            or image token in raster order (frames, rows, columns), as a bitarray, a bool array or
            tensor ``[N]``, or a list. They count among ``density``. Text columns are always kept.
        parallel: the shares of the processes of torch.distributed's group, each of which makes the
            same calls with the same seed. By default diffusers' own context parallelism, if any.

    Returns:
        A handle that is also a context manager.

    Raises:
        ValueError: if the pipeline, its transformer, its scheduler, the profile, the quality, the
            static columns or the number of processes cannot be served. The pipeline is then as it
            was. A later call of the pipeline raises it likewise.
        RuntimeError: if the pipeline is patched, and another thread calls it or a call of its
            transformer is under way.

    Warns:
        DenseWarning: once, at the first generation in which nothing is sparse or skipped although
            the config asks for it, or at the first call from an unknown loop (see
            `Handle.generation`); with ``strict`` that is a `FallbackError`.
    """
    _check_types(strict=strict, layer_times=layer_times, parallel=parallel)
    with _CHANGING:
        transformers = _find_transformers(pipe)
    model_class = family_of(next(iter(transformers.values()))).transformer_class
    asked = _resolve(pipe, config, quality, model_class, len(transformers))
    bits = None if static_columns is None else static_bits(static_columns)
    team = team_of(list(transformers.values()), parallel)  # waits for other processes
    folder = _folder(pipe)
    classes = {name: type(item).__name__ for name, item in transformers.items()}
    report = GenerationReport(
        strict=strict,
        layer_times=layer_times,
        pipeline=PipelineFacts(type(pipe).__name__, str(folder) if folder else None, classes),
        config=asked.config,
        quality=asked.quality,
        base=asked.base,
    )
    with _CHANGING, contextlib.ExitStack() as stack:
        transformers = _find_transformers(pipe)  # another thread may have patched them
        replaced = _handle_of(pipe)
        if replaced is not None:
            replaced._keep_calls_out(stack)
            replaced._restore()
        handle = Handle(asked.config, report)
        try:
            _patch(pipe, handle, transformers, bits, team)
        except BaseException:
            handle._restore()
            raise
    return handle


def _check_types(*, parallel: Parallel | None, **switches: bool) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {shown(value)}")
    if parallel is not None and not isinstance(parallel, Parallel):
        raise ValueError(
            f"parallel: expected a chipsparse.Parallel, got {shown(parallel)}; Parallel(ulysses=2) "
            "has two processes share the tokens of each call",
        )


def _patch(
    pipe: object,
    handle: Handle,
    transformers: Mapping[str, torch.nn.Module],
    static_bits: frozenbitarray | None,
    team: Team | None,
) -> None:
    """Patch a pipeline and its transformers; what was done before an error is in the handle."""
    report = handle.report
    loop = loop_of(pipe, report)
    tracker = Locator()
    host = HostMemory()
    for name, transformer in transformers.items():
        family = family_of(transformer)
        session = SparseSession(
            handle.config,
            report,
            OffloadPool(host, report.add),
            name,
            static_bits=static_bits,
            agreement=None if team is None else team.agreement,
            masked=family.sparse.masked,
        )
        runner = Runner(family, transformer, session, tracker, loop, team)
        handle._runners.append(runner)
    handle._patch(pipe, loop, transformers)
    for runner in handle._runners:
        runner.other_experts = [other for other in handle._runners if other is not runner]


def disable(pipe: object) -> None:
    """Restore a patched pipeline without its handle, which is then used up.

    >>> chipsparse.disable(pipe)

    Args:
        pipe: the pipeline of `enable`, or another one with its transformer.

    Raises:
        ValueError: if it is no pipeline, or not patched.
        RuntimeError: as `Handle.disable`.
    """
    components = _components(pipe)
    with _CHANGING, contextlib.ExitStack() as stack:
        owners = (pipe, *components.values())
        handles = [handle for owner in owners if (handle := _handle_of(owner)) is not None]
        if not handles:
            raise ValueError(f"this {type(pipe).__name__} is not patched by chipsparse")
        for handle in handles:
            handle._keep_calls_out(stack)
        for handle in handles:
            handle._restore()


def _find_transformers(pipe: object) -> dict[str, torch.nn.Module]:
    """Return the transformers to patch, by the pipeline's name; `ValueError` where it cannot be.

    The patch of the pipeline may be replaced, unless its ``with`` block is open.
    """
    replaced = _handle_of(pipe)
    components = _components(pipe)
    check_denoises(pipe)
    check_scheduler(getattr(pipe, "scheduler", None))
    for name, component in components.items():
        inner = getattr(component, "_orig_mod", component)
        is_transformer = name.startswith("transformer") or find_family(inner) is not None
        if is_transformer and (inner is not component or is_compiled(inner)):
            raise ValueError(compiled_as_a_whole(name))
        if is_transformer and isinstance(component, torch.nn.Module):
            check_whole(name, component)
        if is_transformer and find_family(inner) is None:
            reason = why_wrapped(name, component)
            if reason is not None:
                raise ValueError(reason)
    names = {id(item): name for name, item in components.items() if find_family(item) is not None}
    if not names:
        raise _refusal(pipe, components)
    transformers = {name: components[name] for name in names.values()}
    is_kept = replaced is None or replaced._is_open
    for item in transformers.values():
        if RUNNER in vars(item) and (is_kept or _handle_of(item) is not replaced):
            raise ValueError(
                f"this {type(item).__name__} is patched already; call disable() on its handle, or "
                "chipsparse.disable(pipe), first",
            )
    return transformers


def _components(pipe: object) -> Mapping[str, Any]:
    if isinstance(pipe, type):
        raise ValueError(
            f"expected a loaded pipeline, got the class {pipe.__name__}; load one with "
            f"{pipe.__name__}.from_pretrained(...)",
        )
    if isinstance(pipe, torch.nn.Module):
        raise ValueError(
            f"expected a pipeline, got a {type(pipe).__name__}; pass the pipeline that has it",
        )
    components = getattr(pipe, "components", None)
    if not isinstance(components, Mapping):
        is_name = isinstance(pipe, str | os.PathLike)
        hint = "; load it with DiffusionPipeline.from_pretrained(...)" if is_name else ""
        raise ValueError(f"expected a diffusers pipeline, got {shown(pipe)}{hint}")
    return components


def _folder(pipe: object) -> str | None:
    """Return the folder or hub name that a pipeline was loaded from; None where it was not."""
    of_modular = getattr(pipe, "_pretrained_model_name_or_path", None)
    folder: str | None = of_modular or getattr(
        getattr(pipe, "config", None),
        "_name_or_path",
        None,
    )
    return folder


def _handle_of(owner: object) -> Handle | None:
    handle: Handle | None = getattr(owner, "__dict__", {}).get(HANDLE)
    return handle


def _refusal(pipe: object, components: Mapping[str, Any]) -> ValueError:
    """Return the error for a pipeline without a transformer that has an runner."""
    reasons = {
        name: "it is no transformer" if name.startswith("unet") else why_refused(item)
        for name, item in components.items()
        if item is not None and name.startswith(("transformer", "unet"))
    }
    had = "; ".join(
        f"{name} is a {type(components[name]).__name__}, and {reason}"
        for name, reason in reasons.items()
    )
    return ValueError(
        f"{type(pipe).__name__} has no transformer that chipsparse supports "
        f"({had or 'it has none'}); the command chipsparse models lists the {len(FAMILIES)} "
        "classes that have an adapter",
    )


@dataclass(frozen=True)
class _Asked:
    """The request of a caller of `enable`."""

    config: SparsityConfig
    quality: str | None = None  # its name in its profile, where it has one
    base: SparsityConfig | None = None  # see `Profile`


def _resolve(
    pipe: object,
    config: SparsityConfig | Profile | str | Path | None,
    quality: str | None,
    transformer_class: str,
    experts: int,
) -> _Asked:
    if isinstance(config, SparsityConfig):
        if quality is not None:
            raise ValueError(
                f"quality={shown(quality)} is one of a profile's, and a SparsityConfig has none; "
                "give one of the two",
            )
        return _Asked(config)
    if isinstance(config, Profile):
        profile = config
    elif config == "":
        raise ValueError("the path of the profile is empty")
    elif isinstance(config, str) and config.isalnum() and not os.path.exists(config):
        name = config if config in QUALITIES else DEFAULT_QUALITY
        raise ValueError(
            f"there is no file {shown(config)}; a quality is given by its name, as in "
            f'enable(pipe, quality="{name}")',
        )
    elif isinstance(config, str | os.PathLike):
        profile = load_profile(config)
    elif config is None:
        profile = find_profile(_folder(pipe), transformer_class, experts=experts)
    else:
        raise ValueError(
            f"expected a SparsityConfig, a Profile or the path of one, got {shown(config)}; "
            "chipsparse.SparsityConfig().override(...) makes a config of a dict such as "
            "{'attention.density': 0.2}",
        )
    if not profile.serves(transformer_class):
        raise ValueError(
            f"{profile.source} is a profile for {profile.model_class}, but the pipeline has a "
            f"{transformer_class}",
        )
    profile = profile if quality is None else profile.of_quality(quality)
    return _Asked(profile.sparsity, profile.quality, profile.base)
