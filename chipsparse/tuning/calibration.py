"""A session that computes everything exactly, and measures on the way what sparsity would cost."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from chipsparse import attention, mlp
from chipsparse.attention import AttentionBudget
from chipsparse.cache_kinds import PARTS, Part
from chipsparse.cache_store import CacheStore
from chipsparse.config import SparsityConfig
from chipsparse.error_guard import checked_rows
from chipsparse.layout import ModelLayout
from chipsparse.memory_plan import MemoryDemand
from chipsparse.mlp import MLPWeights
from chipsparse.offload import OffloadPool
from chipsparse.plan import Action
from chipsparse.report import GenerationReport
from chipsparse.session import Session
from chipsparse.step import StepContext
from chipsparse.tuning.layer_times import attention_times, mlp_times
from chipsparse.tuning.probes import (
    BUDGETS,
    HEAD_GROUPS,
    LAYER_GROUPS,
    SAMPLED_GROUPS,
    SKIP_AGES,
    ProbeSteps,
)
from chipsparse.tuning.recording import Place, Recording, layout_to_json, rounded
from chipsparse.tuning.sampled_layers import (
    SampledAttention,
    SampledMLP,
    SampledRows,
    head_group_errors,
    relative_error,
)

# Everything that would keep parts dense or steps from being measured.
MEASURED_IN_FULL: dict[str, Any] = {
    "schedule.actions": ["dense", "refresh", "sparse"],
    "schedule.first_dense_layers": 0,
    "guard.bound": None,
    "layers": (),
    "where_slower": "sparse",
}


class NoCaches(CacheStore):
    """Stands for the caches of a session that keeps none: every branch is admitted to nothing."""

    def __contains__(self, branch: str) -> bool:
        return True

    def start(self, branch: str, kinds: frozenset[str]) -> None:
        """Nothing to fetch."""

    def finish(self, branch: str) -> None:
        """Nothing to free."""


class ExactSession(Session):
    """A session whose layers compute what the model computes, in the token order of the config."""

    def __init__(
        self,
        config: SparsityConfig,
        report: GenerationReport,
        pool: OffloadPool | None = None,
        name: str = "transformer",
    ) -> None:
        super().__init__(config.override(MEASURED_IN_FULL), report, pool, name)
        self._caches = NoCaches(self._pool, report.note, report.fall_back)

    def begin(
        self,
        context: StepContext,
        layout: ModelLayout,
        device: torch.device,
        demand: Callable[[], MemoryDemand] = MemoryDemand,
        latents: torch.Tensor | None = None,
    ) -> Action:
        """Opens a transformer call, which computes everything."""
        super().begin(context, layout, device, demand, latents)
        _, _, record = self._open_call()
        record.action = Action.DENSE
        return record.action

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        unpatched: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """The attention of the model."""
        return unpatched()

    def mlp(
        self,
        layer: int,
        hidden: torch.Tensor,
        weights: MLPWeights,
        *,
        addend: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The feed-forward layer of the model, plus the addend."""
        return mlp.dense_step(
            None,
            hidden,
            weights,
            config=self.config.mlp,
            backend=self._backend,
            addend=None if addend is None else addend(),
        )


