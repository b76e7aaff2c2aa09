"""Makes the calls of a run on a pipeline: as its script says, or as the plain reference."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import chipsparse
from benchmarks.soak.changes import Stage
from benchmarks.soak.choices import HARMLESS, Call, Script
from benchmarks.soak.faults import Striking
from benchmarks.soak.kept import Kept
from benchmarks.soak.subjects import PROMPTS, WITHOUT_CALLBACKS, Place
from benchmarks.soak.surroundings import PREPARATIONS, WITH_HOOKS, offload_models
from chipsparse.api import Handle, attach
from chipsparse.config import SparsityConfig
from chipsparse.graphs.step_graph import Capturer, StepGraphs
from chipsparse.session import Session

AUTOCAST = torch.bfloat16
# What a report says of how it was computed, and not of what.
OF_THE_WAY = ("CUDA graph", "no effect", "captured sparse step")


@dataclass
class Outcome:
    """What one call gave.

    Attributes:
        tensors: the latents or the decoded pictures; None where an exception ended the call.
        error: the exception's type and first line, or None.
        facts: what its report says was computed, see `facts_of`.
        replayed: transformer calls that were launched as a graph.
        struck: whether a fault of the soak ended the call.
        problems: what was wrong whatever the result.
    """

    tensors: torch.Tensor | None = None
    error: str | None = None
    facts: list[Any] = field(default_factory=list)
    replayed: int = 0
    struck: bool = False
    problems: list[str] = field(default_factory=list)


class Player:
    """Plays one script on one pipeline.

    Args:
        script: what happens.
        place: where the pipeline is.
        pipe: the pipeline.
        plain: whether this is the reference: each call with a fresh `enable`, nothing recorded,
            caches on the device, no fault and nothing else that a result must not depend on.
        recorder: captures calls in place of CUDA, where given.
    """

    def __init__(
        self,
        script: Script,
        place: Place,
        pipe: Any,
        *,
        plain: bool = False,
        recorder: Capturer | None = None,
    ) -> None:
        self._script, self._place, self._pipe = script, place, pipe
        self._plain, self._recorder = plain, recorder
        self._ways = () if plain else script.ways
        # A handle does not take up processors that came after it, and says so; the next one does.
        exchanged = any(event.name == "processor" for call in script.calls for event in call.events)
        self._one_handle = "one handle" in (script.ways if exchanged else self._ways)
        self._handle: Handle | None = None
        self._previewing = False
        self.left: list[str] = []

    def play(self) -> list[Outcome]:
        """Makes all calls; afterwards the pipeline is as before, and ``left`` says what was not."""
        script, kept = self._script, Kept(self._pipe)
        events = {event.name for call in script.calls for event in call.events}
        hooked = bool({*events, *script.surroundings, *self._ways}.intersection(WITH_HOOKS))
        try:
            with ExitStack() as changes, ExitStack() as handles:
                stage = Stage(self._pipe, self._place, kept, changes)
                for name in script.surroundings:
                    PREPARATIONS[name](self._pipe, self._place, changes)
                offloaded = any("offload" in name for name in script.surroundings)
                if "model offload" in self._ways and not offloaded:
                    offload_models(self._pipe, self._place, changes)
                outcomes = [self._call(stage, call, handles) for call in script.calls]
                if "undone while enabled" in self._ways:
                    changes.close()
            changed = bool(events or script.surroundings)
            self.left = kept.left(with_hooks=hooked, values=not changed)
        finally:
            kept.restore()
        return outcomes

    def _enabled(self, handles: ExitStack) -> Handle:
        """The handle for the next call; a new one unless the run keeps to one."""
        if self._handle is None or not self._one_handle:
            handles.close()
            handle = self._enable()
            self._handle = handles.enter_context(handle)
        return self._handle

    def _enable(self) -> Handle:
        script = self._script
        settings = {"cuda_graphs": "never", **script.settings}
        if "captured" in self._ways:
            settings["cuda_graphs"] = "always"
        if "caches on the host" in self._ways and "memory.ram" not in settings:
            settings["memory.offload"] = "always"
        config = SparsityConfig().override(settings)
        times = "layer times" in self._ways
        # The stand-in sees every operation, and compiled code cannot be looked at.
        recorded = "captured" in self._ways and "compiled blocks" not in script.surroundings
        if self._recorder is None or not recorded:
            return chipsparse.enable(self._pipe, config, strict=script.strict, layer_times=times)

        def session(config: Any, report: Any, pool: Any, name: str) -> Session:
            return Session(config, report, pool, name, StepGraphs(self._recorder))

        return attach(self._pipe, config, session, strict=script.strict, layer_times=times)

    # One call.

    def _call(self, stage: Stage, call: Call, handles: ExitStack) -> Outcome:
        outcome, report = Outcome(), None
        striking = None if self._plain or call.fault is None else Striking(call.fault)
        names = {event.name for event in call.events}

        def callback(_pipe: Any, step: int, _time: Any, given: dict[str, Any]) -> dict[str, Any]:
            returned: dict[str, Any] = {}
            for event in call.events:
                if event.step == step and not (self._plain and event.name in HARMLESS):
                    with self._preview(event.name == "preview"):
                        returned |= stage.apply(event, given)
            if striking is not None:
                striking.step_ended(step)
            return returned

        try:
            for event in call.events:
                if event.step is None:
                    stage.apply(event)
            arguments = self._arguments(call)
            if self._script.family not in WITHOUT_CALLBACKS:
                arguments["callback_on_step_end"] = callback
            if "prompt" in names:
                arguments["callback_on_step_end_tensor_inputs"] = ["prompt_embeds"]
            handle = self._enabled(handles)
            stage.report = report = handle.report
            if striking is not None:
                striking.step_ended(-1)
            with self._around(call, handle, striking, outcome):
                found = self._pipe(**arguments)
            outcome.tensors = found[0].detach().clone()
        except (Exception, KeyboardInterrupt) as error:
            outcome.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            outcome.struck = striking is not None and striking.struck
            if isinstance(error, KeyboardInterrupt) and not outcome.struck:
                raise  # the user's own
        if report is not None:
            outcome.facts = facts_of(report)
            outcome.replayed = sum(record.replayed for record in report.steps)
            outcome.problems += contradictions(report)
        return outcome

    def _arguments(self, call: Call) -> dict[str, Any]:
        dtype = self._pipe.transformer.dtype
        arguments: dict[str, Any] = self._place.arguments(self._script.family, call.variant, dtype)
        arguments = pytree.tree_map_only(torch.Tensor, torch.clone, arguments)
        if isinstance(arguments.get("prompt"), str):
            arguments["prompt"] = PROMPTS[call.prompt]
        return {
            **arguments,
            "num_inference_steps": call.steps,
            "generator": torch.Generator().manual_seed(call.seed),
            "output_type": "pt" if call.decode else "latent",
            "return_dict": False,
        }

    @contextlib.contextmanager
    def _around(
        self, call: Call, handle: Handle, striking: Striking | None, outcome: Outcome
    ) -> Iterator[None]:
        """What surrounds the pipeline's call."""
        with ExitStack() as stack:
            if striking is not None and striking.fault.after is not None:
                stack.enter_context(striking)
            if "inference mode" in self._ways:
                stack.enter_context(torch.inference_mode())
            if "autocast" in self._script.surroundings:
                stack.enter_context(torch.autocast(self._place.device.type, AUTOCAST))
            if call.decode and not self._plain:
                stack.enter_context(self._caches_are_gone(handle, outcome))
            yield

    @contextlib.contextmanager
    def _caches_are_gone(self, handle: Handle, outcome: Outcome) -> Iterator[None]:
        """Looks whether the caches are freed before the latents are decoded."""
        vae = self._pipe.vae
        decode = vae.decode

        def looking(*args: Any, **kwargs: Any) -> Any:
            held = sum(adapter.session.cache_bytes() for adapter in handle._adapters)
            if held and not self._previewing:
                outcome.problems.append(f"{held} bytes of caches while the latents are decoded")
            return decode(*args, **kwargs)

        vae.decode = looking
        try:
            yield
        finally:
            del vae.decode

    @contextlib.contextmanager
    def _preview(self, is_preview: bool) -> Iterator[None]:
        self._previewing = is_preview
        try:
            yield
        finally:
            self._previewing = False


def facts_of(report: Any) -> list[Any]:
    """What a report says was computed, and nothing of where and how."""
    steps = [
        (
            record.transformer,
            record.step,
            record.branch,
            record.action.value,
            record.finished,
            [
                (layer.layer, layer.part, layer.action.value, layer.kept, layer.reason)
                for layer in record.layers
            ],
        )
        for record in report.steps
    ]
    notes = [note for note in report.notes if not any(part in note for part in OF_THE_WAY)]
    return [*steps, ("fallbacks", *report.fallbacks), ("notes", *notes), ("error", report.error)]


def contradictions(report: Any) -> list[str]:
    """What a report does not explain of itself."""
    found = []
    for record in report.steps:
        sparse = [layer for layer in record.layers if layer.action.value == "sparse"]
        explained = report.fallbacks or any(layer.reason for layer in record.layers)
        if record.action.value == "sparse" and record.finished and not (sparse or explained):
            found.append(
                f"step {record.step} of {record.branch} is called sparse, but no layer was, and "
                "nothing says why"
            )
    if report.error is None and not all(record.finished for record in report.steps):
        found.append("a transformer call broke off, and the report has no error")
    return found
