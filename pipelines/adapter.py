"""The part of patching that all models share: position, tags, attention, restoring.

A model's adapter names its modules and reads its sizes; everything that is changed on the model is
changed through `Patches`, which takes all of it back.

The transformer gets another class at run time, a subclass of its own that wraps ``__call__``.
Unlike a diffusers hook, which replaces the instance's ``forward``, this survives hooks that come
and go around it: accelerate's model offload takes its hooks off and on again after every
generation and restores the ``forward`` of an earlier time.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from diffusers.models import attention_dispatch

from chipsparse.config import PARTS, Part
from chipsparse.kernels.dense_attention import faster_than_the_library
from chipsparse.layout import Fp8Form, ModelLayout
from chipsparse.pipelines.bridge import (
    LayerCall,
    attention_backend,
    forward_arguments,
    is_claimed,
    make_tag,
    register_runner,
)
from chipsparse.pipelines.denoising_loop import DenoisingLoop, check_scheduler, scheduler_step
from chipsparse.pipelines.diffusers_hooks import has_foreign_hooks, hooks_of, why_caches_refused
from chipsparse.pipelines.execution import (
    Execution,
    autocast_bytes,
    check_undivided,
    execution_of,
    pending_bytes,
)
from chipsparse.pipelines.feed_forward import FeedForwardSite
from chipsparse.pipelines.feed_forward_forms import (
    Form,
    has_contiguous_channels,
    make_channels_contiguous,
)
from chipsparse.pipelines.guidance_scales import GuidanceScales, scales_of
from chipsparse.pipelines.one_thread import OneThread
from chipsparse.pipelines.parallel.context_parallel import take_off
from chipsparse.pipelines.parallel.guidance import GuidanceSplit
from chipsparse.pipelines.parallel.split_sequence import CUT, CutAtEntry
from chipsparse.pipelines.parallel.team import Team
from chipsparse.pipelines.patched_family import PatchedFamily
from chipsparse.pipelines.patches import TAG, Patches, WholePatched
from chipsparse.pipelines.uncompiled import compiled_as_a_whole, is_compiled, uncompiled
from chipsparse.pipelines.whole_model import check_whole
from chipsparse.report.generation import StepRecord, StepTimer
from chipsparse.report.nothing_sparse import NOTHING, dense_notes, wants_sparse
from chipsparse.skip.clean_samples import clean_bytes
from chipsparse.skip.conditions import Conditioning
from chipsparse.skip.correction import held_bytes
from chipsparse.skip.position import PositionTracker, StepContext
from chipsparse.skip.timetable import Run, Schedule
from chipsparse.sparse.cache.memory_plan import MemoryDemand
from chipsparse.sparse.graphs.model_state import ModelState
from chipsparse.sparse.layers.state import StepState
from chipsparse.sparse.plan import Action
from chipsparse.sparse.session import Session

ADAPTER = "chipsparse_adapter"
# Backends of diffusers that are kernels of PyTorch, exact as ours.
PYTORCH_ATTENTION = ("native", "_native_cudnn", "_native_efficient", "_native_flash")
PREDICTION = "pred_"  # of what guiders of diffusers call a branch: what it predicts
OTHER_SCHEDULER = "the scheduler of the enabled pipeline does not run this call"
# Arguments of models that leave out the attention of some layers, to guide by that.
PASSES_OVER = "skip_layers", "spatio_temporal_guidance_blocks"
# What `ModelState` names where the model computes something else: other modules, adapters (LoRA)
# that come, go, are fused or scaled, pictures that count more. Offloading replaces the rest, too.
COMPUTES = re.compile(
    r"\b_modules\.|\.(scaling|merged_adapters|_active_adapter|_disable_adapters)\b"
    r"|\.processor\.scale\b|^_hf_peft_config_loaded$|^peft_config\b",
)
UNREAD = "the pipeline's ControlNet runs at skipped steps too, which do not read its outputs"
ENABLE_THERE = "enable chipsparse on the pipeline that runs"
SAY_IT = f"{ENABLE_THERE}, or run the loop within handle.generation(scheduler)"


class PatchedTransformer(WholePatched):
    """Mixin of a patched transformer: tells its adapter what the pipeline says and does."""

    chipsparse_adapter: ModelAdapter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Lets the adapter run the call, outside of every hook on the model."""
        adapter = vars(self).get(ADAPTER)
        if adapter is None:  # kept by somebody from before disable(), as torch.compile does
            return type(self).__call__(self, *args, **kwargs)
        return adapter.call(super().__call__, args, kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        adapter = self.chipsparse_adapter
        outer = adapter.named_position
        adapter.named_position = {"name": name, **kwargs}
        named = getattr(super(), "cache_context", None)  # not every model has caches
        try:
            with contextlib.nullcontext() if named is None else named(name, **kwargs):
                yield
        finally:
            adapter.named_position = outer

    def _reset_stateful_cache(self, *args: Any, **kwargs: Any) -> None:
        """Called by pipelines when a generation is complete."""
        self.chipsparse_adapter.finish_generation()
        reset = getattr(super(), "_reset_stateful_cache", None)  # not every model has caches
        if reset is not None:
            reset(*args, **kwargs)

    def set_attention_backend(self, backend: Any) -> None:
        """Changes the backend under ours: the one that dense attention without records uses."""
        with self.chipsparse_adapter.attention_released():
            super().set_attention_backend(backend)  # type: ignore[misc]

    def reset_attention_backend(self) -> None:
        with self.chipsparse_adapter.attention_released():
            super().reset_attention_backend()  # type: ignore[misc]


class ModelAdapter(PatchedFamily):
    """Patches one transformer and serves its layers; `remove` restores it bit for bit."""

    def __init__(
        self,
        transformer: torch.nn.Module,
        session: Session,
        tracker: PositionTracker,
        loop: DenoisingLoop,
        team: Team | None = None,
    ) -> None:
        check_undivided(transformer)
        self.transformer = transformer
        self.session = session
        self.team = team
        self.split = (
            None if team is None else team.split(session.config, needs_text=self.needs_text)
        )
        self._refuse_split(self.why_not_split(self._model.config))
        # The other processes that compute guidance branches.
        self._guidance_split: GuidanceSplit | None = None if team is None else team.guidance
        if self._guidance_split is not None:
            self._refuse_sharing(self.why_guidance_stays())
        self.execution: Execution  # of the open call, or the last one
        self._executed_generation = 0
        self.named_position: dict[str, Any] = {}
        self.other_experts: list[ModelAdapter] = []
        self.turn = OneThread()  # shared by all transformers of a pipeline
        self.is_calling = False
        self._tracker = tracker
        self._loop = loop
        self._patches = Patches()
        self._attention_patches = Patches()
        self._layouts = Patches()  # of weights that were laid out for the kernels
        self._unpatched_backends: list[Any] = []
        self._processors: list[Any] = []
        self._guided_generation = 0
        self._guided_batch: int | None = None
        self._is_scheduled = True
        self._corrects = False
        self._corrected_generation = 0
        self._state: ModelState | None = None
        self._recomputed = 0  # times that the model became one that computes something else
        self._guidance_scales = GuidanceScales()
        self._argument_names = forward_arguments(transformer)
        number = register_runner(self)
        try:
            self.feed_forward_sites = self.feed_forwards()  # a call may begin in another thread
            self._patches.set_attribute(transformer, ADAPTER, self)
            self._patches.set_class(transformer, PatchedTransformer)
            for layer, module in enumerate(self.self_attentions()):
                mixin = self.own_processors.get(type(module.processor).__name__)
                if mixin is not None and not isinstance(module.processor, mixin):
                    self._patches.set_class(module.processor, mixin)
                self._patches.set_attribute(module, TAG, make_tag(number, layer))
                self.hook_attention(module)
            for layer, site in enumerate(self.feed_forward_sites):
                site.patch(self._patches, make_tag(number, layer))
            take_off(transformer, self._patches)
            if self.split is not None and self.cuts_at_blocks:
                first, *others = getattr(transformer, self.block_list)
                for block in (first, *others):  # of one class, so that they share a graph
                    self._patches.set_class(block, CutAtEntry)
                self._patches.set_attribute(first, CUT, self.cut_entering)
            self.claim_attention()
            self.install_tile_order()
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        self._attention_patches.undo()
        self._layouts.undo()
        self._patches.undo()
        self.session.close()
        if self.team is not None:
            self.team.close()

    # One transformer call.

    @torch.compiler.disable(recursive=False)
    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs the transformer's own call between `Session.begin` and `Session.end`."""
        with self._calling():
            if vars(self.transformer).get(ADAPTER) is not self:  # restored by another thread
                return forward(*args, **kwargs)
            if torch.is_grad_enabled():
                return self._run_with_gradients(forward, args, kwargs)
            if is_compiled(self.transformer):
                raise ValueError(compiled_as_a_whole(self.session.name))
            arguments = self.named(args, kwargs)
            model_call = functools.partial(forward, *args, **kwargs)
            self.session.report.in_call = self._loop.runs
            context = self._locate(arguments)
            for expert in self.other_experts:  # done with for this generation: free its caches
                expert.session.reset()
            guidance = self._guidance_split
            if guidance is not None:
                if not self._is_guided():
                    raise ValueError(
                        "Parallel(guidance=2) needs a pipeline that guides: give it a guidance "
                        "scale above 1, or use Parallel(guidance=1)",
                    )
                if not guidance.computes(context):
                    return self.wrap_output(guidance.output(None), arguments)
            state = self._begin(context, arguments)
            if state is None:
                result = self._run_outside(context, arguments, model_call)
            elif state.action is Action.SKIP:  # nothing of the model runs
                output = self.session.skipped_output()
                self.session.end(output)
                result = self.wrap_output(output, arguments)
            else:
                with self._dense_attention(arguments):
                    self.session.say_if_all_dense()
                    result = self.session.graphs.run(
                        model_call,
                        state,
                        self.execution.device,
                        self._not_captured_reason,
                    )
                ended = self._guidance_ended(context.generation)
                self.session.end(self.held_output(result), is_last_branch=ended)
                self._say_what_was_unseen(state, arguments)
                self._keep_state()
            if guidance is None:
                return result
            return self.wrap_output(guidance.output(self.held_output(result)), arguments)

    def _run_with_gradients(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        """Runs a call as without chipsparse; in a known loop it stands in the report as dense."""
        self._refuse_split("gradients are recorded; call it under torch.no_grad()")
        report = self.session.report
        record = None
        if self._loop.runs:
            arguments = self.named(args, kwargs)
            report.in_call = True
            context = self._locate(arguments)
            record = StepRecord(
                context.step,
                context.steps,
                context.branch,
                Action.DENSE,
                transformer=self.session.name,
            )
            report.begin(context.generation, record)
            record.timer = StepTimer(self.latents(arguments).device)
        self._run_dense("gradients are recorded", "call the transformer under torch.no_grad()")
        result = forward(*args, **kwargs)
        if record is not None and isinstance(record.timer, StepTimer):
            record.timer.stop()
            record.finished = True
        return result

    def _run_outside(
        self,
        context: StepContext,
        arguments: dict[str, Any],
        model_call: Callable[[], Any],
    ) -> Any:
        """Runs a call as without chipsparse; it stands in the report as dense."""
        record = StepRecord(context.step, context.steps, context.branch, Action.DENSE)
        self.session.report.begin(context.generation, record)
        record.timer = StepTimer(self.execution.device)
        self.observe(context, arguments)
        # Compiled blocks would not run without tags.
        with self.attention_released(), uncompiled(self.transformer):
            result = model_call()
        record.timer.stop()
        self._say_what_is_unknown(context)
        return result

    @property
    def device(self) -> torch.device:
        """Of the last call; before the first one no GPU has work of ours."""
        execution = vars(self).get("execution")
        return torch.device("cpu") if execution is None else execution.device

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Around a call: an error frees the caches, and ends the other processes' calls."""
        with self.turn.only(type(self.transformer).__name__):
            outer = self.is_calling
            self.is_calling = True
            try:
                yield
            except BaseException as error:
                self.session.report.fail(error)
                try:
                    if self.team is not None:
                        self.team.failed(error, self.device)
                finally:
                    self.session.reset(stuck=self.team is not None and self.team.stuck)
                raise
            finally:
                self.is_calling = outer

    def is_undisturbed(self) -> bool:
        """Return whether nobody but the pipeline runs between the calls: see `DenoisingLoop`."""
        return self._loop.is_undisturbed

    def called_outside(self) -> None:
        """Says of layers that compute while the transformer is not called: they run dense."""
        if wants_sparse(self.session.config):
            self._run_dense(
                "its layers are called outside of a call of the transformer",
                "call the transformer itself",
            )

    def _run_dense(self, reason: str, remedy: str) -> None:
        report = self.session.report
        report.fall_back(f"everything runs dense: {reason}")
        if not any(record.used_caches for record in report.steps):
            report.run_dense(f"nothing runs sparse: {reason}; {remedy}")

    def _begin(self, context: StepContext, arguments: dict[str, Any]) -> StepState | None:
        """Opens a call, on this process or with its share of it; None: see `knows`."""
        if context.generation != self._executed_generation:
            check_whole(self.session.name, self.transformer)
        self._run_as(self._execution(self.latents(arguments)), context.generation)
        if not self.knows(context, arguments):
            return None
        layout = self._guided_layout(arguments, context.generation)
        layout = layout if self.split is None else self.split.open(layout)
        changed = None if self._state is None else self._state.change()
        self._recomputed += changed is not None and bool(COMPUTES.search(changed))
        if context.generation != self._corrected_generation:
            run = Run(context.steps, context.first, self.session.sparse_cost(layout))
            listed = Schedule(self.session.config.schedule, run)
            self._corrected_generation = context.generation
            self._corrects = self._loop.corrects(listed) and self._is_scheduled
        context = replace(context, corrects=self._corrects)
        conditioning = None  # of which other processes would have to know
        if self._guidance_split is None:
            scales = scales_of(self._loop.pipe, getattr(self._loop.pipe, "guider", None))
            switches = self._guidance_scales.switches(context.generation, context.step, scales)
            changes = {"the model": self._recomputed, "guidance_scale": switches}
            undisturbed = self.is_undisturbed()
            conditioning = Conditioning(arguments, changes, undisturbed=undisturbed)
        state = self.session.begin(
            context,
            layout,
            self.execution.device,
            lambda: self._memory_demand(arguments),
            why_not_cached=self._loop.why_not_cached(self.transformer),
            has_faster_attention=self._has_faster_attention(layout, arguments),
            conditioning=conditioning,
        )
        if self.split is not None:
            self.split.check_same_calls(state, arguments, first=self.session.is_first_call)
        self._check_caches()
        self._say_what_is_unknown(context)
        for note in self.notes(arguments):
            self.session.report.note(note)
        if state.action is not Action.SKIP:
            self._look_at_modules(changed)
        elif getattr(self._loop.pipe, "controlnet", None) is not None:
            self.session.report.note(UNREAD)
        return state

    def _say_what_was_unseen(self, state: StepState, arguments: dict[str, Any]) -> None:
        """Reports layers of a sparse call that others than ours computed, or passed over."""
        plan = state.plan
        record = state.record
        if not (state.caching and record.action is Action.SPARSE) or record.replayed:
            return
        passes_over = any(arguments.get(name) is not None for name in PASSES_OVER)
        if passes_over or any(hooks_of(self.transformer)):
            return
        known = {(entry.layer, entry.part) for entry in record.layers}
        known |= self.session.recorder.left_dense.keys()
        counts = {"attention": len(self.self_attentions()), "mlp": len(self.feed_forward_sites)}
        unseen = {
            (layer, part): "code that was put in the model's place computes it, or passes it over"
            for part in PARTS
            for layer in range(counts[part])
            if (layer, part) not in known and plan.is_sparse(layer, part)
        }
        for note in dense_notes(unseen, plan.layout.layers):
            self.session.report.fall_back(note)

    def _refuse_split(self, reason: str | None) -> None:
        if self.split is not None:
            self._refuse_sharing(reason)

    def _refuse_sharing(self, reason: str | None) -> None:
        """Raises `ValueError` where other processes run it too, and there is a reason."""
        if self.team is not None and reason is not None:
            raise ValueError(
                f"this {type(self.transformer).__name__} cannot run on several processes: {reason}",
            )

    def _locate(self, arguments: dict[str, Any]) -> StepContext:
        loop = self._loop
        named = self.named_position

        def read_in(schedule: Any) -> float:
            return self.scheduled_timestep(self.own_timestep(arguments), schedule)

        self._is_scheduled = loop.is_scheduled(read_in)
        scheduler = loop.scheduler if self._is_scheduled else None
        check_scheduler(scheduler)
        schedule = getattr(scheduler, "timesteps", None)
        row, rows = self.row_of_loop()
        step = named.get("step_index", row)
        branch = named.get("name") or loop.branch()

        def read() -> float:
            timestep = loop.timestep()
            return read_in(schedule) if timestep is None else timestep

        context = self._tracker.locate(
            branch=None if branch is None else branch.removeprefix(PREDICTION),
            step_index=scheduler_step(scheduler) if step is None else step,
            steps=named.get("num_inference_steps", rows),
            timestep=read,
            schedule=schedule,
            unnamed_branch=loop.unnamed_branch,
        )
        loop.note_uncorrected(context.step)
        if not loop.correction.follows(loop.scheduler):
            loop.follow_schedulers()
        return replace(context, placed=self._is_scheduled or step is not None)

    def _say_what_is_unknown(self, context: StepContext) -> None:
        """Reports of a call that the scheduler does not run what is not known for this reason."""
        plan = self.session.plan
        report = self.session.report
        if self._is_scheduled or plan is None or not wants_sparse(plan.config):
            return
        if not context.placed:
            sentence = f"{OTHER_SCHEDULER}, so its step is not known; {SAY_IT}"
            report.fall_back(f"calls run dense: {sentence}")
            report.run_dense(f"{NOTHING}: {sentence}")
        elif context.steps is None:
            report.fall_back(f"{OTHER_SCHEDULER}, so the number of steps is not known; {SAY_IT}")
        else:
            report.note(f"{OTHER_SCHEDULER}, so forecasts go by steps; {ENABLE_THERE}")

    def _guidance_ended(self, generation: int) -> bool:
        """Return whether the pipeline guided in this generation, and now says that it does not."""
        if self._guides_in_batch:
            return False
        guided = self._is_guided()
        if guided:
            self._guided_generation = generation
        return not guided and self._guided_generation == generation

    def _guided_layout(self, arguments: dict[str, Any], generation: int) -> ModelLayout:
        """The sizes of a call, and how many guidance branches its batch holds.

        The first call tells: some pipelines change the scale later and go on to compute both, and
        skip-layer guidance is a call of its own with the smaller batch.
        """
        layout = self.layout(arguments)
        if self._guides_in_batch and generation != self._guided_generation:
            self._guided_generation = generation
            guided = self._is_guided() and layout.batch % 2 == 0
            self._guided_batch = layout.batch if guided else None
        return replace(layout, guided_in_batch=2 if layout.batch == self._guided_batch else 1)

    def _execution(self, hidden: torch.Tensor) -> Execution:
        modules = self.self_attentions()
        weight = next((modules[0] if modules else self.transformer).parameters())
        return execution_of(self.transformer, weight, hidden)

    def _run_as(self, execution: Execution, generation: int) -> None:
        """Notes how the call computes; where that changes in a generation, caches start anew."""
        goes_on = generation == self._executed_generation
        before = self.execution if goes_on else execution
        self.execution = execution
        self._executed_generation = generation
        if execution == before:
            return
        plan = self.session.plan
        self.session.reset()
        if plan is not None and not plan.is_dense():
            self.session.report.fall_back(
                "some steps run dense as the first ones do, to record anew: the model goes on in "
                f"{execution} instead of {before}",
            )

    def _look_at_modules(self, changed: str | None) -> None:
        """Decides anew what can run sparse, at first and when anything about the model changed.

        In the middle of a generation adapters (LoRA), hooks and processors come, go and change, and
        weights move: a callback may do so, and offloading.
        """
        what = "the model" if self._state is None else changed
        if what is not None:
            self.session.graphs.model_changed(what)
            self._state = None
        if what is not None or self.session.is_first_call:
            self._check_attention()
            self._check_feed_forwards()

    def _keep_state(self) -> None:
        """Notes what the model computes with, behind a call: its weights are where they stay."""
        if self._state is None:
            self._state = ModelState(
                self.transformer,
                self.execution.device,
                ignored={ADAPTER},
                surroundings=lambda: surroundings(self.execution.device.type),
            )

    def _not_captured_reason(self) -> str | None:
        """Return why sparse steps of a generation may not all do the same, or None."""
        if self.team is not None:
            return "several processes share it, and a replay would exchange nothing with them"
        if self.execution.autocast:
            return "torch.autocast is on, and the copies of weights that it keeps come and go"
        for name, module in self.transformer.named_modules():
            if has_foreign_hooks(module, self._patches, is_whole_model=name == ""):
                return f"hooks run with {name or 'the transformer'}"
        return None

    def _memory_demand(self, arguments: dict[str, Any]) -> MemoryDemand:
        execution = self.execution
        all_dense = self.why_attention_is_dense(arguments) is not None
        dense: set[tuple[int, Part]] = {
            (layer, "attention")
            for layer, module in enumerate(self.self_attentions())
            if all_dense or not is_claimed(module)
        }
        fp8_mlps: dict[int, Fp8Form] = {}
        for layer, form in enumerate(map(self._form, self.feed_forward_sites)):
            if isinstance(form, str):
                dense.add((layer, "mlp"))
            elif form.fp8 is not None:
                fp8_mlps[layer] = form.fp8
        pending = pending_bytes(self.transformer, execution.device)
        if execution.autocast:
            pending += autocast_bytes(self.transformer, execution.dtype)
        plan = self.session.plan
        if plan is not None and plan.schedule.skips_any:
            latents = self.latents(arguments)
            corrected = held_bytes(self._loop.scheduler, latents) if plan.corrects_any else 0
            pending += max(corrected, clean_bytes(latents))
        return MemoryDemand(
            dtype=execution.dtype,
            branches=self.branches(),
            pending_bytes=pending,
            window_bytes=0 if self.split is None else self.split.exchange.window_bytes,
            dense=frozenset(dense),
            fp8_mlps=fp8_mlps,
            captures=self.team is None,
        )

    def branches(self) -> int:
        """Guidance branches that the generation is known to have on this process."""
        if self._guidance_split is not None:
            return 1
        if (branches := self._loop.branches()) is not None:
            return branches
        guided = self._is_guided() and not self.guides_in_batch
        return 1 + guided + self.further_branches((self._loop.arguments or {}).get)

    def _is_guided(self) -> bool:
        """Return whether each step also computes without the prompt, as far as the loop tells."""
        branches = self._loop.branches()
        arguments = self._loop.arguments
        if branches is None:
            return arguments is not None and self.is_guided(self._loop.pipe, arguments)
        return branches > 1

    @property
    def _guides_in_batch(self) -> bool:
        """True if the pipeline makes both branches halves of a batch: guiders never do."""
        return self.guides_in_batch and self._loop.branches() is None

    def finish_generation(self) -> None:
        self.session.reset(stuck=self.team is not None and self.team.stuck)
        self._tracker.finish()

    # Attention.

    def claim_attention(self) -> None:
        """Leads self-attention that is dispatched to our backend, remembering the modules' own."""
        self._processors = [module.processor for module in self.self_attentions()]
        self._unpatched_backends = [
            getattr(processor, "_attention_backend", None) for processor in self._processors
        ]
        for processor, other in zip(self._processors, self._unpatched_backends, strict=True):
            if hasattr(processor, "_attention_backend"):
                self._attention_patches.set_attribute(
                    processor,
                    "_attention_backend",
                    attention_backend(other),
                )

    @contextlib.contextmanager
    def attention_released(self) -> Iterator[None]:
        """Gives the self-attention modules their own backends back for a while."""
        self._attention_patches.undo()
        try:
            yield
        finally:
            self.claim_attention()

    def attention(self, layer: int) -> LayerCall:
        """The self-attention of a layer, called as `AttentionLayer` is."""
        attend = self.session.attention[layer]
        return attend if self.split is None else functools.partial(self.split.attend, attend)

    def unpatched_attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Self-attention ``[B, H, N, D]`` on the backend that ours took the place of."""
        output = attention_dispatch.dispatch_attention_fn(
            *(states.transpose(1, 2) for states in (query, key, value)),
            scale=scale,
            backend=self._unpatched_backends[layer],
        )
        return output.transpose(1, 2)

    def _has_faster_attention(self, layout: ModelLayout, arguments: dict[str, Any]) -> bool:
        """Return whether full attention is faster in our layers: by our kernel, or unmasked."""
        # Not in the place of a backend that a user chose, which may be faster still.
        active = attention_dispatch._AttentionBackendRegistry._active_backend
        if any((other or active) not in PYTORCH_ATTENTION for other in self._unpatched_backends):
            return False
        device = self.execution.device
        dtype = self.execution.dtype
        if self.masks_text(arguments) and device.type == "cuda":
            return True
        is_faster = faster_than_the_library(device, dtype, layout.tokens, layout.head_dim)
        return is_faster and not self.shares_keys

    # What runs dense although the config asks otherwise.

    def _check_attention(self) -> None:
        """Reports the layers whose attention does not lead here any more."""
        wanted = self.session.wants_attention and self.session.config.attention.is_sparse
        if not wanted and self.split is None:
            return
        lost = {
            layer: self._why_lost(layer, module.processor)
            for layer, module in enumerate(self.self_attentions())
            if not is_claimed(module)
        }
        self._refuse_split(next(iter(lost.values()), None))
        self._report("attention", lost)

    def _why_lost(self, layer: int, processor: Any) -> str:
        if processor is not self._processors[layer] or hasattr(processor, "_attention_backend"):
            return "its processor was replaced"
        return f"its processor {type(processor).__name__} does not dispatch its attention"

    def _dense_attention(
        self,
        arguments: dict[str, Any],
    ) -> contextlib.AbstractContextManager[None]:
        """Gives the attention back for a call in which none of it can run sparse, and says so.

        Also where nothing is sparse at all and the model's own kernels are as fast as ours: they
        then get q, k and v as compiled code lays them out for them, and the call costs what it does
        without chipsparse.
        """
        reason = self.why_attention_is_dense(arguments)
        if self.split is not None:  # the exchange is ours, whatever the layers compute
            self._refuse_split(reason)
            return contextlib.nullcontext()
        wanted = self.session.wants_attention and self.session.config.attention.is_sparse
        if reason is not None and wanted:
            reasons = dict.fromkeys(range(len(self._unpatched_backends)), reason)
            self.session.recorder.leave_dense("attention", reasons, once=True)
            self.session.report.fall_back(f"attention runs dense: {reason}")
        elif self.session.attends and not self.needs_mask(arguments):
            return contextlib.nullcontext()
        return self.attention_released()

    def _check_feed_forwards(self) -> None:
        """Decides before each call which feed-forward layers run sparse; reports the others."""
        wanted = self.session.caching and self.session.config.mlp.is_sparse
        dense: dict[int, str] = {}
        if not self._wants_contiguous_channels():  # any more: the model has another dtype, say
            self._layouts.undo()
        for layer, site in enumerate(self.feed_forward_sites):
            form = self._form(site) if wanted else None
            if isinstance(form, str):
                dense[layer] = form
                form = None
            elif form is not None and self._needs_layout(site, form):
                make_channels_contiguous(site.second_linear(), self._layouts)
            site.run_as(form)
        self._report("mlp", dense)

    def _form(self, site: FeedForwardSite) -> Form | str:
        """The form of a layer, or why it is dense."""
        form = site.form()
        if isinstance(form, str):
            return form
        if form.fp8 == "weights" and self.execution.autocast:
            return "torch.autocast casts what its weights in FP8 are multiplied by, and not them"
        if self._needs_layout(site, form) and site.keeps_its_layout():
            return "its weights are offloaded in groups, so they cannot be laid out for the kernels"
        return form

    def _needs_layout(self, site: FeedForwardSite, form: Form) -> bool:
        """Return whether the kernels want the second weight of a layer in another layout."""
        wanted = form.fp8 is None and self._wants_contiguous_channels()
        return wanted and not has_contiguous_channels(site.second_linear())

    def _wants_contiguous_channels(self) -> bool:
        """Return whether the GPU kernels run, which want second weights of another layout."""
        device = self.execution.device
        dtype = self.execution.dtype
        on_gpu = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
        return on_gpu and self.session.config.backend != "reference"

    def _check_caches(self) -> None:
        """Refuses caches of diffusers that cannot be on top, where a guidance branch begins."""
        if not self.session.is_first_call:
            return
        if getattr(self.transformer, "is_cache_enabled", False):
            self._refuse_sharing(
                "a cache of diffusers on it decides from the tokens of one process what to pass "
                "over; call disable_cache() on the transformer",
            )
        skips = self.session.plan is not None and self.session.plan.schedule.skips_any
        if self.session.wants_attention or skips:
            reason = why_caches_refused(self.transformer, skips=skips)
            if reason is not None:
                raise ValueError(f"{type(self.transformer).__name__}: {reason}")

    def _report(self, part: Part, reasons: dict[int, str]) -> None:
        self.session.recorder.leave_dense(part, reasons)
        parts = {(layer, part): reason for layer, reason in reasons.items()}
        for note in dense_notes(parts, len(self.self_attentions())):
            self.session.report.fall_back(note)


def surroundings(device_type: str) -> dict[str, object]:
    """The state outside of its model and arguments that a call on a device depends on, by name."""
    attention_backends = attention_dispatch._AttentionBackendRegistry
    autocast = torch.amp.is_autocast_available(device_type)
    return {
        "autocast": autocast
        and (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)),
        "inference mode": torch.is_inference_mode_enabled(),
        "the precision of products": torch.get_float32_matmul_precision(),
        "the use of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "diffusers' attention backend": attention_backends._active_backend,
    }
