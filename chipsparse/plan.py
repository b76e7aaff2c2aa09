"""The plan: which action each layer takes at each step. Pure, printable, comparable."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

from chipsparse.config import PARTS, ConfigError, Part, SparsityConfig
from chipsparse.layout import ModelLayout
from chipsparse.schedule.schedule import MANY_STEPS, Schedule
from chipsparse.schedule.schedule import Action as Action
from chipsparse.schedule.text import forecast_text, list_text
from chipsparse.without_effect import without_effect

NOT_CAPTURED = "sparse steps are not captured as a CUDA graph"
# Measured, rounding included: as fast with 4,352 tokens, 1.1 times with 6,144, 1.2 with 8,192.
FP8_PAYS_TOKENS = 5_000
# Actions that read what others recorded.
CACHED = (Action.SPARSE, Action.SKIP)


@dataclass(frozen=True)
class SparsityPlan:
    """The meaning of a config for one model and number of steps.

    Attributes:
        config: what the user asked for.
        layout: the model's sizes.
        steps: number of denoising steps, or None where the pipeline does not say.
        first: the first of them that runs.
        corrects: see `Schedule`.

    Raises:
        ConfigError: if the config names a layer that the model does not have.
    """

    config: SparsityConfig
    layout: ModelLayout
    steps: int | None = None
    first: int = 0
    corrects: bool = True

    def __post_init__(self) -> None:
        count = self.layout.layers
        for place, budget in enumerate(self.config.layers):
            if budget.last >= count:
                raise ConfigError(
                    f"layers[{place}].layers: names layer {budget.last}, but this model has "
                    f"{count} layers, 0 to {count - 1}"
                )

    @cached_property
    def schedule(self) -> Schedule:
        """The actions of the steps, whatever the layers make of them."""
        return Schedule(self.config.schedule, self.steps, self.first, self.corrects)

    @property
    def corrects_any(self) -> bool:
        """True where skipped steps are put right."""
        return self.corrects and self.config.schedule.correct and self.schedule.skips_any

    def differs_in_prompts_only(self, other: SparsityPlan) -> bool:
        """Return True where two plans differ in text tokens and samples at most, as branches do."""
        names = ("text_tokens", "batch", "guided_in_batch", "share", "rows_before", "samples")
        of_prompts = {name: getattr(self.layout, name) for name in names}
        return replace(other, layout=replace(other.layout, **of_prompts)) == self

    def step_action(self, step: int) -> Action:
        """Return the action of a step (from 0) for the layers that may be sparse."""
        action = self.schedule.action(step)
        return action if self.has_sparse_layers or action is Action.SKIP else Action.DENSE

    def action(self, layer: int, step: int, part: Part) -> Action:
        """Return the action of one layer's attention or MLP at one step."""
        action = self.step_action(step)
        if not self.is_sparse(layer, part) and action is not Action.SKIP:
            return Action.DENSE
        return action

    def density(self, layer: int, part: Part) -> float | None:
        """Return the share of columns or neurons that a layer keeps by score; None: dense."""
        return self._densities[part][layer]

    def is_sparse(self, layer: int, part: Part) -> bool:
        """Return True where a layer's attention or MLP runs sparse if the schedule says so."""
        return self.density(layer, part) is not None

    def why_dense(self, layer: int, part: Part) -> str | None:
        """Return what of the config keeps a part dense at every step; None where nothing does."""
        if self.is_sparse(layer, part):
            return None
        config, first = self.config, self.config.schedule.first_dense_layers
        if not (config.attention if part == "attention" else config.mlp).is_sparse:
            return f"{part}.density is dense"
        if layer < first:
            return f"schedule.first_dense_layers is {first}"
        return "layers names it dense"

    @cached_property
    def _densities(self) -> dict[Part, list[float | None]]:
        return {part: self._resolve(part) for part in PARTS}

    @cached_property
    def has_sparse_layers(self) -> bool:
        """True where the attention or MLP of any layer may run sparse."""
        densities = itertools.chain(*self._densities.values())
        return any(density is not None for density in densities)

    def _resolve(self, part: Part) -> list[float | None]:
        config = self.config.attention if part == "attention" else self.config.mlp
        count = self.layout.layers
        if config.density == "dense":
            return [None] * count
        densities: list[float | None] = [config.density] * count
        for budget in self.config.layers:
            share = getattr(budget, part)
            if share is not None:
                for layers in budget.ranges:
                    for layer in layers:
                        densities[layer] = None if share == "dense" else share
        first = min(count, self.config.schedule.first_dense_layers)
        return [None] * first + densities[first:]

    def is_dense(self) -> bool:
        """Return True where no layer ever uses a cache, so that nothing need be recorded."""
        return not self._has_sparse_steps

    @cached_property
    def _has_sparse_steps(self) -> bool:
        return self.has_sparse_layers and any(
            self.step_action(step) is Action.SPARSE for step in self.schedule.known_steps
        )

    def captures_steps(self) -> bool:
        """Return True where sparse steps can be captured as CUDA graphs if the device has them."""
        return self.config.cuda_graphs != "never" and not self.is_dense()

    def sparse_steps_from(self, step: int) -> int:
        """Return the number of sparse steps from a step on, as far as they are known before."""
        steps = self.schedule.known_steps[step:]
        return [self.step_action(step) for step in steps].count(Action.SPARSE)

    def taken(self, step: int, recorded: Action | None) -> Action:
        """Return the action that a guidance branch takes at a step.

        The plan's action is raised to a fuller one where its inputs are missing: the first call of
        a branch is DENSE, and a sparse step is a REFRESH where there was none before. No step is a
        refresh where no sparse step reads what it would record, unless ``schedule.actions`` lists
        it and sparse ones.

        Args:
            step: from 0.
            recorded: what the branch has recorded: None at first, DENSE before its first refresh,
                REFRESH after it; see `recorded_after`.
        """
        action = self.step_action(step)
        if recorded is None:
            return Action.DENSE
        if self.is_dense():
            return action if action is Action.SKIP else Action.DENSE
        if action is Action.SPARSE and recorded is not Action.REFRESH:
            action = Action.REFRESH
        return Action.DENSE if action is Action.REFRESH and not self._is_read(step) else action

    def _is_read(self, step: int) -> bool:
        """True where a sparse step comes before the next planned refresh."""
        if self.config.schedule.actions:  # what is listed is done, as where refreshes are timed
            return True
        end = step + MANY_STEPS if self.steps is None else self.steps
        later = map(self.step_action, range(step + 1, end))
        readers = (action for action in later if action in (Action.SPARSE, Action.REFRESH))
        return next(readers, None) is Action.SPARSE

    def recorded_after(self, step: int, action: Action, recorded: Action | None) -> Action | None:
        """Return what a branch has recorded once it took an action at a step; see `taken`."""
        if action in CACHED or (action is Action.DENSE and recorded is not None):
            return recorded
        return action

    def actions(self, first: int = 0, end: int | None = None) -> list[Action]:
        """Return the actions of a branch from the first step that it is called at.

        Args:
            first: that step.
            end: behind the last step; None for the number of steps, which must be known then.
        """
        end = self.steps if end is None else end
        assert end is not None
        actions: list[Action] = []
        recorded = None
        for step in range(first, end):
            actions.append(self.taken(step, recorded))
            recorded = self.recorded_after(step, actions[-1], recorded)
        return actions

    def notes(self, *, on_cpu: bool = False) -> list[str]:
        """Return a sentence for whatever of the config cannot be done.

        Args:
            on_cpu: True where the generation runs on a CPU.
        """
        notes = [*without_effect(self, on_cpu=on_cpu), *self.schedule.notes()]
        if self.steps is not None and self.schedule.full_steps is not None:
            notes += [
                f"step {step} is computed in full: it was to be sparse, and the only full step "
                "before it is the first one, which cannot be a refresh"
                for step, action in enumerate(self.actions())
                if action is not Action.SPARSE and self.step_action(step) is Action.SPARSE
            ]
        if self.config.attention.precision == "fp8" and self.layout.tokens < FP8_PAYS_TOKENS:
            notes.append(
                f"attention.precision: with {self.layout.tokens:,} tokens attention is slower in 8 "
                f"bits than in 16 (on an H200 they pay from about {FP8_PAYS_TOKENS:,} on)"
            )
        return notes

    def attention_keep_count(self, layer: int) -> int:
        """Return the number of columns that a query block keeps by score and by static rules."""
        return _count(self.density(layer, "attention"), self.layout.tokens)

    def attention_random_count(self) -> int:
        """Return the number of further columns that a query block keeps at random."""
        return _count(self.config.attention.random_fraction, self.layout.tokens)

    def mlp_keep_count(self, layer: int) -> int:
        """Return the number of neurons that a token block recomputes on a sparse step."""
        return _count(self.density(layer, "mlp"), self.layout.kind(layer).intermediate_size)

    def describe(self) -> str:
        """Return one line: the list of full steps and what is between them, in words.

        Without a list it has the run lengths of the actions: ``1 dense, 1 refresh, 9 sparse``.
        """
        schedule = self.schedule
        if schedule.full_steps is not None:
            text = list_text(schedule, sparse=self.has_sparse_layers)
        elif self.steps is None:
            return "number of steps unknown"
        else:
            runs = itertools.groupby(self.actions())
            text = ", ".join(f"{len(list(group))} {action.value}" for action, group in runs)
            if schedule.skips_any and (forecast := forecast_text(schedule)):
                text += f"; skipped ones{forecast}"
        return text


def _count(fraction: float | None, total: int) -> int:
    """Return a share of the total; all of it where the layer is dense (None)."""
    return total if fraction is None else min(total, round(fraction * total))
