"""The result of `chipsparse explain`: what runs sparse, how much memory it takes, how much faster.

Sizes are in bytes, times in seconds. Columns and neurons are those of the layer that keeps most;
``keep`` has those of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from chipsparse.cache.kinds import PARTS
from chipsparse.cache.table import KindBytes
from chipsparse.cli.explain.forecast import RankForecast
from chipsparse.cli.settings import GenerationSettings
from chipsparse.cli.views.names import profile_text, short_place
from chipsparse.cli.views.sections import Facts, Record, Result, Section, Table
from chipsparse.cli.views.units import PART_NAMES, counted, seconds_text, sharing_text
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import ranges_text
from chipsparse.cost_model.layer_times import PartSeconds, Rates, milliseconds_text
from chipsparse.cost_model.run_times import RunEstimate, SimilarLayers
from chipsparse.parallel.degrees import Parallel
from chipsparse.plan import Action

HIDDEN_ENOUGH = 0.995
Rows = list[tuple[str, str]]


class LayerGroup(Record):
    """Layers of one kind that keep the same.

    Attributes:
        layers: their numbers.
        columns: that each block of rows computes at a sparse step; None where that is dense.
        neurons: likewise.
    """

    layers: Sequence[int]
    columns: int | None
    neurons: int | None


class PartLayers(Record):
    """A part of all layers of one kind.

    Attributes:
        sparse: how many run it sparse.
        dense: how many do not, by the reason.
        step: seconds of a sparse and of a dense step, of the layer that keeps most; None where
            they are not known, or the config has it dense.
    """

    sparse: int
    dense: Mapping[str, int]
    step: PartSeconds | None

    @property
    def text(self) -> str:
        """Which of both they are."""
        dense = sum(self.dense.values())
        if dense and self.sparse:
            return f"{self.sparse} sparse, {dense} dense"
        return "dense" if dense else "sparse"


class MLPLayers(PartLayers):
    """The feed-forward layers of one kind.

    Attributes:
        token_blocks: of tokens that choose together.
        block_size: how many tokens each has.
        neurons: of a layer.
        neurons_kept: None where all are dense.
    """

    token_blocks: int
    block_size: int
    neurons: int
    neurons_kept: int | None


class KindLayers(Record):
    """The layers of one kind."""

    name: str
    layers: int
    attention: PartLayers
    mlp: MLPLayers
    keep: Sequence[LayerGroup]


class Tokens(Record):
    """The tokens of a transformer call."""

    grids: Sequence[Sequence[int]]
    grid: int
    text: int
    all: int
    exact_text: bool = Field(exclude=True)


class Attention(Record):
    """The attention of a layer."""

    query_blocks: int
    block_size_q: int
    precision: str
    columns_by_score: int | None
    columns_at_random: int
    columns: int | None


class Schedule(Record):
    """The actions in words, how many steps take each, and the full ones where they are listed."""

    actions: str
    counts: Mapping[str, int]
    full_steps: Sequence[int] | None


class Memory(Record):
    """The memory of a generation.

    Attributes:
        weights: as far as they are known.
        working: of a transformer call, besides weights and caches.
        caches_wanted: all that the profile asks for.
        slots: on the device, for what comes from the host.
        device: of weights, work, caches and slots; on a CPU, where all memory is one, of all.
        vram: budget of the device, if there is one; ram: of host memory.
        precision: how caches are kept: ``full`` or ``fp8``.
    """

    weights: int
    working: int
    caches_wanted: int
    caches_on_device: int
    caches_on_host: int
    slots: int
    device: int
    vram: int | None
    ram: int | None
    precision: str


class Estimate(Record):
    """The expected times; see `RunEstimate`."""

    rates: Rates
    stock: float
    steps: Mapping[Action, float]
    exchanging: Mapping[Action, float]
    computing: float
    moving: float
    to_device: int
    to_host: int
    similar: Sequence[SimilarLayers]
    stock_run: float
    run: float
    transfers_hidden: float
    speedup_sparse_step: float
    speedup_run: float

    @classmethod
    def of(cls, estimate: RunEstimate) -> Estimate:
        """Return the record of an estimate."""
        return cls(
            **vars(estimate),
            transfers_hidden=estimate.hidden,
            speedup_sparse_step=estimate.speedup_sparse_step,
            speedup_run=estimate.speedup_run,
        )


class Alone(Record):
    """The same generation on one device of this kind."""

    cache_bytes: int
    steps: Mapping[Action, float] | None
    run: float | None


class Shared(Record):
    """Several processes.

    Attributes:
        parallel: how many there are, by what they share.
        efficiency: of a step of each action: its time on one device over that of all processes
            together; None where times are not known.
        efficiency_run: of all steps; likewise.
    """

    parallel: Parallel
    ranks: Sequence[RankForecast]
    efficiency: Mapping[Action, float] | None
    efficiency_run: float | None
    alone: Alone


class Quality(Record):
    """One quality of the profile: steps by action, share of a dense generation's operations."""

    counts: Mapping[str, int]
    work: float
    cache_bytes: int
    speedup_run: float | None