class CalibrationSession(ExactSession):
    """Measures the error of every layer at several budgets and ages; its outputs are exact.

    At an *anchor* step a sample of the rows of every layer gets columns and caches for each budget,
    as at a refresh. Some steps later what a sparse step would give is compared with the exact
    output. At a few steps the call is then repeated with the errors of some layers added to their
    outputs, to see how far they come; `watch` does that.

    Args:
        config: what is to be tuned.
        report: as of `Session`.
        pool: likewise.
        name: likewise.
        probes: steps to measure at.
        recording: where to write it down.
        turn: which of several calibrations this is, and
        turns: of how many: each looks at its share of the steps where single layers are disturbed.
    """

    def __init__(
        self,
        config: SparsityConfig,
        report: GenerationReport,
        pool: OffloadPool | None = None,
        name: str = "transformer",
        *,
        probes: ProbeSteps,
        recording: Recording,
        turn: int = 0,
        turns: int = 1,
    ) -> None:
        self._probes = probes
        self._recording = recording
        self._single_steps = probes.single(turn, turns)
        super().__init__(config, report, pool, name)

    def reset(self) -> None:
        """As `Session.reset`; what was recorded stays."""
        super().reset()
        self._attentions: dict[tuple[str, int], SampledAttention] = {}
        self._mlps: dict[tuple[str, int], SampledMLP] = {}
        # Errors of the sampled rows that can be passed on in the open call.
        self._passed_on: dict[tuple[Part, int], tuple[SampledRows, torch.Tensor, float]] = {}
        self._disturbed: frozenset[tuple[Part, int]] | None = None

    def begin(
        self,
        context: StepContext,
        layout: ModelLayout,
        device: torch.device,
        demand: Callable[[], MemoryDemand] = MemoryDemand,
        latents: torch.Tensor | None = None,
    ) -> Action:
        """Opens a transformer call, which computes everything."""
        action = super().begin(context, layout, device, demand, latents)
        self._passed_on = {}
        if not self._recording.layout:
            self._recording.layout = layout_to_json(layout)
        return action

    def end(self, output: torch.Tensor, *, is_last_branch: bool = False) -> None:
        """Closes the call; keeps its output and compares it with those before."""
        _, context, _ = self._open_call()
        outputs = self._recording.trajectory.outputs
        for age in SKIP_AGES:
            before = outputs.get((self.name, context.step - age, context.branch))
            if before is not None:
                change = relative_error(before.to(output.device), output)
                self._recording.skipped.append(
                    {
                        "step": context.step,
                        "branch": context.branch,
                        "age": age,
                        "change": rounded(change),
                    }
                )
        outputs[self._place] = output.to("cpu", copy=True)
        branches = {branch for _, _, branch in outputs}
        self._recording.branches = len(branches)
        super().end(output, is_last_branch=is_last_branch)

    @property
    def _place(self) -> Place:
        _, context, _ = self._open_call()
        return self.name, context.step, context.branch

    # Layers.

    def attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float | None,
        unpatched: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """The attention of the model; measures beside it."""
        exact = unpatched()
        if self._disturbed is not None:
            return self._disturb(exact, "attention", layer)
        if self.config.attention.enabled:
            self._measure_attention(layer, query, key, value, scale, unpatched, exact)
        return exact

    def _measure_attention(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        unpatched: Callable[[], torch.Tensor],
        exact: torch.Tensor,
    ) -> None:
        _, context, _ = self._open_call()
        step, probes = context.step, self._probes
        site = context.branch, layer
        if step + 1 in probes.anchors:
            if site not in self._attentions:
                self._attentions[site] = self._sampled_attention(layer, query, scale)
            self._attentions[site].record_constants(query, key, value)
        if site not in self._attentions:
            return
        sampled = self._attentions[site]
        for anchor in sampled.anchors(probes.measured(step)):
            outputs = sampled.outputs(anchor, query, key, value)
            rows = sampled.sample.of(exact)
            groups = min(HEAD_GROUPS, rows.shape[1])
            self._recording.errors.append(
                {
                    **self._error_entry("attention", layer, anchor, outputs, rows),
                    "head_error": rounded(
                        torch.stack([head_group_errors(each, rows, groups) for each in outputs])
                    ),
                }
            )
            self._pass_on("attention", layer, anchor, sampled.sample, outputs[0], rows)
        if step in probes.anchors:
            masses = sampled.refresh(step, query, key, value)
            self._recording.masses.append(
                {
                    "layer": layer,
                    "branch": context.branch,
                    "anchor": step,
                    "mass": rounded(masses),
                }
            )
        sampled.keep_only([*probes.alive(step + 1)])
        if self._times("attention", layer):
            budgets = self._budgets(layer, query.shape[2], query.device)
            timed = attention_times(
                query,
                key,
                value,
                config=self.config.attention,
                budgets=budgets[::2],
                scale=scale,
                backend=self._backend,
                unpatched=unpatched,
            )
            self._keep_times("attention", layer, timed)

    def mlp(
        self,
        layer: int,
        hidden: torch.Tensor,
        weights: MLPWeights,
        *,
        addend: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The feed-forward layer of the model, plus the addend; measures beside it."""
        exact = super().mlp(layer, hidden, weights, addend=addend)
        if self._disturbed is not None:
            return self._disturb(exact, "mlp", layer)
        if self.config.mlp.enabled:
            self._measure_mlp(layer, hidden, weights)
        return exact

    def _measure_mlp(self, layer: int, hidden: torch.Tensor, weights: MLPWeights) -> None:
        _, context, _ = self._open_call()
        step, probes = context.step, self._probes
        site = context.branch, layer
        keep_counts = [round(share * weights.up.shape[0]) for share in BUDGETS["mlp"]]
        if site not in self._mlps:
            sample = self._sample("mlp", layer, hidden.shape[1], self.config.mlp.group_rows)
            self._mlps[site] = SampledMLP(
                self.config.mlp, keep_counts, sample, backend=self._backend
            )
        sampled = self._mlps[site]
        for anchor in sampled.anchors(probes.alive(step)):
            outputs = sampled.outputs(anchor, hidden, weights)
            if anchor in probes.measured(step):
                rows = sampled.exact(hidden, weights)
                entry = self._error_entry("mlp", layer, anchor, outputs, rows)
                self._recording.errors.append(entry)
                self._pass_on("mlp", layer, anchor, sampled.sample, outputs[0], rows)
        if step in probes.anchors:
            sampled.refresh(step, hidden, weights)
        sampled.keep_only([*probes.alive(step + 1)])
        if self._times("mlp", layer):
            timed = mlp_times(
                hidden,
                weights,
                config=self.config.mlp,
                keep_counts=keep_counts[::2],
                backend=self._backend,
            )
            self._keep_times("mlp", layer, timed)

    # What layers are measured with.

    def _sample(self, part: Part, layer: int, tokens: int, rows: int) -> SampledRows:
        _, context, _ = self._open_call()
        rows = min(rows, tokens)
        seed = zlib.crc32(f"{self.config.seed} {context.branch} {layer} {part}".encode())
        starts = checked_rows(tokens, rows=rows, groups=SAMPLED_GROUPS, turn=0, seed=seed)
        return SampledRows(sorted(starts), rows)

    def _sampled_attention(
        self, layer: int, query: torch.Tensor, scale: float | None
    ) -> SampledAttention:
        config = self.config.attention
        tokens = query.shape[2]
        sample = self._sample("attention", layer, tokens, config.group_rows)
        return SampledAttention(
            config,
            self._budgets(layer, tokens, query.device, sample),
            sample,
            scale=scale,
            backend=self._backend,
            head_groups=min(HEAD_GROUPS, query.shape[1]),
        )

    def _budgets(
        self, layer: int, tokens: int, device: torch.device, sample: SampledRows | None = None
    ) -> list[AttentionBudget]:
        """What a refresh keeps at each budget, of all groups or of a sample of them."""
        plan, context, _ = self._open_call()
        config, text = self.config.attention, plan.layout.text_tokens
        static = attention.static_columns(
            tokens,
            config,
            text_tokens=text,
            text_first=plan.layout.text_first,
            device=device,
        )
        if sample is not None and static is not None and len(static) > 1:
            static = static[[first // config.group_rows for first in sample.starts]]
        return [
            AttentionBudget(
                keep_count=min(tokens, round(share * tokens)),
                random_count=plan.attention_random_count(),
                static_columns=static,
                seed=zlib.crc32(
                    f"{self.config.seed} {context.branch} {context.step} {layer}".encode()
                ),
                static_count=attention.static_count(tokens, config, text_tokens=text),
            )
            for share in BUDGETS["attention"]
        ]

    def _error_entry(
        self, part: Part, layer: int, anchor: int, outputs: list[torch.Tensor], exact: torch.Tensor
    ) -> dict[str, Any]:
        _, context, _ = self._open_call()
        return {
            "part": part,
            "layer": layer,
            "branch": context.branch,
            "anchor": anchor,
            "age": context.step - anchor,
            "error": rounded(torch.stack([relative_error(each, exact) for each in outputs])),
        }

    def _times(self, part: Part, layer: int) -> bool:
        """Whether this is the layer, step and branch at which its kind is timed."""
        plan, context, _ = self._open_call()
        if context.step != self._probes.disturbed[0]:
            return False
        kind, first = plan.layout.kind(layer), 0
        for each in plan.layout.kinds:
            if each.name == kind.name:
                break
            first += each.layers
        timed = {(entry["part"], entry["kind"]) for entry in self._recording.times}
        return layer == first + kind.layers // 2 and (part, kind.name) not in timed

    def _keep_times(self, part: Part, layer: int, times: dict[str, Any]) -> None:
        plan, _, _ = self._open_call()
        self._recording.times.append(
            {"part": part, "kind": plan.layout.kind(layer).name, "layer": layer, **times}
        )

    # How far errors come.

    def watch(self, transformer: torch.nn.Module) -> torch.utils.hooks.RemovableHandle:
        """Repeats calls of this transformer with errors passed on, at the steps for that."""

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self._context is not None and self._context.step in self._probes.disturbed:
                self._repeat(lambda: module.forward(*args, **kwargs)[0], output[0])

        return transformer.register_forward_hook(after, with_kwargs=True)

    def _repeat(self, forward: Callable[[], torch.Tensor], exact: torch.Tensor) -> None:
        _, context, _ = self._open_call()
        sites = list(self._passed_on)
        if not sites:
            return
        groups = [sites]
        if context.step in self._single_steps:
            groups += self._groups_of_layers(sites)
        for group in groups:
            self._disturbed = frozenset(group)
            try:
                changed = forward()
            finally:
                self._disturbed = None
            everything = len(group) == len(sites)
            if everything and group is sites:
                difference = (changed.float() - exact.float()).cpu()
                self._recording.trajectory.disturbances[self._place] = difference
            passed = sum(self._passed_on[site][2] ** 2 for site in group) ** 0.5
            self._recording.disturbed.append(
                {
                    "step": context.step,
                    "branch": context.branch,
                    "part": "all" if group is sites else group[0][0],
                    "layers": [layer for _, layer in group],
                    "passed": passed,
                    "change": rounded(relative_error(changed, exact)),
                }
            )

    def _groups_of_layers(self, sites: list[tuple[Part, int]]) -> list[list[tuple[Part, int]]]:
        """The sites of each part, neighbouring layers together where there are many."""
        groups = []
        for part in PARTS:
            own = sorted(site for site in sites if site[0] == part)
            size = -(-len(own) // LAYER_GROUPS) if own else 1
            groups += [own[first : first + size] for first in range(0, len(own), size)]
        return groups

    def _pass_on(
        self,
        part: Part,
        layer: int,
        anchor: int,
        sample: SampledRows,
        output: torch.Tensor,
        exact: torch.Tensor,
    ) -> None:
        """Keeps the error of the smallest budget, where it is to be passed on in this call."""
        _, context, _ = self._open_call()
        step = context.step
        if step in self._probes.disturbed and anchor == self._probes.latest(step):
            error = output.float() - exact.float()
            self._passed_on[part, layer] = sample, error, float(relative_error(output, exact))

    def _disturb(self, exact: torch.Tensor, part: Part, layer: int) -> torch.Tensor:
        assert self._disturbed is not None
        if (part, layer) not in self._disturbed:
            return exact
        sample, error, _ = self._passed_on[part, layer]
        return (exact.float() + sample.spread(error, exact)).to(exact.dtype)
