"""The memory plan of a generation, from its sizes and budgets, before the first step."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

import torch

from chipsparse.common.byte_sizes import format_bytes
from chipsparse.common.machine import device_free_bytes, host_budget, host_free_bytes
from chipsparse.config import PARTS, Action, ConfigError, LayerPart, MemoryConfig, Part
from chipsparse.kernels.checks import block_count
from chipsparse.layout import Fp8Form, ModelLayout
from chipsparse.sparse.cache.host_memory import HostMemory
from chipsparse.sparse.cache.placement import Capacity, PartNeed, Placement, Sizes, place
from chipsparse.sparse.cache.tensors import (
    COLUMN_SUMS_BYTES,
    PLACED,
    Kept,
    kept_bytes,
    placed_tensors,
    with_caches,
)
from chipsparse.sparse.cost_model.layer_times import Rates, layer_time
from chipsparse.sparse.cost_model.run_times import SLOTS
from chipsparse.sparse.plan import SparsityPlan

UNLIMITED = 1 << 62

# Of a GPU's free memory, left to what others ask for later: kernels that are loaded, workspaces of
# libraries, gaps between blocks of PyTorch's allocator (8 of 137 GiB were seen; segments that can
# grow leave hardly any). A second generation finds that much less.
DEVICE_RESERVE_SHARE = 0.06
GAPLESS_RESERVE_SHARE = 0.03
GAPLESS = "expandable_segments:true"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

# Tensors as large as the hidden states that a transformer block holds at once: in a norm with its
# float32 copies, around attention, and around the MLP, there with its neurons once per linear.
# Peaks of uncompiled Wan and FLUX blocks on a GPU are 5 to 40 % lower (benchmarks/notes/memory.md).
NORM_TENSORS = 13
ATTENTION_TENSORS = 9
MLP_TENSORS = 7
# Where processes share the tokens: at all times receive buffers for q, k, v and output, which peers
# write to; around attention q, k and v as they are sent and received; and after the last block the
# tokens of all processes, before and in the output norm with its float32 copies.
RECEIVE_BUFFERS = 4
EXCHANGE_TENSORS = 6
GATHERED_TENSORS = 8
BRANCHES = 2  # guidance branches whose small index lists there is room for


class BudgetError(ConfigError):
    """The caches of not a single layer fit; the text has the numbers."""


@dataclass(frozen=True)
class MemoryDemand:
    """The demand of a generation on the memory, besides its sizes."""

    dtype: torch.dtype = torch.float32  # of the hidden states
    branches: int = 1  # guidance branches that the generation is known to have
    pending_bytes: int = 0  # of weights that come to the device in a call, less those that leave
    receive_bytes: int = field(default=0, compare=False)  # of `working_bytes`, taken by now
    dense: frozenset[LayerPart] = frozenset()  # parts that cannot run sparse and keep nothing
    # Layers whose feed-forward weights are in FP8, and what their linears round.
    fp8_mlps: Mapping[int, Fp8Form] = field(default_factory=dict)
    # Whether sparse steps may be captured as CUDA graphs, for which there must be room: where the
    # plan may gain by it, and not on several processes, since a replay would exchange nothing.
    captures: bool = True


@dataclass(frozen=True)
class MemoryPlan:
    """The homes of the caches of a branch, and the figures behind the decision."""

    placement: Placement  # the decision, the same for all branches
    branches: int  # guidance branches that share the capacity
    capacity: Capacity  # what there was
    wanted: int  # bytes of all that the config wants kept, for all branches
    lost: float = 0.0  # work that sparse steps would save in what is recomputed
    in_fp8: bool = False  # whether caches are kept in FP8 and not in the model's precision

    @property
    def device_bytes(self) -> int:
        """Bytes on the device, slots included, of all branches."""
        return self.branches * self.placement.device_bytes + self.placement.slot_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory, of all branches."""
        return self.branches * self.placement.host_bytes

    @property
    def needs_host(self) -> bool:
        """True where caches live in host memory, or would if there were more of it."""
        return bool(self.placement.host or self.placement.dense)

    def fits(self, capacity: Capacity) -> bool:
        """Return True where the plan stays within a capacity."""
        return self.device_bytes <= capacity.device and self.host_bytes <= capacity.host

    def check(self) -> None:
        """Raises `BudgetError` where caches are wanted and none fits."""
        if self.placement.dense and not (self.placement.device or self.placement.host):
            raise BudgetError(
                f"not one layer's caches fit: all of them need {format_bytes(self.wanted)}, and "
                f"besides weights and working memory there are {self.capacity} for them; raise "
                "the budgets, make a smaller image or video, or run dense",
            )


