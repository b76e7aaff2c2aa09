"""The calls of one patched transformer: each is located, skipped or run, and its record kept.

The transformer gets another class at run time, a subclass of its own that wraps ``__call__``.
Unlike a diffusers hook, which replaces the instance's ``forward``, this survives hooks that come
and go around it: accelerate's model offload takes its hooks off and on again after every
generation and restores the ``forward`` of an earlier time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from chipsparse.config import Action
from chipsparse.layout import ModelLayout
from chipsparse.pipelines.denoising_loop import DenoisingLoop, check_scheduler, scheduler_step
from chipsparse.pipelines.execution import Execution, check_undivided
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.generation import Generation
from chipsparse.pipelines.guidance_scales import scales_of
from chipsparse.pipelines.one_thread import OneThread
from chipsparse.pipelines.ops import register_server
from chipsparse.pipelines.parallel.guidance import GuidanceSplit, output_of, wrapped
from chipsparse.pipelines.parallel.team import Team
from chipsparse.pipelines.patches import RUNNER, Patches, WholePatched
from chipsparse.pipelines.separate_lengths import SeparateLengths
from chipsparse.pipelines.sparse_model import SparseModel
from chipsparse.pipelines.uncompiled import compiled_as_a_whole, is_compiled, uncompiled
from chipsparse.pipelines.whole_model import check_whole
from chipsparse.reasons import calls as reasons
from chipsparse.reasons.layers import everything_dense
from chipsparse.reasons.reason import note
from chipsparse.report.nothing_sparse import wants_sparse
from chipsparse.report.records import StepRecord, StepTimer
from chipsparse.skip.clean_samples import clean_bytes
from chipsparse.skip.conditions import Conditions
from chipsparse.skip.correction import held_bytes
from chipsparse.skip.position import Locator, Place
from chipsparse.skip.session import CallForm, Decision, SkipSession
from chipsparse.skip.step_log import LoggedCall
from chipsparse.skip.timetable import Run, Schedule
from chipsparse.sparse.layers.state import OpenCall
from chipsparse.sparse.plan import SparsityPlan
from chipsparse.sparse.session import Reading, SparseSession

PREDICTION = "pred_"  # of what guiders of diffusers call a branch: what it predicts
UNGUIDED = (
    "Parallel(guidance=2) needs a pipeline that guides: give it a guidance scale above 1, or use "
    "Parallel(guidance=1)"
)
NOTHING_CALLED = Execution(torch.device("cpu"), torch.float32)

Arguments = dict[str, Any]  # of a call of the transformer's ``forward``, by name


class PatchedTransformer(WholePatched):
    """Mixin of a patched transformer: tells its runner what the pipeline says and does."""

    chipsparse_runner: Runner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the runner make the call, outside of every hook on the model."""
        runner = vars(self).get(RUNNER)
        if runner is None:  # kept by somebody from before disable(), as torch.compile does
            return type(self).__call__(self, *args, **kwargs)
        return runner.call(super().__call__, args, kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def cache_context(self, name: str, **kwargs: Any) -> Iterator[None]:
        """Name the guidance branch, and maybe the step, of the calls within."""
        runner = self.chipsparse_runner
        outer = runner.named_position
        runner.named_position = {"name": name, **kwargs}
        named = getattr(super(), "cache_context", None)  # not every model has caches
        try:
            with contextlib.nullcontext() if named is None else named(name, **kwargs):
                yield
        finally:
            runner.named_position = outer

    def _reset_stateful_cache(self, *args: Any, **kwargs: Any) -> None:
        """End the generation: pipelines call this when it is complete."""
        self.chipsparse_runner.pipeline_ended()
        reset = getattr(super(), "_reset_stateful_cache", None)  # not every model has caches
        if reset is not None:
            reset(*args, **kwargs)

    def set_attention_backend(self, backend: Any) -> None:
        """Change the backend under ours: the one that dense attention without records uses."""
        with self.chipsparse_runner.sparse.patch.attention_released():
            super().set_attention_backend(backend)  # type: ignore[misc]

    def reset_attention_backend(self) -> None:
        """Change the backend under ours back to diffusers' active one."""
        with self.chipsparse_runner.sparse.patch.attention_released():
            super().reset_attention_backend()  # type: ignore[misc]


class Runner:
    """Patches one transformer and runs its calls; `remove` restores it bit for bit."""

    def __init__(
        self,
        family: Family,
        transformer: torch.nn.Module,
        session: SparseSession,
        tracker: Locator,
        loop: DenoisingLoop,
        team: Team | None = None,
    ) -> None:
        check_undivided(transformer)
        self.transformer = transformer
        self.team = team
        self.named_position: dict[str, Any] = {}  # by ``cache_context``
        self.other_experts: list[Runner] = []
        self.turn = OneThread()  # shared by all transformers of a pipeline
        self.generation = Generation(0, NOTHING_CALLED)
        self.loop = loop
        self._tracker = tracker
        self._patches = Patches()
        self._is_scheduled = True  # the loop's scheduler runs the open call
        self._report = session.report
        self._name = session.name
        self._skip = SkipSession(loop.log)
        # The other processes that compute guidance branches.
        self._guidance: GuidanceSplit | None = None if team is None else team.guidance
        self.sparse = SparseModel(family, transformer, session, loop, self._patches, team)
        try:
            # A call may begin in another thread.
            self.sparse.patch.sites = family.feed_forwards(transformer)
            self._patches.set_attribute(transformer, RUNNER, self)
            self._patches.set_class(transformer, PatchedTransformer)
            self.sparse.apply(register_server(self.sparse))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Restore the transformer and free all caches."""
        self.sparse.patch.undo()
        self.sparse.session.close()
        if self.team is not None:
            self.team.close()

    @property
    def device(self) -> torch.device:
        """The device of the last call; the CPU before the first one."""
        return self.generation.execution.device

    @property
    def is_calling(self) -> bool:
        """True while a call of the transformer is under way."""
        return self.sparse.is_calling

    # One transformer call.

    @torch.compiler.disable(recursive=False)
    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run a call between `begin` and `end` of both sessions.

        Samples whose prompts differ in length may be calls of their own: see `SeparateLengths`.
        """
        reader = self.sparse.reader
        if isinstance(reader, SeparateLengths) and not reader.is_open:
            return reader.run(
                functools.partial(self.call, forward),
                args,
                kwargs,
                position=self.named_position,
                is_known=lambda arguments: self.why_unknown(arguments) is None,
                is_guided=lambda: self.loop.branches() is None and self._is_guided(),
            )
        with self._calling():
            if vars(self.transformer).get(RUNNER) is not self:  # restored by another thread
                return forward(*args, **kwargs)
            if torch.is_grad_enabled():
                return self._run_with_gradients(forward, args, kwargs)
            if is_compiled(self.transformer):
                raise ValueError(compiled_as_a_whole(self._name))
            arguments = reader.named(args, kwargs)
            model_call = functools.partial(forward, *args, **kwargs)
            self._report.in_call = self.loop.runs
            unknown = self.why_unknown(arguments)
            if unknown is not None:
                return self._run_unknown(unknown, model_call)
            place = self._locate(arguments)
            for expert in self.other_experts:  # done with for this generation: free its caches
                expert.reset()
            if self._guidance is None:
                return self._run_at(place, arguments, model_call)
            if not self._is_guided():
                raise ValueError(UNGUIDED)
            if not self._guidance.computes(place):
                return wrapped(self._guidance.output(None), arguments)
            result = self._run_at(place, arguments, model_call)
            return wrapped(self._guidance.output(output_of(result)), arguments)

    def _run_at(
        self,
        place: Place,
        arguments: Arguments,
        model_call: functools.partial[Any],
    ) -> Any:
        """Return the result of a call at a known step: reused, or computed by the model."""
        self._follow(place, arguments)
        if not self.sparse.reader.knows(place, arguments):
            return self._run_without_layout(place, arguments, model_call)
        decision, state = self._begin(place, arguments)
        if decision.is_skipped:
            self._end(decision, state, decision.output)
            return decision.output
        execution = self.generation.execution
        with self.sparse.attention_of(arguments):
            session = self.sparse.session
            session.say_if_all_dense()
            result = session.graphs.run(
                model_call,
                state,
                execution.device,
                lambda: self.sparse.why_not_captured(execution),
            )
        repeated = self.sparse.reader.repeated(result)
        self._end(decision, state, repeated, is_last_branch=self._has_guidance_ended())
        self.sparse.ran(state, arguments, execution)
        return result

    def _follow(self, place: Place, arguments: Arguments) -> None:
        """Begin a generation with its first call; notice where it goes on in another dtype."""
        latents = self.sparse.reader.latents(arguments)
        if place.generation != self.generation.number:
            check_whole(self._name, self.transformer)
            self.generation = Generation(place.generation, self.sparse.execution(latents))
            return
        before = self.generation.execution
        execution = self.sparse.execution(latents)
        if execution == before:
            return
        self.generation.execution = execution
        plan = self.sparse.session.plan
        self.reset()
        if plan is not None and not plan.is_dense():
            self._report.add(reasons.moved(str(execution), str(before)))

    def _begin(self, place: Place, arguments: Arguments) -> tuple[Decision, OpenCall]:
        """Open a call in both sessions, on this process or with its share of it."""
        sparse = self.sparse
        sparse.refuse_split(sparse.reader.why_whole(arguments))
        layout = self._guided_layout(arguments)
        layout = layout if sparse.split is None else sparse.split.open(layout)
        changed = sparse.change()
        place = self._with_correction(place, layout)
        plan = sparse.session.plan_for(place, layout)
        decision = self._skip.begin(
            place,
            _form_of(place, layout),
            plan.schedule,
            self._conditions(place, arguments),
        )
        execution = self.generation.execution
        reading = Reading(
            layout,
            execution.device,
            lambda: sparse.memory_demand(
                arguments,
                execution,
                branches=self.branches(),
                kept=self._bytes_over_skipped_steps(plan, arguments),
            ),
            why_not_cached=self.loop.why_not_cached(self.transformer),
            has_faster_attention=sparse.has_faster_attention(layout, arguments, execution),
        )
        state = sparse.session.begin(decision, plan, reading)
        if sparse.split is not None:
            sparse.split.check_same_calls(state, arguments, first=sparse.session.is_first_call)
        sparse.check_caches()
        self._say_whose_steps(place)
        for sentence in sparse.reader.notes(arguments):
            self._report.add(note("model.call", sentence))
        if not decision.is_skipped:
            sparse.look_at_modules(changed, execution)
        elif getattr(self.loop.pipe, "controlnet", None) is not None:
            self._report.add(reasons.controlnet_unread())
        return decision, state

    def _end(
        self,
        decision: Decision,
        state: OpenCall,
        result: Any,
        *,
        is_last_branch: bool = False,
    ) -> None:
        """Close a call, which returns this result."""
        session = self.sparse.session
        session.end(self.generation.execution.device)
        over = self._skip.end(
            decision,
            state.plan.schedule,
            state.action,
            result,
            is_last_branch=is_last_branch,
        )
        session.finish(over)

    def _with_correction(self, place: Place, layout: ModelLayout) -> Place:
        """Return the position with whether the scheduler corrects, asked once a generation."""
        corrects = self.generation.corrects
        if corrects is None:
            session = self.sparse.session
            run = Run(place.steps, place.first, session.sparse_cost(layout))
            planned = Schedule(session.config.schedule, run)
            corrects = self.loop.corrects(planned) and self._is_scheduled
            self.generation.corrects = corrects
        return replace(place, corrects=corrects)

    def _conditions(self, place: Place, arguments: Arguments) -> Conditions | None:
        """Return what the output of a call depends on besides latents and timestep.

        None where other processes compute guidance branches: they would have to know of a change.
        """
        if self._guidance is not None:
            return None
        scales = scales_of(self.loop.pipe, getattr(self.loop.pipe, "guider", None))
        others = {
            "the model": self.sparse.calls_changed,
            "guidance_scale": self.generation.scales.switches(place.step, scales),
            "return_dict": arguments.get("return_dict", True),
        }
        return Conditions(arguments, others, undisturbed=self.loop.is_undisturbed)

    def _bytes_over_skipped_steps(self, plan: SparsityPlan, arguments: Arguments) -> int:
        """Return the bytes that correction and reused clean samples keep."""
        if not plan.schedule.skips_any:
            return 0
        latents = self.sparse.reader.latents(arguments)
        corrected = held_bytes(self.loop.scheduler, latents) if plan.corrects_any else 0
        return max(corrected, clean_bytes(latents))

    # Calls that run as without chipsparse.

    def _run_with_gradients(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        """Run a call that records gradients. In a known loop the report has it, as dense."""
        remedy = "call the transformer under torch.no_grad()"
        self.sparse.refuse_split("gradients are recorded; call it under torch.no_grad()")
        record = None
        if self.loop.runs:
            arguments = self.sparse.reader.named(args, kwargs)
            if self.why_unknown(arguments) is None:
                self._report.in_call = True
                place = self._locate(arguments)
                record = self._begin_dense(place, self.sparse.reader.latents(arguments).device)
        dense = everything_dense("calls.gradients", "gradients are recorded", remedy)
        self._report.add_dense_calls(*dense)
        result = forward(*args, **kwargs)
        if record is not None:
            self._end_dense(record)
            record.finished = True
        return result

    def _run_unknown(self, cause: tuple[str, str], model_call: Callable[[], Any]) -> Any:
        """Run a call at no known step, and leave the generation as it is."""
        self.sparse.refuse_split("; ".join(cause))
        self._report.add_unknown_call(*reasons.at_no_step(*cause))
        if self.loop.runs:  # the scheduler's next step is not made of the last recorded call
            self.loop.note_uncorrected()
        with self.sparse.as_stock():
            return model_call()

    def _run_without_layout(
        self,
        place: Place,
        arguments: Arguments,
        model_call: Callable[[], Any],
    ) -> Any:
        """Run a call whose sizes are not known; the report has it, as dense."""
        record = self._begin_dense(place, self.device)
        if self.sparse.reader.observe(place, arguments):
            self.reset()
            self.sparse.patch.release_feed_forwards()
        # Compiled blocks would not run without tags.
        with self.sparse.patch.attention_released(), uncompiled(self.transformer):
            result = model_call()
        self._end_dense(record)
        self._say_whose_steps(place)
        return result

    def _begin_dense(self, place: Place, device: torch.device) -> StepRecord:
        record = StepRecord(
            place.step,
            place.steps,
            place.branch,
            Action.DENSE,
            transformer=self._name,
        )
        self._report.begin(place.generation, record)
        record.timer = StepTimer(device)
        return record

    def _end_dense(self, record: StepRecord) -> None:
        if isinstance(record.timer, StepTimer):
            record.timer.stop()
        call = LoggedCall(record.generation, record.step, record.branch, Action.DENSE)
        self.loop.log.append(call)

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        """Within: a call. An error frees the caches, and ends the other processes' calls."""
        with self.turn.only(type(self.transformer).__name__):
            outer = self.sparse.is_calling
            self.sparse.is_calling = True
            try:
                yield
            except BaseException as error:
                self._report.fail(error)
                try:
                    if self.team is not None:
                        self.team.failed(error, self.device)
                finally:
                    self.reset()
                raise
            finally:
                self.sparse.is_calling = outer

    # The position of a call.

    def why_unknown(self, arguments: Arguments) -> tuple[str, str] | None:
        """Return why the step of a call is not known, and what would help; None if it is."""
        reader = self.sparse.reader

        def read_in(schedule: Any) -> float:
            return reader.scheduled_timestep(reader.own_timestep(arguments), schedule)

        self._is_scheduled = self.loop.is_scheduled(read_in)
        row, _ = reader.row_of_loop()
        if self._is_scheduled or self.named_position.get("step_index", row) is not None:
            return None
        return reasons.UNKNOWN_LOOP if self.loop.kind == "unknown" else reasons.OTHER_TIMESTEP

    def _locate(self, arguments: Arguments) -> Place:
        """Return the position of a call whose step is known; see `why_unknown`."""
        loop = self.loop
        reader = self.sparse.reader
        named = self.named_position
        scheduler = loop.scheduler if self._is_scheduled else None
        check_scheduler(scheduler)
        schedule = getattr(scheduler, "timesteps", None)
        row, rows = reader.row_of_loop()
        step = named.get("step_index", row)
        branch = named.get("name") or loop.branch()

        def read() -> float:
            timestep = loop.timestep()
            if timestep is None:
                return reader.scheduled_timestep(reader.own_timestep(arguments), schedule)
            return timestep

        place = self._tracker.locate(
            branch=None if branch is None else branch.removeprefix(PREDICTION),
            step_index=scheduler_step(scheduler) if step is None else step,
            steps=named.get("num_inference_steps", rows),
            timestep=read,
            schedule=schedule,
            unnamed_branch=loop.unnamed_branch,
        )
        loop.note_uncorrected(place.step)
        if not loop.correction.follows(loop.scheduler):
            loop.follow_schedulers()
        return place

    def _say_whose_steps(self, place: Place) -> None:
        """Report what a call that names its step, and not the scheduler, leaves unknown."""
        plan = self.sparse.session.plan
        if self._is_scheduled or plan is None or not wants_sparse(plan.config):
            return
        is_counted = place.steps is not None
        self._report.add(reasons.times_unknown() if is_counted else reasons.steps_unknown())

    # Guidance.

    def branches(self) -> int:
        """Return the guidance branches that the generation is known to have on this process."""
        if self.sparse.reader.branches is not None:
            return self.sparse.reader.branches
        if self._guidance is not None:
            return 1
        branches = self.loop.branches()
        if branches is not None:
            return branches
        guidance = self.sparse.family.guidance
        guided = 1 if self._is_guided() and not guidance.in_batch else 0
        return 1 + guided + guidance.further_branches((self.loop.arguments or {}).get)

    def _is_guided(self) -> bool:
        """Return whether each step also computes without the prompt, as far as the loop tells."""
        branches = self.loop.branches()
        arguments = self.loop.arguments
        if branches is None:
            guidance = self.sparse.family.guidance
            return arguments is not None and guidance.is_guided(self.loop.pipe, arguments)
        return branches > 1

    @property
    def _guides_in_batch(self) -> bool:
        """True if the pipeline makes both branches halves of a batch: guiders never do."""
        return self.sparse.family.guidance.in_batch and self.loop.branches() is None

    def _has_guidance_ended(self) -> bool:
        """Return whether the pipeline guided in this generation, and now says that it does not."""
        if self._guides_in_batch:
            return False
        guided = self._is_guided()
        if guided:
            self.generation.was_guided = True
        return not guided and self.generation.was_guided

    def _guided_layout(self, arguments: Arguments) -> ModelLayout:
        """Return the sizes of a call, and how many guidance branches its batch holds.

        The first call tells: some pipelines change the scale later and go on to compute both, and
        skip-layer guidance is a call of its own with the smaller batch.
        """
        layout = self.sparse.reader.layout(arguments)
        generation = self.generation
        if self._guides_in_batch and not generation.has_read_batch:
            generation.has_read_batch = True
            guided = self._is_guided() and layout.batch % 2 == 0
            generation.guided_batch = layout.batch if guided else None
        return replace(layout, guided_in_batch=2 if layout.batch == generation.guided_batch else 1)

    # The end of a generation.

    def pipeline_ended(self) -> None:
        """End the generation, unless a pipeline in a callback ended: the one around it goes on."""
        if not self.loop.is_suspended:
            self.finish_generation()

    def reset(self) -> None:
        """Forget the generation in progress and free its caches."""
        self._skip.reset()
        self.sparse.session.reset(stuck=self.team is not None and self.team.stuck)

    def finish_generation(self) -> None:
        """End the generation: its caches are freed, and the next call starts another one."""
        self.reset()
        self._tracker.finish()


def _form_of(place: Place, layout: ModelLayout) -> CallForm:
    """Return what calls have in common of which one may reuse the output of the other."""
    of_loop = place.steps, place.first, place.corrects
    return CallForm((layout.without_prompts, *of_loop), (layout, *of_loop))
