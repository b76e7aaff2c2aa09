"""The public verb: `enable` patches a pipeline, its handle restores it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from chipsparse.config import SparsityConfig
from chipsparse.host_memory import HostMemory
from chipsparse.kept_columns import KeptColumns
from chipsparse.offload import OffloadPool
from chipsparse.pipelines.adapter import ADAPTER, ModelAdapter, check_scheduler
from chipsparse.pipelines.generic import limits, why_not
from chipsparse.pipelines.registry import ADAPTERS, adapter_class
from chipsparse.profiles import MODEL_PROFILE_NAME, Profile, find_profile, load_profile
from chipsparse.report import GenerationReport, PipelineFacts
from chipsparse.session import Session
from chipsparse.static_columns import StaticColumns, static_bits
from chipsparse.step import PositionTracker


class Handle:
    """A patched pipeline. Use it as a context manager, or call `disable` when done.

    Attributes:
        config: what is computed.
        report: what the current or last generation did.
    """

    def __init__(
        self, config: SparsityConfig, report: GenerationReport, adapters: list[ModelAdapter]
    ) -> None:
        self.config = config
        self.report = report
        self._adapters = adapters

    def kept_columns(self, layers: Iterable[int] | None = None) -> list[KeptColumns]:
        """What layers with sparse attention keep now: reads it from the device, and waits.

        To be called while a generation goes on, as in diffusers' ``callback_on_step_end``, between
        its first refresh and its last step, which frees what would be read. The report keeps it.

        Args:
            layers: numbers of blocks; by default all, which takes seconds for each of a long video.

        Raises:
            ValueError: nothing is kept now.
        """
        wanted = None if layers is None else frozenset(layers)
        found = [kept for each in self._adapters for kept in each.session.kept_columns(wanted)]
        if not found:
            raise ValueError(
                "no columns are kept now; call kept_columns() between the first refresh and the "
                "last step of a generation, such as in callback_on_step_end"
            )
        self.report.kept_columns = found
        return found

    def disable(self) -> None:
        """Restores every patched model bit for bit and frees all caches; may be called twice."""
        while self._adapters:
            self._adapters.pop().remove()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.disable()


def enable(
    pipe: Any,
    config: SparsityConfig | Profile | str | Path | None = None,
    *,
    strict: bool = False,
    layer_times: bool = False,
    static_columns: StaticColumns | None = None,
) -> Handle:
    """Patches a diffusers pipeline so that it computes sparsely.

    Args:
        pipe: a pipeline whose transformer class is supported. All its experts (``transformer``
            and ``transformer_2`` of Wan 2.2) are patched, each with its own caches. A transformer
            of another class is served as far as it can be, with a warning: see `GenericAdapter`.
        config: a config, a profile or the path of one. By default the profile in the folder that
            the pipeline was loaded from, else the one of its transformer class, else (for a class
            without an adapter) the defaults of `SparsityConfig`.
        strict: raise `FallbackError` in the first call in which anything would run dense, or denser
            than the config asks, although the config wants it sparse.
        layer_times: measure the time of every layer for the report, by events of the device.
        static_columns: columns of attention that every query group keeps whatever their score, one
            bool for each video or image token in raster order (frames, rows, columns), as a
            bitarray, a bool array or tensor ``[N]``, or a list. They count among those of
            ``keep_fraction``, and all are kept where they are more. Text columns always are.

    Returns:
        A handle that is also a context manager.

    Raises:
        ValueError: if no transformer of the pipeline is supported, one is patched or compiled as a
            whole already, the scheduler calls it several times per step, or the profile or the
            static columns are bad. The pipeline is then left as it was. A scheduler that is
            exchanged later is refused likewise by the next call of the pipeline, and so are static
            columns for another number of tokens than it has.

    Example:
        >>> with chipsparse.enable(pipe) as handle:
        ...     video = pipe("a red circle moves left over a blue gradient").frames[0]
        >>> handle.report.actions()
    """
    transformers = find_transformers(pipe)
    check_scheduler(getattr(pipe, "scheduler", None))
    resolved = _resolve(pipe, config, type(transformers[0]).__name__)
    bits = None if static_columns is None else static_bits(static_columns)
    session = functools.partial(Session, static_bits=bits)
    handle = attach(pipe, resolved, session, strict=strict, layer_times=layer_times)
    for name in {type(transformer).__name__ for transformer in transformers} - set(ADAPTERS):
        warnings.warn(limits(name), stacklevel=2)
    return handle


def attach(
    pipe: Any,
    config: SparsityConfig,
    make_session: Callable[[SparsityConfig, GenerationReport, OffloadPool, str], Session],
    *,
    strict: bool = False,
    layer_times: bool = False,
) -> Handle:
    """Patches a pipeline as `enable` does, with sessions of another make, such as measuring ones.

    Args:
        pipe: as of `enable`, as are the last two.
        config: what the sessions are made with.
        make_session: makes the session of one transformer from the config, the report that all of
            them share, memory for its caches, and the pipeline's name for the transformer.
        strict: see `enable`.
        layer_times: see `enable`.

    Raises:
        ValueError: as `enable`.
    """
    transformers = find_transformers(pipe)
    check_scheduler(getattr(pipe, "scheduler", None))
    names = {id(item): name for name, item in pipe.components.items()}
    folder = getattr(getattr(pipe, "config", None), "_name_or_path", None)
    classes = {names[id(each)]: type(each).__name__ for each in transformers}
    report = GenerationReport(
        strict=strict,
        layer_times=layer_times,
        pipeline=PipelineFacts(type(pipe).__name__, folder or None, classes),
        config=config,
    )
    tracker, host = PositionTracker(), HostMemory()
    handle = Handle(config, report, [])
    try:
        for transformer in transformers:
            pool, name = OffloadPool(host, report.note), names[id(transformer)]
            adapter = adapter_class(transformer)(
                transformer,
                make_session(config, report, pool, name),
                tracker,
                lambda: getattr(pipe, "scheduler", None),
                lambda: bool(getattr(pipe, "do_classifier_free_guidance", False)),
            )
            handle._adapters.append(adapter)
        for adapter in handle._adapters:
            adapter.other_experts = [other for other in handle._adapters if other is not adapter]
    except BaseException:
        handle.disable()
        raise
    return handle


def find_transformers(pipe: Any) -> list[torch.nn.Module]:
    """The transformers of a pipeline that can be patched.

    Raises:
        ValueError: if there is none, or one is patched, compiled as a whole or parallel already.
    """
    components: dict[str, Any] = getattr(pipe, "components", {})
    for name, component in components.items():
        compiled = getattr(component, "_orig_mod", None)
        if type(compiled).__name__ in ADAPTERS or (compiled is not None and _is_named(name)):
            raise ValueError(
                f"{name} is compiled as a whole; enable chipsparse first and compile its blocks "
                f"with pipe.{name}.compile_repeated_blocks()"
            )
    found = [item for item in components.values() if type(item).__name__ in ADAPTERS]
    if not found:
        found = _find_others(pipe, components)
    for item in found:
        if getattr(item, "_parallel_config", None) is not None:
            raise ValueError(
                f"this {type(item).__name__} runs under context parallelism, which chipsparse does "
                "not support yet; enable chipsparse on a pipeline without it"
            )
        if ADAPTER in vars(item):
            raise ValueError(
                f"this {type(item).__name__} is patched already; call disable() on its handle first"
            )
    return found


def _is_named(name: str) -> bool:
    return name.startswith("transformer")


def _find_others(pipe: Any, components: dict[str, Any]) -> list[torch.nn.Module]:
    """Transformers without an adapter that can be served; raises `ValueError` without any."""
    candidates = {
        name: item for name, item in components.items() if _is_named(name) and item is not None
    }
    reasons = {name: why_not(item) for name, item in candidates.items()}
    found = [item for name, item in candidates.items() if reasons[name] is None]
    if found:
        return found
    others = {
        name: "it is no transformer"
        for name, item in components.items()
        if name.startswith("unet") and item is not None
    }
    had = "; ".join(
        f"{name} is a {type(components[name]).__name__}, and {reason}"
        for name, reason in {**reasons, **others}.items()
    )
    raise ValueError(
        f"{type(pipe).__name__} has no transformer that chipsparse supports "
        f"({had or 'it has none'}); classes with an adapter: {', '.join(ADAPTERS)}"
    )


def _resolve(
    pipe: Any, config: SparsityConfig | Profile | str | Path | None, transformer_class: str
) -> SparsityConfig:
    if isinstance(config, SparsityConfig):
        return config
    if config is not None:
        profile = config if isinstance(config, Profile) else load_profile(config)
        if profile.model_class not in ("", transformer_class):
            raise ValueError(
                f"{profile.source} is a profile for {profile.model_class}, but the pipeline has a "
                f"{transformer_class}"
            )
        return profile.sparsity
    folder = getattr(getattr(pipe, "config", None), "_name_or_path", None)
    if transformer_class not in ADAPTERS and not (
        folder is not None and (Path(folder) / MODEL_PROFILE_NAME).is_file()
    ):
        return SparsityConfig()
    return find_profile(folder, transformer_class).sparsity
