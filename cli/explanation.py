"""What a generation would do, gathered from configs alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from chipsparse.byte_sizes import format_bytes
from chipsparse.cache_kinds import Part
from chipsparse.cache_table import KindBytes, bytes_by_kind
from chipsparse.cli import profile_range
from chipsparse.cli.dense_layers import QUANTIZED, dense_layers
from chipsparse.cli.errors import UserError
from chipsparse.cli.model import ModelDescription, choose_device, choose_dtype
from chipsparse.cli.planned import plan_generation
from chipsparse.cli.settings import CommonOptions, GenerationSettings
from chipsparse.cli.sparse_steps import too_few_steps
from chipsparse.cli.weights import ComponentWeights, count_weights
from chipsparse.config import MemoryConfig
from chipsparse.cost_model import Rates
from chipsparse.estimate import DenseParts, RunEstimate, estimate_run
from chipsparse.measured_rates import measure_rates
from chipsparse.memory_plan import (
    BudgetError,
    Capacity,
    MemoryDemand,
    MemoryPlan,
    available,
    declared,
    plan_memory,
    working_bytes,
)
from chipsparse.pipelines.adapter import ModelAdapter
from chipsparse.plan import SparsityPlan
from chipsparse.profiles import Profile
from chipsparse.slower_parts import slower_parts

# In the names of pipelines that always see reference pictures.
SEEING_PICTURES = ("Kontext", "ImageEdit", "ImageLayered")
AT_MOST = (
    "counts and times are those of a generation in which skip_threshold skips no step: how many it "
    "skips is not known beforehand"
)
NO_BUDGET = "planned for a GPU without limit; give --vram to see what fits"


@dataclass(frozen=True)
class Target:
    """Where the generation would run.

    Attributes:
        device: its type, as PyTorch calls it.
        here: whether this machine has it.
        dtype: of weights and hidden states.
    """

    device: torch.device
    here: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Explanation:
    """Everything that `chipsparse explain` tells.

    Attributes:
        model: what the model's files say.
        profile: what is computed.
        settings: of the pipeline call.
        pixels: height and width of the picture.
        target: where it would run.
        plan: what is sparse, when.
        branches: transformer calls per step.
        weights: of every component.
        working: bytes that a transformer call needs besides weights and caches.
        memory: where the caches live.
        dense: layers of each part that never run sparse, and why.
        caches: bytes of each kind of tensor that is kept.
        estimate: expected times; None where no rates are known.
        out_of_range: how it differs from what the profile was tuned for, a phrase each.
        notes: what to know beside the numbers, one sentence each.
    """

    model: ModelDescription
    profile: Profile
    settings: GenerationSettings
    pixels: tuple[int, int]
    target: Target
    plan: SparsityPlan
    branches: int
    weights: list[ComponentWeights]
    working: int
    memory: MemoryPlan
    dense: dict[Part, dict[int, str]]
    caches: dict[str, KindBytes]
    estimate: RunEstimate | None
    out_of_range: list[str]
    notes: list[str]

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that are known."""
        return sum(component.nbytes or 0 for component in self.weights)

    @property
    def device_bytes(self) -> int:
        """Bytes of weights, work, caches and slots; on a CPU, where all memory is one, of all."""
        on_host = self.memory.host_bytes if self.target.device.type == "cpu" else 0
        return self.weight_bytes + self.working + self.memory.device_bytes + on_host

    def reasons(self, part: Part, kind: str) -> Counter[str]:
        """Why layers of one kind run a part dense, and how many each time."""
        layout = self.plan.layout
        return Counter(
            reason for layer, reason in self.dense[part].items() if layout.kind(layer).name == kind
        )

    def action_counts(self) -> Counter[str]:
        """How many steps take each action."""
        return Counter(action.value for action in self.plan.actions())