class Explanation(Result):
    """Everything that `chipsparse explain` tells."""

    kind: Literal["explanation"] = "explanation"
    model: str
    pipeline_class: str
    transformer_class: str
    profile: str
    quality: str | None
    out_of_range: Sequence[str]
    device: str
    device_here: bool
    dtype: str
    settings: GenerationSettings
    pixels: tuple[int, int]
    branches: int
    tokens: Tokens
    attention: Attention
    layers: Sequence[KindLayers]
    schedule: Schedule
    weights: Mapping[str, int | None]
    memory: Memory
    caches: Mapping[str, KindBytes]
    estimate: Estimate | None
    shared: Shared | None
    qualities: Mapping[str, Quality]
    notes: Sequence[str]

    @property
    def title(self) -> str:
        """The headline."""
        return short_place(self.model)

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the generation, its layers, its memory, its times, and notes."""
        parts = [
            Facts(self._generation),
            Table(
                ["layers", "count", "attention", "MLP"],
                [[k.name, str(k.layers), k.attention.text, k.mlp.text] for k in self.layers],
            ),
            *(Facts(rows) for rows in (self._part_times, self._budgets, self._reasons)),
            self._cache_table,
            Facts(self._memory_rows),
            *self._time_parts,
            *self._shared_parts,
            self._quality_table,
            Facts([("note", note) for note in self.notes]),
        ]
        # A part each, so that the names of facts line up within a part alone.
        return [Section("", [part]) for part in parts]

    # What is computed.

    @property
    def _generation(self) -> Rows:
        size = f"{self.pixels[1]}x{self.pixels[0]} pixels, "
        if self.settings.num_frames is not None:
            size += f"{counted(self.settings.num_frames, 'frame')}, "
        size += counted(self.settings.num_inference_steps, "step")
        tokens = f"{self.tokens.all:,}: grid of " + " + ".join(
            "x".join(map(str, grid)) for grid in self.tokens.grids
        )
        if self.tokens.text:
            also = " and all else, which are exact" if self.tokens.exact_text else ""
            tokens += f", and {self.tokens.text:,} of text{also}"
        columns = _share([g.columns for k in self.layers for g in k.keep], self.tokens.all)
        blocks = counted(self.attention.query_blocks, "block")
        rows = [
            ("model", f"{short_place(self.model)} ({self.transformer_class})"),
            ("profile", profile_text(self.profile, self.quality)),
            ("size", size + ("; two calls a step for guidance" if self.branches > 1 else "")),
            ("GPUs", "" if self.shared is None else sharing_text(self.shared.parallel)),
            ("tokens", tokens),
            (
                "attention",
                f"{blocks} of {self.attention.block_size_q} queries, each keeps {columns}",
            ),
        ]
        if self.attention.precision == "fp8":
            rows.append(("", "in 8 bits (int8 and FP8) at dense steps and refreshes"))
        for number, kind in enumerate(self.layers):
            name = f"{kind.name}: " if len(self.layers) > 1 else ""
            of = f"of {kind.mlp.neurons:,} neurons"
            kept = _share([group.neurons for group in kind.keep], kind.mlp.neurons, of)
            blocks = counted(kind.mlp.token_blocks, "block")
            text = f"{name}{blocks} of {kind.mlp.block_size} tokens, each recomputes {kept}"
            rows.append(("" if number else "MLP", text))
        schedule = self.schedule
        counts = ", ".join(f"{count} {action}" for action, count in schedule.counts.items())
        rows.append(("schedule", counts))
        if schedule.full_steps is None:
            return [*rows, ("", f"in order: {schedule.actions}")]
        full = ranges_text(schedule.full_steps).replace(",", ", ")
        return [*rows, ("", schedule.actions), ("", f"in full: {full}")]

    @property
    def _part_times(self) -> Rows:
        """Times of a sparse and a dense step of a layer, each of which may be the faster."""
        texts = [
            f"{name} of {kind.name}: {milliseconds_text(part.step.sparse)} sparse, "
            f"{milliseconds_text(part.step.dense)} dense (estimated)"
            for kind in self.layers
            for name, part in (("attention", kind.attention), ("MLP", kind.mlp))
            if part.step is not None
        ]
        return [("" if number else "one layer", text) for number, text in enumerate(texts)]

    @property
    def _budgets(self) -> Rows:
        """What each group of layers keeps, where the profile tells layers of a kind apart."""
        rows: Rows = []
        for kind in self.layers:
            for group in kind.keep if any(len(k.keep) > 2 for k in self.layers) else ():
                shares = [
                    f"{name} {'dense' if count is None else _share([count], total, of)}"
                    for name, count, total, of in (
                        ("attention", group.columns, self.tokens.all, "columns"),
                        ("MLP", group.neurons, kind.mlp.neurons, "neurons"),
                    )
                ]
                text = f"{kind.name} {ranges_text(group.layers)}: {', '.join(shares)}"
                rows.append(("" if rows else "keep", text))
        return rows

    @property
    def _reasons(self) -> Rows:
        rows: Rows = []
        for part in PARTS:
            counts: Counter[str] = Counter()
            for kind in self.layers:
                counts.update((kind.attention if part == "attention" else kind.mlp).dense)
            for reason, count in counts.items():
                layers = counted(count, "layer")
                rows.append(("dense", f"{PART_NAMES[part]} of {layers}: {reason}"))
        return rows

    # Memory.

    @property
    def _on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def _cache_table(self) -> Table:
        memory, kinds = self.memory, [kind.name for kind in self.layers]
        where = ["on GPU", "on host", "GPU slots"] if self._on_gpu else []
        rows = [
            [name]
            + [_size(sizes.layer.get(kind, 0)) for kind in kinds]
            + [_size(sizes.total)]
            + [_size(n) for n in (sizes.device, sizes.host, sizes.slots) if self._on_gpu]
            for name, sizes in self.caches.items()
        ]
        if rows:
            places = (memory.caches_on_device, memory.caches_on_host, memory.slots)
            rows.append(
                ["all"]
                + [_size(sum(s.layer.get(k, 0) for s in self.caches.values())) for k in kinds]
                + [_size(sum(sizes.total for sizes in self.caches.values()))]
                + [_size(number) for number in places if self._on_gpu]
            )
        return Table(["cache", *(f"1 {kind}" for kind in kinds), "all", *where], rows)

    @property
    def _memory_rows(self) -> Rows:
        memory, on_gpu = self.memory, self._on_gpu
        each = "" if self.shared is None else ", on each of them"
        budget = "" if memory.vram is None else f" of {format_bytes(memory.vram)}"
        weights = [f"{name} {format_bytes(n)}" for name, n in self.weights.items() if n is not None]
        left = memory.caches_wanted - sum(sizes.total for sizes in self.caches.values())
        host = f"{format_bytes(memory.caches_on_host)} of pinned memory for caches{each}"
        fp8 = "caches in FP8 (e4m3) with a scale for each row, half of their bytes"
        rows = [
            ("weights", f"{format_bytes(memory.weights)}: {', '.join(weights)}"),
            ("working", f"about {format_bytes(memory.working)} at most during a step"),
            (
                "GPU" if on_gpu else "memory",
                f"{format_bytes(memory.device)}{budget} for weights, work, caches and slots{each}",
            ),
            ("precision", fp8 if {"residual_scale", "token_scale"} & self.caches.keys() else ""),
            ("host", host if on_gpu and memory.caches_on_host else ""),
            ("left out", f"caches of {format_bytes(left)} do not fit" if left > 0 else ""),
        ]
        return [(name, text) for name, text in rows if text]

    # Time.

    @property
    def _time_parts(self) -> list[Facts | Table]:
        estimate = self.estimate
        if estimate is None:
            return []
        against = "against dense" if self.shared is None else "against dense, 1 GPU"
        rows = []
        for name, count in self.schedule.counts.items():
            seconds = estimate.steps[Action(name)]
            speedup = f"{estimate.stock / seconds:.2f}x" if seconds else "-"
            rows.append([name, str(count), seconds_text(seconds) if seconds else "-", speedup])
        steps = str(sum(self.schedule.counts.values()))
        rows.append(["all", steps, seconds_text(estimate.run), f"{estimate.speedup_run:.2f}x"])
        parts: list[Facts | Table] = [Table(["action", "steps", "a step", against], rows)]
        if self.schedule.counts.get("sparse"):
            parts.append(_similar_table(estimate))
        return [*parts, Facts(_time_rows(estimate))]

    @property
    def _shared_parts(self) -> list[Facts | Table]:
        shared, estimate = self.shared, self.estimate
        if shared is None:
            return []
        shown = Action.SPARSE if self.schedule.counts.get("sparse") else Action.DENSE
        timed, branched = shared.efficiency_run is not None, shared.parallel.guidance > 1
        columns = ["rank", *(["branch"] if branched else []), "heads", "tokens", "caches", "sends"]
        rows = []
        for rank in shared.ranks:
            cells = [str(rank.rank), *([str(rank.branch)] if branched else [])]
            cells += [str(rank.heads), f"{rank.tokens:,}", format_bytes(rank.cache_bytes)]
            cells.append(format_bytes(rank.sent_bytes[shown]))
            if rank.computing is not None and rank.busy is not None:
                cells += [seconds_text(rank.computing[shown]), f"{rank.busy:.0%}"]
            rows.append(cells)
        parts: list[Facts | Table] = [Table([*columns, *(["computes", "busy"] * timed)], rows)]
        step = f"bytes that a GPU sends and seconds that it computes are of a {shown.value} step"
        facts = [("rank", step)]
        if estimate is not None and shared.alone.steps is not None:
            parts.append(self._exchange_table(shared, estimate, shared.alone.steps))
            rates = estimate.rates
            facts.append(
                (
                    "exchange",
                    f"{rates.peer_link / 1e9:.0f} GB/s each way and {rates.peer_seconds * 1e3:.1f} "
                    "ms each (NVLink), as if nothing was computed meanwhile; efficiency is one "
                    "GPU's time over that of all",
                )
            )
        return [*parts, Facts(facts)]

    def _exchange_table(
        self, shared: Shared, estimate: Estimate, alone: Mapping[Action, float]
    ) -> Table:
        efficiency, rows = shared.efficiency or {}, []
        for action in map(Action, self.schedule.counts):
            sent = max(rank.sent_bytes[action] for rank in shared.ranks)
            times = [estimate.exchanging[action] if sent else 0.0]
            times += [estimate.steps[action], alone[action]]
            rows.append(
                [action.value, _size(sent)]
                + [seconds_text(seconds) if seconds else "-" for seconds in times]
                + [f"{efficiency[action]:.0%}" if action in efficiency else "-"]
            )
        runs = [seconds_text(estimate.run), seconds_text(shared.alone.run or 0.0)]
        rows.append(["all steps", "", "", *runs, f"{shared.efficiency_run:.0%}"])
        columns = ["action", "exchanged", "in", "a step", "on 1 GPU", "efficiency"]
        return Table(columns, rows)

    @property
    def _quality_table(self) -> Table:
        """Return what each quality would do, side by side."""
        rows = []
        for name, quality in self.qualities.items():
            counts = Counter(quality.counts)
            speedup = "-" if quality.speedup_run is None else f"{quality.speedup_run:.2f}x"
            full = counts["dense"] + counts["refresh"]
            cells = [name, str(full), str(counts["sparse"]), str(counts["skip"])]
            rows.append([*cells, f"{quality.work:.0%}", _size(quality.cache_bytes), speedup])
        columns = ["quality", "full", "sparse", "skipped", "work", "caches", "speed-up"]
        return Table(columns, rows)


def _share(counts: Iterable[int | None], total: int, of: str = "columns") -> str:
    """Return how many of all, and which share; from the least to the most where layers differ."""
    known = sorted(count for count in counts if count is not None)
    if not known:
        return "all of them (dense)"
    least, most = known[0], known[-1]
    if least == most:
        return f"{most:,} {of} ({most / total:.1%})"
    return f"{least:,} to {most:,} {of} ({least / total:.1%} to {most / total:.1%})"


def _size(count: int) -> str:
    return format_bytes(count) if count else "-"


def _similar_table(estimate: Estimate) -> Table:
    rows = []
    for layers in estimate.similar:
        moves, time = (layers.to_device, layers.to_host), layers.time
        seconds = max(moves) / estimate.rates.link_rate(*moves)
        times = (time.attention, time.mlp, time.rest, time.total)
        rows.append(
            [f"{layers.layers} {layers.name}"]
            + [f"{part * 1e3:.1f} ms" for part in times]
            + [_size(sum(moves)), f"{seconds * 1e3:.1f} ms" if sum(moves) else "-"]
        )
    columns = ["sparse layers", "attention", "MLP", "other", "all", "transfer", "takes"]
    return Table(columns, rows)


def _time_rows(estimate: Estimate) -> Rows:
    rates, rows = estimate.rates, []
    if estimate.moving:
        back = f" and {format_bytes(estimate.to_host)} back" if estimate.to_host else ""
        hidden = estimate.transfers_hidden
        share = "all of it" if hidden >= HIDDEN_ENOUGH else f"{hidden:.0%}"
        rows.append(
            (
                "transfers",
                f"a sparse step brings {format_bytes(estimate.to_device)}{back} in "
                f"{seconds_text(estimate.moving)}, {share} behind "
                f"{seconds_text(estimate.computing)} of computation",
            )
        )
    source = "measured just now" if rates.measured else "not measured here"
    rows.append(
        (
            "estimate",
            f"denoising alone, compiled blocks, one {rates.device} ({source}): attention "
            f"{rates.attention / 1e12:.0f} and linears {rates.linear / 1e12:.0f} TFLOP/s, memory "
            f"{rates.memory / 1e12:.2f} TB/s, host link {rates.link / 1e9:.0f} GB/s each way",
        )
    )
    return rows