def plan_memory(
    plan: SparsityPlan,
    capacity: Capacity,
    demand: MemoryDemand,
    *,
    open_slots: Mapping[Part, Sizes] | None = None,
) -> MemoryPlan:
    """Place the caches of one generation."""

    def planned(*, in_fp8: bool) -> MemoryPlan:
        config = with_caches(plan.config, in_fp8=in_fp8)
        needs = cache_needs(replace(plan, config=config), dtype=demand.dtype, dense=demand.dense)
        placement = place(
            needs,
            capacity,
            branches=demand.branches,
            open_slots=open_slots,
            prefer_host=config.memory.offload == "always" and capacity.host > 0,
        )
        return MemoryPlan(
            placement,
            demand.branches,
            capacity,
            wanted=demand.branches * sum(need.nbytes for need in needs),
            lost=sum(need.saved for need in needs if need.key in placement.dense),
            in_fp8=in_fp8,
        )

    precision = plan.config.memory.cache_precision
    memory = planned(in_fp8=precision == "fp8")
    if precision != "auto" or not memory.needs_host:
        return memory
    # In FP8 where more is kept so, or the same without host memory.
    both = memory, planned(in_fp8=True)
    return min(both, key=lambda plan: (plan.lost, bool(plan.placement.host)))


def cache_needs(
    plan: SparsityPlan,
    *,
    dtype: torch.dtype,
    dense: Collection[LayerPart] = (),
) -> list[PartNeed]:
    """Return what each sparse layer part wants to keep for one branch."""
    needs = []
    for layer in range(plan.layout.layers):
        sizes: dict[Part, dict[Kept, int]] = {
            part: {
                kept: kept_bytes(kept, layer, plan=plan, dtype=dtype)
                for kept in placed_tensors(plan.config, part)
            }
            for part in PARTS
            if plan.is_sparse(layer, part) and (layer, part) not in dense
        }
        movable = worth_moving(layer, sizes, plan=plan, dtype=dtype)
        needs += [
            PartNeed(layer, part, sizes[part], _saved_work(part, layer, plan), part in movable)
            for part in sizes
        ]
    return needs


def _saved_work(part: Part, layer: int, plan: SparsityPlan) -> float:
    """Return the floating-point operations that a sparse step of a part saves in one branch.

    A dense part saves none.
    """
    kept = plan.density(layer, part)
    layout = plan.layout
    if kept is None:
        return 0.0
    if part == "attention":
        whole = 4.0 * len(layout.query_rows) * layout.tokens * layout.own_attention_channels
    else:
        whole = 4.0 * layout.mlp_tokens(layer) * layout.width * layout.kind(layer).intermediate_size
    return layout.batch * whole * (1 - kept)


def worth_moving(
    layer: int,
    sizes: Mapping[Part, Sizes],
    *,
    plan: SparsityPlan,
    dtype: torch.dtype,
) -> frozenset[Part]:
    """The parts of a layer that are faster with caches in host memory than dense.

    Of all combinations the one whose sparse step takes least: its computation, or its transfers
    where those take longer. Computed from the rates of one GPU, whichever this one is: where caches
    live must not depend on a measurement, or the same call would give different results.
    """
    rates = Rates()

    def seconds(moved: tuple[Part, ...]) -> float:
        placement = Placement(host={(layer, part): sizes[part] for part in moved})
        bytes_of = [placement.moved(plan.config, layer, part, Action.SPARSE) for part in moved]
        to_device = sum(bytes_up for bytes_up, _ in bytes_of)
        to_host = sum(bytes_down for _, bytes_down in bytes_of)
        dense = [part for part in PARTS if part not in moved]
        time = layer_time(
            layer,
            Action.SPARSE,
            plan=plan,
            rates=rates,
            dtype=dtype,
            dense_parts=dense,
        )
        return max(time.total, max(to_device, to_host) / rates.link_rate(to_device, to_host))

    counts = range(len(sizes), -1, -1)  # of equal choices the one that keeps more
    choices = [chosen for count in counts for chosen in combinations(sizes, count)]
    fastest = min(choices, key=seconds)
    return frozenset(fastest)


@dataclass(frozen=True)
class KeptBytes:
    """The bytes of one tensor of the table `Kept`, in all layers and guidance branches."""

    layer: Mapping[str, int]  # bytes in one layer of each kind of layer
    total: int  # bytes of all that are kept
    device: int  # how many of them are on the device
    host: int  # how many of them are in host memory
    slots: int  # bytes on the device that those in host memory pass through


def bytes_by_tensor(memory: MemoryPlan, layout: ModelLayout) -> dict[Kept, KeptBytes]:
    """The table of a plan, without the tensors that it keeps nowhere."""
    placement = memory.placement
    table = {}
    slots = {kept: size for sizes in placement.slots.values() for kept, size in sizes.items()}
    for kept in PLACED:
        on_device, on_host = (
            {layer: sizes[kept] for (layer, _), sizes in home.items() if kept in sizes}
            for home in (placement.device, placement.host)
        )
        sizes = on_device | on_host
        if sizes:
            table[kept] = KeptBytes(
                layer={layout.kind(layer).name: sizes[layer] for layer in sorted(sizes)},
                total=memory.branches * sum(sizes.values()),
                device=memory.branches * sum(on_device.values()),
                host=memory.branches * sum(on_host.values()),
                slots=SLOTS * slots.get(kept, 0),
            )
    return table