def explain(options: CommonOptions, model: ModelDescription, profile: Profile) -> Explanation:
    """Explains the generation that these options ask for; raises `UserError`."""
    target = choose_target(options)
    planned = plan_generation(options, model, profile)
    settings, adapter, plan = planned.settings, planned.adapter, planned.plan
    weights = count_weights(model, target.dtype)
    weight_bytes = sum(component.nbytes or 0 for component in weights)
    records = target.device.type == "cuda" and plan.records_steps()
    working = working_bytes(plan, dtype=target.dtype, recorded=planned.branches if records else 0)
    slower = slower_parts(plan, target.device, target.dtype)
    memory = plan_memory(
        plan,
        _capacity(plan, target, working=working, weights=weight_bytes),
        MemoryDemand(
            target.dtype,
            planned.branches,
            dense=frozenset(
                (layer, part) for part in planned.never for layer in range(plan.layout.layers)
            )
            | slower.keys(),
        ),
    )
    _check(memory, plan.config.memory, weights=weight_bytes, working=working)
    dense = dense_layers(plan, planned.never, slower, memory.placement)
    estimate, notes = _estimate(plan, memory, dense, target)
    out_of_range = profile_range.out_of_range(
        profile, model, settings, target.device, target.dtype, here=target.here
    )
    too_few = too_few_steps(plan)
    return Explanation(
        model=model,
        profile=profile,
        settings=settings,
        pixels=planned.pixels,
        target=target,
        plan=plan,
        branches=planned.branches,
        weights=weights,
        working=working,
        memory=memory,
        dense=dense,
        caches=bytes_by_kind(memory, plan.layout),
        estimate=estimate,
        out_of_range=out_of_range,
        notes=[
            *([too_few] if too_few is not None else []),
            *([profile_range.sentence(profile, out_of_range)] if out_of_range else []),
            *plan.remarks(),
            *([AT_MOST] if plan.schedule.skips_by_threshold() else []),
            *notes,
            *_notes(model, adapter, target, memory, profile, weights),
        ],
    )


def _check(memory: MemoryPlan, budgets: MemoryConfig, *, weights: int, working: int) -> None:
    """Raises `UserError` where nothing fits, and says what would help."""
    try:
        memory.check()
    except BudgetError as error:
        needed = f"weights {format_bytes(weights)}, working memory {format_bytes(working)}"
        if budgets.vram is None or weights + working < budgets.vram:
            raise UserError(f"{error} ({needed})") from error
        raise UserError(
            f"--vram {format_bytes(budgets.vram)} does not hold the model and its work ({needed}); "
            "in Python, diffusers' enable_model_cpu_offload and enable_group_offload keep a part "
            "of the weights there at a time"
        ) from error


def choose_target(options: CommonOptions) -> Target:
    """The device of ``--device``; ``auto`` plans for a GPU even where there is none."""
    if options.device == "auto":
        device, here = torch.device("cuda"), torch.cuda.is_available()
    else:
        device, here = choose_device(options.device), True
    options.check_vram(device)
    return Target(device, here, choose_dtype(options.dtype, device))


def _capacity(plan: SparsityPlan, target: Target, *, working: int, weights: int) -> Capacity:
    budgets = plan.config.memory
    if target.here:
        return available(budgets, target.device, working=working, pending=weights)
    return declared(budgets, working=working, pending=weights)


def _estimate(
    plan: SparsityPlan, memory: MemoryPlan, dense: DenseParts, target: Target
) -> tuple[RunEstimate | None, list[str]]:
    """The expected times, or a sentence that says why there are none."""
    if target.device.type != "cuda":
        return None, ["times are not estimated: the rates of this CPU are not known"]
    if target.dtype is torch.float32:
        return None, ["times are not estimated: the known rates are those of 16-bit types"]
    estimate = estimate_run(
        plan,
        memory.placement,
        dense_parts=dense,
        dtype=target.dtype,
        branches=memory.branches,
        rates=measure_rates(target.device) if target.here else Rates(),
    )
    if estimate.stock_layer < memory.branches * estimate.rates.launch_seconds:
        return None, [
            "times are not estimated: a layer this small computes in less time than the host takes "
            f"to launch a sparse one, about {estimate.rates.launch_seconds * 1e3:.1f} ms"
        ]
    return estimate, []


def _notes(
    model: ModelDescription,
    adapter: type[ModelAdapter],
    target: Target,
    memory: MemoryPlan,
    profile: Profile,
    weights: list[ComponentWeights],
) -> list[str]:
    notes, budgets = [], profile.sparsity.memory
    if not target.here and budgets.vram is None:
        notes.append(NO_BUDGET)
    if not target.here and budgets.ram is None and memory.needs_host:
        notes.append("host memory is what this machine has free; give --ram for another one")
    unknown = [component.name for component in weights if component.nbytes is None]
    if unknown:
        notes.append(f"the weights of {', '.join(unknown)} are not counted: no config.json there")
    if QUANTIZED in model.transformer_config:
        notes.append("the transformer's weights are counted as if they were not quantized")
    if {"transformer", "transformer_2"} <= set(model.components):
        notes.append(
            "the second expert takes over with a dense step and a refresh of its own, which are "
            "not counted; the first one's caches are freed by then"
        )
    if memory.branches > 1 and memory.needs_host and not adapter.announces_guidance:
        notes.append(
            "these pipelines announce no second call per step: its caches get what the first "
            "one's leave"
        )
    if any(word in model.pipeline_class.__name__ for word in SEEING_PICTURES):
        notes.append("the tokens of a reference picture are not counted")
    return notes
