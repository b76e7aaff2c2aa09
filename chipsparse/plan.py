"""The plan: which action each layer takes at each step. Pure, printable, comparable."""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass, replace

from chipsparse.config import SparsityConfig
from chipsparse.layout import ModelLayout


class Action(str, enum.Enum):
    """What one layer computes at one step.

    DENSE records the softmax constants, REFRESH also chooses columns and fills the caches, SPARSE
    computes only the kept columns and neurons, SKIP reuses the transformer's last output.
    """

    DENSE = "dense"
    REFRESH = "refresh"
    SPARSE = "sparse"
    SKIP = "skip"

    __str__ = str.__str__


# Actions that read what others recorded.
CACHED = (Action.SPARSE, Action.SKIP)


@dataclass(frozen=True)
class SparsityPlan:
    """What a config means for one model and number of steps.

    Attributes:
        config: what the user asked for.
        layout: the model's sizes.
        steps: number of denoising steps, or None where the pipeline does not say.
    """

    config: SparsityConfig
    layout: ModelLayout
    steps: int | None = None

    def differs_in_text_only(self, other: SparsityPlan) -> bool:
        """Whether two plans differ in their text tokens, as guidance branches do, or not at all."""
        layout = replace(other.layout, text_tokens=self.layout.text_tokens)
        return replace(other, layout=layout) == self

    def step_action(self, step: int) -> Action:
        """The action of a step (from 0) for the layers that may be sparse."""
        if not (self.config.attention.enabled or self.config.mlp.enabled):
            return Action.DENSE
        schedule = self.config.schedule
        if schedule.actions:
            return Action(schedule.actions[min(step, len(schedule.actions) - 1)])
        if step < schedule.warmup_steps - 1 or step in schedule.dense_steps:
            return Action.DENSE
        if self.steps is not None and step >= self.steps - schedule.final_dense_steps:
            return Action.DENSE
        since_warmup = step - (schedule.warmup_steps - 1)
        if since_warmup == 0:
            return Action.REFRESH
        if step in schedule.skip_steps:
            return Action.SKIP
        if schedule.refresh_steps is not None:
            return Action.REFRESH if step in schedule.refresh_steps else Action.SPARSE
        return Action.REFRESH if since_warmup % schedule.refresh_every == 0 else Action.SPARSE

    def action(self, layer: int, step: int) -> Action:
        """The action of one layer at one step."""
        action = self.step_action(step)
        if layer < self.config.schedule.first_dense_layers and action is not Action.SKIP:
            return Action.DENSE
        return action

    def skips(self) -> bool:
        """Whether any step may reuse the transformer's last output."""
        schedule = self.config.schedule
        return bool(schedule.skip_steps) or "skip" in (schedule.actions or ())

    def is_dense(self) -> bool:
        """Whether no step ever uses a cache, so that nothing need be recorded."""
        steps = self.steps if self.steps is not None else 1000
        return not any(self.step_action(step) in CACHED for step in range(steps))

    def taken(self, step: int, recorded: Action | None) -> Action:
        """What a guidance branch really does at a step.

        The plan's action is raised to a fuller one where its inputs are missing: the first call of
        a branch is DENSE, and nothing is sparse before the first REFRESH. Nothing is recorded, and
        so no step is a refresh, where nothing will be read.

        Args:
            step: from 0.
            recorded: REFRESH after the branch's first refresh, DENSE before, None at first.
        """
        action = self.step_action(step)
        if recorded is None or self.is_dense():
            return Action.DENSE
        if action in CACHED and recorded is Action.DENSE:
            return Action.REFRESH
        return action

    def actions(self) -> list[Action]:
        """What a branch that starts with the first step does at each; the steps must be known."""
        assert self.steps is not None
        taken: list[Action] = []
        recorded = None
        for step in range(self.steps):
            taken.append(self.taken(step, recorded))
            if taken[-1] not in CACHED and recorded is not Action.REFRESH:
                recorded = taken[-1]
        return taken

    def attention_keep_count(self) -> int:
        """Key columns that each query group keeps by score and by static rules."""
        return _count(self.config.attention.keep_fraction, self.layout.tokens)

    def attention_random_count(self) -> int:
        """Further key columns that each query group keeps at random."""
        return _count(self.config.attention.random_fraction, self.layout.tokens)

    def mlp_keep_count(self, layer: int) -> int:
        """Neurons of a layer that each token group recomputes on a sparse step."""
        return _count(self.config.mlp.keep_fraction, self.layout.kind(layer).mlp_width)

    def describe(self) -> str:
        """One line: the run-length coded actions, as in ``1 dense, 1 refresh, 9 sparse, ...``."""
        if self.steps is None:
            return "number of steps unknown"
        runs = itertools.groupby(self.actions())
        return ", ".join(f"{len(list(group))} {action.value}" for action, group in runs)


def _count(fraction: float, total: int) -> int:
    return min(total, round(fraction * total))