def working_bytes(
    plan: SparsityPlan,
    *,
    dtype: torch.dtype,
    captured: int = 0,
    fp8_mlps: Collection[int] = (),
) -> int:
    """Return the estimated device memory of a transformer call besides weights and caches.

    They are the tensors of one block at its fullest, with the temporary ones of a refresh, and the
    index lists of small layers. The sparse calls of ``captured`` branches are CUDA graphs with
    memory of their own. Feed-forward weights that are in FP8 are read in ``dtype``, one layer's at
    a time.
    """
    config = plan.config
    layout = plan.layout
    tokens = layout.tokens
    heads = layout.batch * layout.own.heads
    token = layout.batch * layout.own.tokens * dtype.itemsize
    hidden = token * layout.width
    heads_side_by_side = token * layout.channels
    mlp = max(
        MLP_TENSORS * hidden + token * kind.intermediate_size * kind.mlp_linears
        for kind in layout.kinds
    )
    in_fp8 = [layout.kind(layer) for layer in fp8_mlps]
    rows = max((kind.intermediate_size * kind.mlp_linears for kind in in_fp8), default=0)
    mlp += rows * layout.width * dtype.itemsize
    attention = ATTENTION_TENSORS * heads_side_by_side
    resident = 0
    gathered = 0
    if layout.share is not None:
        resident = RECEIVE_BUFFERS * heads_side_by_side
        attention += EXCHANGE_TENSORS * heads_side_by_side
        gathered = GATHERED_TENSORS * layout.batch * tokens * layout.width * dtype.itemsize
    if config.attention.in_fp8:
        attention += 3 * heads * tokens * layout.head_dim
    sparse = [layer for layer in range(layout.layers) if plan.is_sparse(layer, "attention")]
    if sparse:
        blocks = block_count(len(layout.query_rows), config.block_size)
        sums = heads * blocks * tokens * min(dtype.itemsize, 4)
        attention += min(sums, COLUMN_SUMS_BYTES)
        lists = max(kept_bytes(Kept.LISTS, layer, plan=plan, dtype=dtype) for layer in sparse)
        attention += lists
        attention += tokens
        if Kept.LISTS.most_bytes is None or lists <= Kept.LISTS.most_bytes:
            resident += BRANCHES * layout.layers * lists
    return (1 + captured) * max(NORM_TENSORS * hidden, attention, mlp, gathered) + resident


def declared(config: MemoryConfig, *, working: int, pending: int) -> Capacity:
    """Return what the config's budgets leave for caches on a GPU that is not here.

    Without a budget for the GPU everything fits there; without one for the host, what this
    machine has counts.
    """
    device = UNLIMITED if config.vram is None else config.vram - working - pending
    free = host_free_bytes()
    host = config.ram
    if host is None:
        host = UNLIMITED if free is None else host_budget(free)
    return Capacity(device, 0 if config.offload == "never" else host)


def available(
    config: MemoryConfig,
    device: torch.device,
    *,
    working: int,  # bytes that a transformer call needs for itself
    pending: int = 0,  # bytes of weights that are yet to come to the device
    reserved: int = 0,  # bytes on the device that caches planned earlier will take yet
    held: int = 0,  # bytes that they take there by now
    taken: int = 0,  # bytes of ``working`` that are taken by now
    memory: HostMemory | None = None,  # that is ours already; what is spare of it is for caches
    reserve: float | None = None,  # of the device's free memory; by default `reserve_share`
) -> Capacity:
    """Return what this machine and the config's budgets leave for caches now."""
    memory = HostMemory() if memory is None else memory
    on_cpu = device.type != "cuda"  # one memory for all, the work and the weights too
    free_host = host_free_bytes()
    on_host = UNLIMITED
    if free_host is not None:
        # Of all that could be ours, what is ours already counted in: a second generation must not
        # find less memory than the first one, nor take a share of what that one left.
        whole = free_host + memory.nbytes - memory.untouched_bytes
        whole -= pending + working if on_cpu else 0
        on_host = host_budget(max(0, whole)) - memory.lent_bytes
    if config.ram is not None:
        on_host = min(on_host, config.ram - memory.lent_bytes - (held if on_cpu else 0))
    if on_cpu:
        on_host -= reserved
        if config.offload == "always":  # caches and slots take half each
            return Capacity(on_host // 2, on_host // 2)
        return Capacity(on_host, 0)
    free = device_free_bytes(device) + taken
    free -= round(free * (reserve_share() if reserve is None else reserve))
    if config.vram is not None:
        free = min(free, config.vram - torch.cuda.memory_allocated(device))
    on_device = free - working - pending - reserved
    return Capacity(on_device, 0 if config.offload == "never" else on_host)


def reserve_share() -> float:
    """The share of a GPU's free memory to leave to others, by how PyTorch's allocator is set up."""
    settings = (os.environ.get(name, "") for name in ALLOCATOR_VARIABLES)
    gapless = any(GAPLESS in text.replace(" ", "").lower() for text in settings)
    return GAPLESS_RESERVE_SHARE if gapless else DEVICE_RESERVE_SHARE
