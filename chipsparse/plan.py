"""The plan: which action each layer takes at each step. Pure, printable, comparable."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from chipsparse.config import ConfigError, Part, SparsityConfig
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


NOT_RECORDED = "sparse steps are not launched as a CUDA graph"
# A transformer of longer sequences computes long enough for the host to keep ahead of it.
RECORDED_TOKENS = 16_384
# Actions that read what others recorded.
CACHED = (Action.SPARSE, Action.SKIP)


@dataclass(frozen=True)
class SparsityPlan:
    """What a config means for one model and number of steps.

    Attributes:
        config: what the user asked for.
        layout: the model's sizes.
        steps: number of denoising steps, or None where the pipeline does not say.

    Raises:
        ConfigError: if the config names a layer that the model does not have.
    """

    config: SparsityConfig
    layout: ModelLayout
    steps: int | None = None

    def __post_init__(self) -> None:
        count = self.layout.layers
        for place, budget in enumerate(self.config.layers):
            if budget.last >= count:
                raise ConfigError(
                    f"layers[{place}].layers: names layer {budget.last}, but this model has "
                    f"{count} layers, 0 to {count - 1}"
                )

    def differs_in_prompts_only(self, other: SparsityPlan) -> bool:
        """Whether two plans differ in text tokens and batch, as branches do, or not at all."""
        own = self.layout
        layout = replace(other.layout, text_tokens=own.text_tokens, batch=own.batch)
        return replace(other, layout=layout) == self

    def step_action(self, step: int) -> Action:
        """The action of a step (from 0) for the layers that may be sparse."""
        action = self._scheduled(step)
        if step in self.config.schedule.skip_steps and self._may_skip(step):
            return Action.SKIP
        if self.has_sparse_layers or action is Action.SKIP:
            return action
        return Action.DENSE

    def _scheduled(self, step: int) -> Action:
        """The action of a step if no list and no threshold skipped it."""
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
        if schedule.refresh_steps is not None:
            return Action.REFRESH if step in schedule.refresh_steps else Action.SPARSE
        return Action.REFRESH if since_warmup % schedule.refresh_every == 0 else Action.SPARSE

    def _may_skip(self, step: int) -> bool:
        """Whether a step is none of those that are always computed."""
        schedule = self.config.schedule
        return (
            not schedule.actions
            and step >= schedule.warmup_steps
            and self._scheduled(step) is not Action.DENSE
        )

    def action(self, layer: int, step: int, part: Part) -> Action:
        """The action of one layer's attention or MLP at one step."""
        action = self.step_action(step)
        if not self.is_sparse(layer, part) and action is not Action.SKIP:
            return Action.DENSE
        return action

    def keep_fraction(self, layer: int, part: Part) -> float | None:
        """The share of columns or neurons that a layer keeps by score; None: it is never sparse."""
        return self._keep_fractions[part][layer]

    def is_sparse(self, layer: int, part: Part) -> bool:
        """Whether a layer's attention or MLP runs sparse where the schedule says so."""
        return self.keep_fraction(layer, part) is not None

    def why_dense(self, layer: int, part: Part) -> str | None:
        """What of the config keeps a layer's attention or MLP dense at every step, or None."""
        if self.is_sparse(layer, part):
            return None
        config, first = self.config, self.config.schedule.first_dense_layers
        if not (config.attention if part == "attention" else config.mlp).enabled:
            return f"{part}.enabled is false"
        if layer < first:
            return f"schedule.first_dense_layers is {first}"
        return "layers names it dense"

    @cached_property
    def _keep_fractions(self) -> dict[Part, list[float | None]]:
        return {"attention": self._resolve("attention"), "mlp": self._resolve("mlp")}

    @cached_property
    def has_sparse_layers(self) -> bool:
        """Whether the attention or MLP of any layer runs sparse where the schedule says so."""
        layers = range(self.layout.layers)
        return any(self.is_sparse(layer, part) for part in self._keep_fractions for layer in layers)

    def _resolve(self, part: Part) -> list[float | None]:
        config = self.config.attention if part == "attention" else self.config.mlp
        count = self.layout.layers
        if not config.enabled:
            return [None] * count
        fractions: list[float | None] = [config.keep_fraction] * count
        for budget in self.config.layers:
            share = getattr(budget, part)
            if share is not None:
                for layers in budget.ranges:
                    for layer in layers:
                        fractions[layer] = None if share == "dense" else share
        first = min(count, self.config.schedule.first_dense_layers)
        return [None] * first + fractions[first:]

    def skips(self) -> bool:
        """Whether any step may reuse the transformer's last output."""
        schedule = self.config.schedule
        listed = bool(schedule.skip_steps) or "skip" in (schedule.actions or ())
        return listed or self.skips_by_threshold()

    def skips_by_threshold(self) -> bool:
        """Whether steps may be skipped that only the generation itself decides on."""
        schedule = self.config.schedule
        return schedule.skip_threshold is not None and not schedule.actions

    def may_skip_by_threshold(self, step: int, recorded: Action | None) -> bool:
        """Whether the threshold may skip a step of a guidance branch.

        Args:
            step: from 0.
            recorded: see `taken`; what a branch has yet to record is not skipped.
        """
        recording = recorded is None or (recorded is Action.DENSE and not self.is_dense())
        listed = step in self.config.schedule.skip_steps
        return self.skips_by_threshold() and self._may_skip(step) and not listed and not recording

    def is_dense(self) -> bool:
        """Whether no layer ever uses a cache, so that nothing need be recorded."""
        if not self.has_sparse_layers:
            return True
        steps = self.steps if self.steps is not None else 1000
        return not any(self.step_action(step) in CACHED for step in range(steps))

    def records_steps(self) -> bool:
        """Whether sparse steps are to be recorded as CUDA graphs, where the device has them."""
        mode = self.config.cuda_graphs
        short = self.layout.batch * self.layout.tokens <= RECORDED_TOKENS
        wanted = mode == "always" or (mode == "auto" and short)
        return wanted and not self.is_dense() and self._why_steps_differ() is None

    def _why_steps_differ(self) -> str | None:
        """What makes sparse steps launch other kernels one time than another, or None."""
        config = self.config
        if config.guard.bound is not None:
            return "guard.bound lets layers refresh early"
        if config.attention.enabled and config.attention.forecast > 0:
            return "attention.forecast grows with every step"
        if config.mlp.enabled and config.mlp.reselect_every > 1:
            return f"mlp.reselect_every is {config.mlp.reselect_every}"
        return None

    def taken(self, step: int, recorded: Action | None) -> Action:
        """What a guidance branch really does at a step.

        The plan's action is raised to a fuller one where its inputs are missing: the first call of
        a branch is DENSE, nothing is sparse before the first REFRESH, and a refresh that was
        skipped takes place before the next sparse step. Nothing is recorded, and so no step is a
        refresh, where nothing will be read.

        Args:
            step: from 0.
            recorded: what the branch has recorded: None at first, DENSE before its first refresh,
                REFRESH after it, SKIP where a later one was skipped; see `recorded_after`.
        """
        action = self.step_action(step)
        if recorded is None:
            return Action.DENSE
        if self.is_dense():
            return action if action is Action.SKIP else Action.DENSE
        if action in CACHED and recorded is Action.DENSE:
            return Action.REFRESH
        if action is Action.SPARSE and recorded is Action.SKIP:
            return Action.REFRESH
        return action

    def recorded_after(self, step: int, action: Action, recorded: Action | None) -> Action | None:
        """What a branch has recorded once it took an action at a step; see `taken`."""
        if action is Action.SKIP:
            due = recorded is Action.REFRESH and self._scheduled(step) is Action.REFRESH
            return Action.SKIP if due else recorded
        if action is Action.SPARSE or (action is Action.DENSE and recorded is not None):
            return recorded
        return action

    def actions(self, first: int = 0) -> list[Action]:
        """What a branch does at each step from the first one that it is called at.

        The number of steps must be known. Steps that only the threshold skips are not known, and
        are given with what they compute.
        """
        assert self.steps is not None
        return list(itertools.islice(self.actions_from(first), self.steps - first))

    def actions_from(self, first: int) -> Iterator[Action]:
        """As `actions`, without an end."""
        recorded = None
        for step in itertools.count(first):
            yield (taken := self.taken(step, recorded))
            recorded = self.recorded_after(step, taken, recorded)

    def remarks(self) -> list[str]:
        """What else a user should know: what of the config cannot be done."""
        return [*self._unskipped_steps(), *self._unrecorded_steps()]

    def _unrecorded_steps(self) -> list[str]:
        reason = self._why_steps_differ()
        if self.config.cuda_graphs != "always" or reason is None:
            return []
        return [f"{NOT_RECORDED}: {reason}"]

    def _unskipped_steps(self) -> list[str]:
        if self.steps is None:
            return []
        listed = self.config.schedule.skip_steps
        taken = self.actions()
        computed = [step for step in listed if step < self.steps and taken[step] is not Action.SKIP]
        if self.config.schedule.actions or not computed:
            return []
        return [
            f"skip_steps {', '.join(map(str, computed))} are computed: no step is skipped in the "
            f"warm-up (the first {self.config.schedule.warmup_steps}), in dense_steps, in "
            "final_dense_steps or before the first refresh"
        ]

    def attention_keep_count(self, layer: int) -> int:
        """Key columns that each query group of a layer keeps by score and by static rules."""
        return _count(self.keep_fraction(layer, "attention"), self.layout.tokens)

    def attention_random_count(self) -> int:
        """Further key columns that each query group keeps at random."""
        return _count(self.config.attention.random_fraction, self.layout.tokens)

    def mlp_keep_count(self, layer: int) -> int:
        """Neurons of a layer that each token group recomputes on a sparse step."""
        return _count(self.keep_fraction(layer, "mlp"), self.layout.kind(layer).mlp_width)

    def describe(self) -> str:
        """One line: the run-length coded actions, as in ``1 dense, 1 refresh, 9 sparse, ...``."""
        if self.steps is None:
            return "number of steps unknown"
        runs = itertools.groupby(self.actions())
        text = ", ".join(f"{len(list(group))} {action.value}" for action, group in runs)
        return f"{text}; {self.threshold_text()}" if self.skips_by_threshold() else text

    def threshold_text(self) -> str:
        """What the threshold does to the actions; only where there is one."""
        schedule = self.config.schedule
        return (
            f"of the sparse and refresh ones, those are skipped that are predicted to change the "
            f"output by less than {100 * (schedule.skip_threshold or 0):g}%, at most "
            f"{schedule.max_skips} in a row: how many is not known beforehand"
        )


def _count(fraction: float | None, total: int) -> int:
    """So many of all; all where the layer is dense."""
    return total if fraction is None else min(total, round(fraction * total))
