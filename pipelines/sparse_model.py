"""The layers of one patched transformer: what of them can run sparse, and what a call needs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from diffusers.models import attention_dispatch
from diffusers.models.modeling_utils import get_parameter_dtype

from chipsparse.config import PARTS, Action, Branches, Part
from chipsparse.kernels.dense_attention import faster_than_the_library
from chipsparse.layout import Fp8Form, ModelLayout
from chipsparse.pipelines.denoising_loop import DenoisingLoop
from chipsparse.pipelines.diffusers_hooks import has_foreign_hooks, hooks_of, why_caches_refused
from chipsparse.pipelines.execution import (
    Execution,
    autocast_bytes,
    execution_of,
    pending_bytes,
)
from chipsparse.pipelines.family import Family
from chipsparse.pipelines.feed_forward import AS_ONE
from chipsparse.pipelines.model_patch import ModelPatch
from chipsparse.pipelines.ops import LayerCall
from chipsparse.pipelines.parallel.team import Team
from chipsparse.pipelines.patches import RUNNER, Patches
from chipsparse.reasons import layers as reasons
from chipsparse.reasons.reason import Level
from chipsparse.report.nothing_sparse import wants_sparse
from chipsparse.sparse.cache.memory_plan import MemoryDemand
from chipsparse.sparse.graphs.model_state import ModelState
from chipsparse.sparse.layers.state import OpenCall
from chipsparse.sparse.session import SparseSession

# Arguments of models that leave out the attention of some layers, to guide by that.
PASSES_OVER = "skip_layers", "spatio_temporal_guidance_blocks"
# What `ModelState` names where the model computes something else: other modules, adapters (LoRA)
# that come, go, are fused or scaled, a changed IP-Adapter scale. Offloading replaces the rest, too.
COMPUTES = re.compile(
    r"\b_modules\.|\.(scaling|merged_adapters|_active_adapter|_disable_adapters)\b"
    r"|\.processor\.scale\b|^_hf_peft_config_loaded$|^peft_config\b",
)
OWN_LISTS = (
    "schedule.branches gives guidance branches lists of their own, and each process would know one "
    "alone; use another form, or Parallel(guidance=1)"
)
UNSEEN = "code that was put in the model's place computes it, or passes it over"


class SparseModel:
    """Serves the layers of one transformer, as its family says."""

    def __init__(
        self,
        family: Family,
        transformer: torch.nn.Module,
        session: SparseSession,
        loop: DenoisingLoop,
        patches: Patches,
        team: Team | None,  # the processes that make the same calls
    ) -> None:
        self.family = family
        self.transformer = transformer
        self.session = session
        self.is_calling = False  # a call of the transformer is under way
        self.calls_changed = 0  # times that the model became one that computes something else
        self._team = team
        self._patches = patches
        self.split = (
            None if team is None else team.split(session.config, needs_text=family.text.needed)
        )
        self.refuse_split(family.why_not_split(cast(Any, transformer).config))
        if team is not None and team.guidance is not None:
            self.refuse_sharing(family.why_guidance_stays())
            # A process logs, and corrects by, the calls that it computes alone.
            if isinstance(session.config.schedule.form, Branches):
                self.refuse_sharing(OWN_LISTS)
        self._state: ModelState | None = None  # of the last computed call
        self._has_mlps_as_one = False  # feed-forward layers that can are single ops
        self.reader = family.reader(family, transformer, session, self.split, loop)
        self.tokens = family.tokens(self.reader, patches)
        self.patch = ModelPatch(family, transformer, session.config, patches)

    def apply(self, number: int) -> None:
        """Patch the layers, whose custom ops find this object under a number."""
        self.patch.apply(number, self.tokens)

    def refuse_split(self, reason: str | None) -> None:
        """Raise `ValueError` where other processes have a share of its tokens, with a reason."""
        if self.split is not None:
            self.refuse_sharing(reason)

    def refuse_sharing(self, reason: str | None) -> None:
        """Raise `ValueError` where other processes run it too, and there is a reason."""
        if self._team is not None and reason is not None:
            raise ValueError(
                f"this {type(self.transformer).__name__} cannot run on several processes: {reason}",
            )

    # What the layers ask.

    def attention(self, layer: int) -> LayerCall:
        """Return the self-attention of a layer, called as `AttentionLayer` is."""
        return self.tokens.around(self.session.attention[layer])

    def called_outside(self) -> None:
        """Report layers that compute while the transformer is not called: they run dense."""
        if wants_sparse(self.session.config):
            self.session.report.add_dense_calls(*reasons.called_outside())

    # One call.

    def execution(self, latents: torch.Tensor) -> Execution:
        """Return the device and dtype of a call with these latents."""
        modules = self.patch.self_attentions()
        weight = next((modules[0] if modules else self.transformer).parameters())
        execution = execution_of(self.transformer, weight, latents)
        name = self.family.modules.dtype
        if name == "" or execution.autocast:
            return execution
        return replace(execution, dtype=get_parameter_dtype(self.transformer.get_submodule(name)))

    def ran(self, state: OpenCall, arguments: dict[str, Any], execution: Execution) -> None:
        """Look at the model after a call: what computed its layers, and what it is made of."""
        self._say_what_was_unseen(state, arguments)
        if self._state is None:  # its weights are where they stay
            self._state = ModelState(
                self.transformer,
                execution.device,
                ignored={RUNNER, AS_ONE},
                surroundings=lambda: surroundings(execution.device.type),
            )

    @contextlib.contextmanager
    def as_stock(self) -> Iterator[None]:
        """Within: all layers run as diffusers made them."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.patch.attention_released())
            for site in self.patch.sites:
                stack.enter_context(site.released())
            yield

    def attention_of(
        self,
        arguments: dict[str, Any],
    ) -> contextlib.AbstractContextManager[None]:
        """Return what a call runs within, which gives the attention back if none can run sparse.

        The report says so. It is given back also where nothing is sparse at all and the model's own
        kernels are as fast as ours: they then get q, k and v as compiled code lays them out for
        them, and the call costs what it does without chipsparse.
        """
        cause = self.reader.dense_because(arguments)
        if self.split is not None:  # the exchange is ours, whatever the layers compute
            self.refuse_split(cause)
            return contextlib.nullcontext()
        wanted = self.session.wants_attention and self.session.config.attention.is_sparse
        if cause is not None and wanted:
            causes = dict.fromkeys(range(len(self.patch.self_attentions())), cause)
            self.session.recorder.leave_dense("attention", causes, once=True)
            self.session.report.add(reasons.attention_dense(cause))
        elif self.session.attends and not self.reader.needs_mask(arguments):
            return contextlib.nullcontext()
        return self.patch.attention_released()

    def has_faster_attention(
        self,
        layout: ModelLayout,
        arguments: dict[str, Any],
        execution: Execution,
    ) -> bool:
        """Return whether full attention is faster in our layers: by our kernel, or unmasked."""
        # Not in the place of a backend that a user chose, which may be faster still.
        if not self.patch.has_pytorch_attention():
            return False
        device = execution.device
        if self.reader.masks_text(arguments) and device.type == "cuda":
            return True
        is_faster = faster_than_the_library(
            device,
            execution.dtype,
            layout.tokens,
            layout.head_dim,
        )
        return is_faster and not self.family.attention.shares_keys

    def memory_demand(
        self,
        arguments: dict[str, Any],
        execution: Execution,
        *,
        branches: int,
        kept: int,
    ) -> MemoryDemand:
        """Return what the caches have to leave room for.

        Args:
            arguments: those of the call.
            execution: its device and dtype.
            branches: the guidance branches of the generation.
            kept: the bytes that skipped steps keep.
        """
        all_dense = self.reader.dense_because(arguments) is not None
        lost = self.patch.lost_attention()
        layers = range(len(self.patch.self_attentions())) if all_dense else lost.keys()
        dense: set[tuple[int, Part]] = {(layer, "attention") for layer in layers}
        fp8_mlps: dict[int, Fp8Form] = {}
        for layer, form in enumerate(self.patch.forms(execution)):
            if isinstance(form, str):
                dense.add((layer, "mlp"))
            elif form.fp8 is not None:
                fp8_mlps[layer] = form.fp8
        pending = kept + pending_bytes(self.transformer, execution.device)
        if execution.autocast:
            pending += autocast_bytes(self.transformer, execution.dtype)
        return MemoryDemand(
            dtype=execution.dtype,
            branches=branches,
            pending_bytes=pending,
            receive_bytes=0 if self.split is None else self.split.exchange.window_bytes,
            dense=frozenset(dense),
            fp8_mlps=fp8_mlps,
            captures=self._team is None,
        )

    # Changes of the model.

    def change(self) -> str | None:
        """Return the name of a change of the model since the last computed call, or None."""
        changed = None if self._state is None else self._state.change()
        if changed is not None and COMPUTES.search(changed):
            self.calls_changed += 1
        return changed

    def look_at_modules(self, changed: str | None, execution: Execution) -> None:
        """Decide anew what can run sparse, at first and when anything about the model changed.

        In the middle of a generation adapters (LoRA), hooks and processors come, go and change, and
        weights move: a callback may do so, and offloading.

        Args:
            changed: the name of the change; None: there is none.
            execution: device and dtype of the open call.
        """
        what = "the model" if self._state is None else changed
        if what is not None:
            self.session.graphs.model_changed(what)
            self._state = None
        # Guidance branches may differ in it, by lists of their own.
        wanted = self.session.caching and self.session.config.mlp.is_sparse
        is_new = what is not None or self.session.is_first_call
        if is_new or wanted is not self._has_mlps_as_one:
            self._check_attention()
            self._has_mlps_as_one = wanted
            self._report("mlp", self.patch.run_feed_forwards(execution, as_one=wanted))

    def check_caches(self) -> None:
        """Refuse caches of diffusers that cannot be on top, where a guidance branch begins."""
        if not self.session.is_first_call:
            return
        if getattr(self.transformer, "is_cache_enabled", False):
            self.refuse_sharing(
                "a cache of diffusers on it decides from the tokens of one process what to pass "
                "over; call disable_cache() on the transformer",
            )
        skips = self.session.plan is not None and self.session.plan.schedule.skips_any
        if self.session.wants_attention or skips:
            reason = why_caches_refused(self.transformer, skips=skips)
            if reason is not None:
                raise ValueError(f"{type(self.transformer).__name__}: {reason}")

    def _check_attention(self) -> None:
        """Report the layers whose attention is not routed to ours any more."""
        wanted = self.session.wants_attention and self.session.config.attention.is_sparse
        if not wanted and self.split is None:
            return
        lost = self.patch.lost_attention()
        self.refuse_split(next(iter(lost.values()), None))
        self._report("attention", lost)

    def _report(self, part: Part, causes: dict[int, str]) -> None:
        self.session.recorder.leave_dense(part, causes)
        parts = {(layer, part): cause for layer, cause in causes.items()}
        layers = len(self.patch.self_attentions())
        for reason in reasons.dense_layers("layers.dense", Level.FALLBACK, parts, layers):
            self.session.report.add(reason)

    def _say_what_was_unseen(self, state: OpenCall, arguments: dict[str, Any]) -> None:
        """Report layers of a sparse call that others than ours computed, or passed over."""
        plan = state.plan
        record = state.record
        if not (state.caching and record.action is Action.SPARSE) or record.replayed:
            return
        passes_over = any(arguments.get(name) is not None for name in PASSES_OVER)
        if passes_over or any(hooks_of(self.transformer)):
            return
        known = {(entry.layer, entry.part) for entry in record.layers}
        known |= self.session.recorder.left_dense.keys()
        counts = {"attention": len(self.patch.self_attentions()), "mlp": len(self.patch.sites)}
        unseen = {
            (layer, part): UNSEEN
            for part in PARTS
            for layer in range(counts[part])
            if (layer, part) not in known and plan.is_sparse(layer, part)
        }
        layers = plan.layout.layers
        for reason in reasons.dense_layers("layers.unseen", Level.FALLBACK, unseen, layers):
            self.session.report.add(reason)

    def why_not_captured(self, execution: Execution) -> str | None:
        """Return why sparse steps of a generation may not all do the same, or None."""
        reason = self.reader.why_not_captured()
        if reason is not None:
            return reason
        if self._team is not None:
            return "several processes share it, and a replay would exchange nothing with them"
        if execution.autocast:
            return "torch.autocast is on, and the copies of weights that it keeps come and go"
        for name, module in self.transformer.named_modules():
            if has_foreign_hooks(module, self._patches, is_whole_model=name == ""):
                return f"hooks run with {name or 'the transformer'}"
        return None


def surroundings(device_type: str) -> dict[str, object]:
    """Return the state outside of its model and arguments that a call depends on, by name."""
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
