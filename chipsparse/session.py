"""All mutable state of one patched transformer, and the decision what each layer does now."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import torch

from chipsparse import attention, mlp
from chipsparse.cache import LayerCache
from chipsparse.config import SparsityConfig
from chipsparse.kernels.dense_attention.measure import FastestKernel
from chipsparse.layout import ModelLayout
from chipsparse.mlp import MLPWeights
from chipsparse.plan import Action, SparsityPlan
from chipsparse.report import GenerationReport, StepRecord, StepTimer
from chipsparse.step import StepContext
from chipsparse.token_order import grids_order, inverse_order


class Session:
    """Owns the caches of one transformer: one `LayerCache` per layer and guidance branch.

    Every transformer call runs between `begin` and `end`; whoever opens a call resets the session
    if the call raises. Nothing survives into another generation.

    Args:
        config: what to compute.
        report: where to record it; shared by the experts of one pipeline.
    """

    def __init__(self, config: SparsityConfig, report: GenerationReport) -> None:
        self.config = config
        self.report = report
        # Facts about the device, not about a generation: a second one runs on the same kernels.
        self._kernels = FastestKernel()
        self.reset()

    def reset(self) -> None:
        """Forgets everything and frees the caches: the next call starts a generation."""
        self._generation = 0
        self._plan: SparsityPlan | None = None
        self._caching = False
        self._caches: dict[tuple[str, int], LayerCache] = {}
        self._recorded: dict[str, Action] = {}
        self._last_output: dict[str, torch.Tensor] = {}
        self._order: tuple[torch.Tensor, torch.Tensor] | None = None
        self._static_columns: torch.Tensor | None = None
        self._overfull_layers: set[int] = set()
        self._context: StepContext | None = None
        self._record: StepRecord | None = None

    @property
    def plan(self) -> SparsityPlan | None:
        """The plan of the generation in progress."""
        return self._plan

    def cache_bytes(self) -> int:
        """Bytes that all caches hold now."""
        return sum(cache.nbytes() for cache in self._caches.values())

    # One transformer call.

    def begin(self, context: StepContext, layout: ModelLayout, device: torch.device) -> Action:
        """Opens a transformer call and returns what it does.

        The plan's action is raised to a fuller one where its inputs are missing: the first call of
        a branch is DENSE, and nothing is sparse before the first REFRESH. So a generation that
        starts late (image to video, the second expert of Wan 2.2) is right without special cases.
        """
        plan = SparsityPlan(self.config, layout, context.steps)
        if context.generation != self._generation or plan != self._plan:
            self.reset()
            self._generation, self._plan = context.generation, plan
            self._caching = not plan.is_dense()
            if self._caching and self.config.token_order.voxel is not None:
                order = grids_order(layout.grids, self.config.token_order.voxel).to(device)
                self._order = (order, inverse_order(order))
        action = self._possible(plan.step_action(context.step), context.branch)
        self._context = context
        self._record = StepRecord(context.step, context.steps, context.branch, action)
        self.report.begin(context.generation, self._record)
        if action is not Action.SKIP:
            self._record.timer = StepTimer(device, time.perf_counter)
        return action

    def end(self, output: torch.Tensor) -> None:
        """Closes the call with the transformer's output tensor."""
        plan, context, record = self._open_call()
        if record.timer is not None:
            record.timer.stop()
        if record.action in (Action.DENSE, Action.REFRESH):
            if self._recorded.get(context.branch) is not Action.REFRESH:
                self._recorded[context.branch] = record.action
            self.report.cache_bytes = max(self.report.cache_bytes, self.cache_bytes())
        if plan.skips():
            self._last_output[context.branch] = output.clone()
        self._context = self._record = None

    def last_output(self) -> torch.Tensor:
        """The last output of this branch, for a SKIP step."""
        _, context, _ = self._open_call()
        return self._last_output[context.branch]

    def _possible(self, action: Action, branch: str) -> Action:
        recorded = self._recorded.get(branch)
        if recorded is None:
            return Action.DENSE
        if action in (Action.SPARSE, Action.SKIP) and recorded is Action.DENSE and self._caching:
            return Action.REFRESH
        return action

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
        if not self.caching or not config.enabled or self._stays_dense(layer):
            return unpatched()
        plan, context, record = self._open_call()
        cache = self._cache(layer).attention
        if "dense_attention" not in self.report.backends:
            self.report.run_on(
                attention.backend_choices(
                    query, key, value, group_rows=config.group_rows, backend=self._backend
                )
            )
        action = record.action
        # A layer that was passed over (by a block cache, say) lacks what others have by now.
        if cache.lse is None:
            action = Action.DENSE
        elif action is Action.SPARSE and cache.columns is None and cache.residual is None:
            action = Action.REFRESH
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
        if self._static_columns is None:
            self._static_columns = attention.static_columns(
                key.shape[2],
                config,
                text_tokens=plan.layout.text_tokens,
                text_first=plan.layout.text_first,
                device=key.device,
            )
        budget = attention.AttentionBudget(
            keep_count=plan.attention_keep_count(),
            random_count=plan.attention_random_count(),
            static_columns=self._static_columns,
            seed=zlib.crc32(f"{self.config.seed} {context.branch} {context.step} {layer}".encode()),
            static_count=attention.static_count(
                key.shape[2], config, text_tokens=plan.layout.text_tokens
            ),
        )
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
        if not self.caching or not config.enabled or self._stays_dense(layer):
            return mlp.dense_step(
                None, hidden, weights, config=config, backend=self._backend, addend=addend
            )
        plan, _, record = self._open_call()
        cache = self._cache(layer).mlp
        if record.action is not Action.SPARSE or cache.activation is None:
            return mlp.dense_step(
                cache, hidden, weights, config=config, backend=self._backend, addend=addend
            )
        if "sparse_mlp_up" not in self.report.backends:
            self.report.run_on(
                mlp.backend_choices(cache, hidden, weights, config=config, backend=self._backend)
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

    def _cache(self, layer: int) -> LayerCache:
        _, context, _ = self._open_call()
        return self._caches.setdefault((context.branch, layer), LayerCache())

    def _stays_dense(self, layer: int) -> bool:
        return layer < self.config.schedule.first_dense_layers

    @property
    def _backend(self) -> str | None:
        return None if self.config.backend == "auto" else self.config.backend
