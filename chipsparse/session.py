"""All mutable state of one patched transformer, and the decision what each layer does now."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import torch

from chipsparse import attention, mlp
from chipsparse.attention import AttentionBudget
from chipsparse.cache_kinds import PARTS, Part, read_kinds
from chipsparse.cache_store import CacheStore
from chipsparse.config import SparsityConfig
from chipsparse.host_memory import HostMemory
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layout import ModelLayout
from chipsparse.memory_plan import MemoryDemand
from chipsparse.mlp import MLPWeights
from chipsparse.offload import OffloadPool
from chipsparse.plan import Action, SparsityPlan
from chipsparse.report import GenerationReport, StepRecord, StepTimer
from chipsparse.step import StepContext
from chipsparse.step_cache import StepCache
from chipsparse.token_order import grids_order, inverse_order


class Session:
    """Owns the caches of one transformer: one `LayerCache` per layer and guidance branch.

    Every transformer call runs between `begin` and `end`; whoever opens a call resets the session
    if the call raises. Nothing but host memory, emptied, survives into another generation.

    Args:
        config: what to compute.
        report: where to record it; shared by the experts of one pipeline.
        pool: holds the caches that live in host memory, for this session alone; by default one
            with memory of its own.
    """

    def __init__(
        self, config: SparsityConfig, report: GenerationReport, pool: OffloadPool | None = None
    ) -> None:
        self.config = config
        self.report = report
        self._pool = OffloadPool(HostMemory(), report.fall_back) if pool is None else pool
        self._caches = CacheStore(self._pool, report.fall_back)
        # Facts about the device, not about a generation: a second one runs on the same kernels.
        self._kernels = FastestKernel()
        self.reset()

    def reset(self) -> None:
        """Forgets everything and frees the caches: the next call starts a generation."""
        self._generation = 0
        self._plan: SparsityPlan | None = None
        self._caching = False
        self._caches.reset()
        self._recorded: dict[str, Action] = {}
        self._last_output: dict[str, torch.Tensor] = {}
        self._step_cache: StepCache | None = None
        self._order: tuple[torch.Tensor, torch.Tensor] | None = None
        self._static_columns: torch.Tensor | None = None
        self._overfull_layers: set[int] = set()
        self._context: StepContext | None = None
        self._record: StepRecord | None = None

    @property
    def plan(self) -> SparsityPlan | None:
        """The plan of the generation in progress."""
        return self._plan

    def close(self) -> None:
        """As `reset`, and gives host memory back to the system."""
        self.reset()
        self._pool.close()

    def cache_bytes(self) -> int:
        """Bytes that all caches hold now, on the device and on the host."""
        return self._caches.nbytes()

    # One transformer call.

    def begin(
        self,
        context: StepContext,
        layout: ModelLayout,
        device: torch.device,
        demand: Callable[[], MemoryDemand] = MemoryDemand,
        latents: torch.Tensor | None = None,
    ) -> Action:
        """Opens a transformer call and returns what it does.

        A generation that starts late (image to video, the second expert of Wan 2.2) is right
        without special cases: see `SparsityPlan.taken`.

        Args:
            context: position of the call.
            layout: sizes of the model and the call.
            device: where it runs.
            demand: says what it asks of the memory; called once per branch.
            latents: the transformer's input, of any shape; ``skip_threshold`` needs it.

        Raises:
            BudgetError: where the memory budgets leave no room for the caches of a single layer.
        """
        plan = SparsityPlan(self.config, layout, context.steps)
        if context.generation != self._generation or plan != self._plan:
            self.reset()
            self._generation, self._plan = context.generation, plan
            self._caching = not plan.is_dense()
            if self._caching and self.config.token_order.voxel is not None:
                order = grids_order(layout.grids, self.config.token_order.voxel).to(device)
                self._order = (order, inverse_order(order))
            if plan.skips_by_threshold():
                schedule = self.config.schedule
                self._step_cache = StepCache(schedule.skip_threshold or 0.0, schedule.max_skips)
        recorded = self._recorded.get(context.branch)
        action = plan.taken(context.step, recorded)
        predicted = None
        if self._step_cache is not None and latents is not None:
            allowed = plan.may_skip_by_threshold(context.step, recorded)
            if self._step_cache.skips(context.step, context.branch, latents, allowed=allowed):
                action = Action.SKIP
            predicted = self._step_cache.predicted
        record = StepRecord(
            context.step, context.steps, context.branch, action, predicted_change=predicted
        )
        self.report.begin(context.generation, record)
        if recorded is None:
            for remark in plan.remarks():
                self.report.fall_back(remark)
        if self._caching and context.branch not in self._caches:
            self._caches.admit(context.branch, plan, device, demand())
        self._context, self._record = context, record
        if action is not Action.SKIP:
            record.timer = StepTimer(device, time.perf_counter)
            for part in PARTS:
                self._caches.start(context.branch, read_kinds(self.config, part, action))
        return action

    def end(self, output: torch.Tensor) -> None:
        """Closes the call with the transformer's output tensor."""
        plan, context, record = self._open_call()
        if record.timer is not None:
            record.timer.stop()
        record.bytes_to_device, record.bytes_to_host = self._pool.take_traffic()
        branch = context.branch
        recorded = plan.recorded_after(context.step, record.action, self._recorded.get(branch))
        if recorded is not None:
            self._recorded[branch] = recorded
        self.report.cache_bytes = max(self.report.cache_bytes, self.cache_bytes())
        self.report.host_bytes = max(self.report.host_bytes, self._pool.stored_bytes)
        if context.steps is not None and context.step == context.steps - 1:
            self._finish(branch)
        elif plan.skips() and record.action is not Action.SKIP:
            self._last_output[branch] = held = output.clone()  # the caller may change it in place
            if self._step_cache is not None:
                self._step_cache.computed(branch, held, sparse=record.action is Action.SPARSE)
        self._context = self._record = None

    def _finish(self, branch: str) -> None:
        """Frees what a branch has after its last step: what decodes the latents needs room."""
        if self._caching:
            self._caches.finish(branch)
        if self._step_cache is not None:
            self._step_cache.release()
        self._recorded.pop(branch, None)
        self._last_output.pop(branch, None)

    def skipped_output(self) -> torch.Tensor:
        """What a skipped call returns: the output that its branch computed last, a copy of it."""
        _, context, _ = self._open_call()
        return self._last_output[context.branch].clone()

    def _open_call(self) -> tuple[SparsityPlan, StepContext, StepRecord]:
        assert self._plan is not None
        assert self._context is not None
        assert self._record is not None
        return self._plan, self._context, self._record

    # What the layers of an open call ask for.

    @property
    def caching(self) -> bool:
        """Whether a call is open in whose generation anything is sparse."""
        return self._context is not None and self._caching

    @property
    def token_order(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Order of the video or image tokens and its inverse (int64 ``[N]``); None: unchanged."""
        return self._order if self.caching else None

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
        """Self-attention of one layer.

        Args:
            layer: number of the transformer block, from 0.
            query: ``[B, H, N, D]``, as are key, value and the result.
            key: as query.
            value: as query.
            scale: factor of the scores, None for ``D ** -0.5``.
            unpatched: computes the attention as the model would without chipsparse.
        """
        config = self.config.attention
        if not self.caching or not config.enabled or self._stays_dense(layer, "attention"):
            return unpatched()
        _, context, record = self._open_call()
        if "dense_attention" not in self.report.backends:
            self.report.run_on(
                attention.backend_choices(
                    query, key, value, group_rows=config.group_rows, backend=self._backend
                )
            )
        action = self._attention_action(layer, record.action)
        kinds = read_kinds(self.config, "attention", action)
        with self._caches.lend(context.branch, layer, "attention", kinds) as cache:
            if action is Action.DENSE:
                return attention.dense_step(
                    cache,
                    query,
                    key,
                    value,
                    scale=scale,
                    backend=self._backend,
                    kernels=self._kernels,
                )
            if action is Action.SPARSE:
                record.attention_fractions.append(cache.kept_fraction)
                return attention.sparse_step(
                    cache, query, key, value, config=config, scale=scale, backend=self._backend
                )
            budget = self._attention_budget(layer, key)
            output = attention.refresh_step(
                cache,
                query,
                key,
                value,
                config=config,
                budget=budget,
                reselect=self.config.schedule.reselect,
                scale=scale,
                backend=self._backend,
                kernels=self._kernels,
            )
            self._check_capacity(layer, cache.capacity, budget.most_columns(config))
            return output

    def _attention_action(self, layer: int, action: Action) -> Action:
        """A fuller action for a layer that was passed over (by a block cache, say)."""
        _, context, _ = self._open_call()

        def recorded(kind: str) -> bool:
            return self._caches.has(context.branch, layer, kind)

        if not recorded("lse"):
            return Action.DENSE
        if action is Action.SPARSE and not (recorded("columns") or recorded("residual")):
            return Action.REFRESH
        return action

    def _attention_budget(self, layer: int, key: torch.Tensor) -> AttentionBudget:
        plan, context, _ = self._open_call()
        config, layout = self.config.attention, plan.layout
        if self._static_columns is None:
            self._static_columns = attention.static_columns(
                key.shape[2],
                config,
                text_tokens=layout.text_tokens,
                text_first=layout.text_first,
                device=key.device,
            )
        return AttentionBudget(
            keep_count=plan.attention_keep_count(),
            random_count=plan.attention_random_count(),
            static_columns=self._static_columns,
            seed=zlib.crc32(f"{self.config.seed} {context.branch} {context.step} {layer}".encode()),
            static_count=attention.static_count(
                key.shape[2], config, text_tokens=layout.text_tokens
            ),
        )

    def _check_capacity(self, layer: int, longest: int | None, most_columns: int) -> None:
        """Reports, once per layer, a list of columns that is longer than any choice makes it."""
        if longest is None or longest <= most_columns or layer in self._overfull_layers:
            return
        self._overfull_layers.add(layer)
        _, context, _ = self._open_call()
        self.report.fall_back(
            f"attention of layer {layer} keeps up to {longest} columns from step {context.step} "
            f"on instead of {most_columns} at most: column sums were NaN, and their query groups "
            "keep every column"
        )

    def mlp(
        self,
        layer: int,
        hidden: torch.Tensor,
        weights: MLPWeights,
        *,
        addend: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The feed-forward layer of one block, plus what is to be added to it.

        Args:
            layer: number of the transformer block, from 0.
            hidden: ``[B, N, C]``, as are addend and the result.
            weights: read in place and never kept.
            addend: another summand of the result, which changes with every step and is not cached.
        """
        config = self.config.mlp
        if not self.caching or not config.enabled or self._stays_dense(layer, "mlp"):
            return mlp.dense_step(
                None, hidden, weights, config=config, backend=self._backend, addend=addend
            )
        plan, context, record = self._open_call()
        action = record.action
        if not self._caches.has(context.branch, layer, "activation"):
            action = Action.REFRESH
        kinds = read_kinds(self.config, "mlp", action)
        with self._caches.lend(context.branch, layer, "mlp", kinds) as cache:
            if action is not Action.SPARSE:
                return mlp.dense_step(
                    cache, hidden, weights, config=config, backend=self._backend, addend=addend
                )
            if "sparse_mlp_up" not in self.report.backends:
                self.report.run_on(
                    mlp.backend_choices(
                        cache, hidden, weights, config=config, backend=self._backend
                    )
                )
            keep_count = plan.mlp_keep_count(layer)
            record.mlp_fractions.append(keep_count / weights.up.shape[0])
            return mlp.sparse_step(
                cache,
                hidden,
                weights,
                config=config,
                keep_count=keep_count,
                backend=self._backend,
                addend=addend,
            )

    def _stays_dense(self, layer: int, part: Part) -> bool:
        if layer < self.config.schedule.first_dense_layers:
            return True
        _, context, _ = self._open_call()
        return self._caches.recomputes(context.branch, layer, part)

    @property
    def _backend(self) -> str | None:
        return None if self.config.backend == "auto" else self.config.backend
