"""The plan: which action each layer takes at each step. Pure, printable, comparable."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from chipsparse.config import (
    PARTS,
    Action,
    Actions,
    ConfigError,
    Dense,
    LayerPart,
    Part,
    SparsityConfig,
)
from chipsparse.config.schedule_forms import EVERY_BRANCH
from chipsparse.layout import ModelLayout
from chipsparse.skip.timetable import Run, Schedule, form_of
from chipsparse.skip.why import forecast_text, schedule_text

CACHED = (Action.SPARSE, Action.SKIP)  # they read what others recorded


@dataclass(frozen=True)
class SparsityPlan:
    """The meaning of a config for one model and number of steps.

    Raises `ConfigError` if the config names a layer that the model does not have.
    """

    config: SparsityConfig  # what the user asked for
    layout: ModelLayout  # the model's sizes
    steps: int | None = None  # number of denoising steps, or None where the pipeline does not say
    first: int = 0  # the first of them that runs
    corrects: bool = True  # the scheduler lets skipped steps be corrected
    sparse_cost: float | None = 0.0  # see `Run`
    branch: str = EVERY_BRANCH  # whose actions these are, where branches have lists of their own

    def __post_init__(self) -> None:
        count = self.layout.layers
        for place, budget in enumerate(self.config.layers):
            if budget.last >= count:
                raise ConfigError(
                    f"layers[{place}].index: names layer {budget.last}, but this model has "
                    f"{count} layers, 0 to {count - 1}",
                )

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of all branches."""
        return Schedule(self.config.schedule, Run(self.steps, self.first, self.sparse_cost))

    @property
    def corrects_any(self) -> bool:
        """True where skipped steps are corrected: scheduler and config allow it, and some exist."""
        return self.corrects and self.config.schedule.correct and self.schedule.skips_any

    @cached_property
    def step_actions(self) -> tuple[Action, ...]:
        """The planned action of every step from 0 on, for the layers that may be sparse."""
        actions = self.schedule.actions(self.branch)
        if self.has_sparse_layers:
            return actions
        return tuple(action if action is Action.SKIP else Action.DENSE for action in actions)

    def step_action(self, step: int) -> Action:
        """Return the planned action of a step, from 0; later steps repeat the last one."""
        return self.step_actions[min(step, len(self.step_actions) - 1)]

    @property
    def sparse_steps(self) -> int:
        """The number of planned sparse steps among those that run."""
        return self.step_actions[self.first :].count(Action.SPARSE)

    @cached_property
    def dense(self) -> Mapping[LayerPart, str]:
        """The reason why the config keeps a part dense at every step, by layer and part."""
        reasons = {}
        for (layer, part), share in self._shares.items():
            if not getattr(self.config, part).is_sparse:
                reasons[layer, part] = f"{part}.density is dense"
            elif share == "dense":
                reasons[layer, part] = "layers names it dense"
        return reasons

    @cached_property
    def _shares(self) -> Mapping[LayerPart, float | Dense]:
        """The wish of the config for each part."""
        shares: dict[LayerPart, float | Dense] = {
            (layer, part): getattr(self.config, part).density
            for part in PARTS
            for layer in range(self.layout.layers)
        }
        for budget in self.config.layers:
            for layer, part in itertools.product(itertools.chain(*budget.ranges()), PARTS):
                share = getattr(budget, part)
                if share is not None:
                    shares[layer, part] = share
        return shares

    def is_sparse(self, layer: int, part: Part) -> bool:
        """Return True where a layer's attention or MLP runs sparse if the schedule says so."""
        return (layer, part) not in self.dense

    def density(self, layer: int, part: Part) -> float | None:
        """Return the share of columns or neurons that a layer keeps by score; None: dense."""
        share = self._shares[layer, part]
        return None if (layer, part) in self.dense or share == "dense" else share

    @property
    def has_sparse_layers(self) -> bool:
        """True unless the config keeps every part of every layer dense."""
        return len(self.dense) < len(self._shares)

    def is_dense(self) -> bool:
        """Return True where no branch ever uses a cache, so that nothing need be recorded."""
        lists = self.schedule.timetable.by_branch.values()
        any_sparse = any(Action.SPARSE in actions[self.first :] for actions in lists)
        return not (any_sparse and self.has_sparse_layers)

    def taken(self, step: int, recorded: Action | None) -> Action:
        """Return the effective action of a guidance branch at a step, from 0.

        The plan's action is raised to a fuller one where its inputs are missing: the first call of
        a branch is DENSE, and a sparse step is a REFRESH where there was none before. No step is a
        refresh where no sparse step reads what it would record, unless `Actions` list it and sparse
        ones. ``recorded`` is None at first, DENSE before the first refresh of the branch, and
        REFRESH after it; see `recorded_after`.
        """
        action = self.step_action(step)
        if recorded is None:
            return Action.DENSE
        if self.sparse_steps == 0:
            return action if action is Action.SKIP else Action.DENSE
        if action is Action.SPARSE and recorded is not Action.REFRESH:
            action = Action.REFRESH
        return Action.DENSE if action is Action.REFRESH and not self._is_read(step) else action

    def _is_read(self, step: int) -> bool:
        """True where a sparse step comes before the next planned refresh."""
        form = form_of(self.config.schedule.form, self.branch, self.sparse_cost)
        if isinstance(form, Actions):  # what is listed is done, as where refreshes are timed
            return True
        later = self.step_actions[step + 1 :]
        readers = (action for action in later if action in (Action.SPARSE, Action.REFRESH))
        return next(readers, None) is Action.SPARSE

    def actions(self, first: int = 0) -> list[Action]:
        """Return a branch's actions from its first step on; the number of steps must be known."""
        assert self.steps is not None
        actions: list[Action] = []
        recorded = None
        for step in range(first, self.steps):
            actions.append(self.taken(step, recorded))
            recorded = recorded_after(actions[-1], recorded)
        return actions

    def attention_keep_count(self, layer: int) -> int:
        """Return the number of columns that a query block keeps by score and by static rules."""
        return _count(self.density(layer, "attention"), self.layout.tokens)

    def mlp_keep_count(self, layer: int) -> int:
        """Return the number of neurons that a layer keeps by score; all where it is dense."""
        return _count(self.density(layer, "mlp"), self.layout.kind(layer).intermediate_size)

    def describe(self) -> str:
        """Return one line: the list of full steps and what is between them, in words.

        Without a list it has the run lengths of the actions: ``1 dense, 1 refresh, 9 sparse``.
        """
        schedule = self.schedule
        text = schedule_text(schedule, sparse=self.has_sparse_layers, corrects=self.corrects)
        if text is not None:
            return text
        if self.steps is None:
            return "number of steps unknown"
        branches = schedule.timetable.by_branch
        texts = {branch: replace(self, branch=branch)._run_lengths() for branch in branches}
        if len(texts) == 1:
            return texts[EVERY_BRANCH]
        return "; ".join(f"{branch}: {text}" for branch, text in texts.items())

    def _run_lengths(self) -> str:
        runs = itertools.groupby(self.actions())
        text = ", ".join(f"{len(list(group))} {action.value}" for action, group in runs)
        forecast = forecast_text(self.schedule)
        skips = self.schedule.skips_any
        return f"{text}; skipped ones{forecast}" if skips and forecast else text


def recorded_after(action: Action, recorded: Action | None) -> Action | None:
    """Return what a branch has recorded after an effective action; see `SparsityPlan.taken`."""
    if action in CACHED or (action is Action.DENSE and recorded is not None):
        return recorded
    return action


def _count(fraction: float | None, total: int) -> int:
    """Return a share of the total; all of it where the layer is dense (None)."""
    return total if fraction is None else min(total, round(fraction * total))
