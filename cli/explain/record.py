"""The result of `chipsparse explain`: what runs sparse, how much memory it takes, how much faster.

Sizes are in bytes, times in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from chipsparse.cli.settings import GenerationSettings
from chipsparse.cli.views.names import profile_text, short_place
from chipsparse.cli.views.sections import Facts, Record, Result, Section, Table
from chipsparse.cli.views.units import PART_NAMES, counted, seconds_text, sharing_text
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import Action, ranges_text
from chipsparse.config import Part as LayerPart
from chipsparse.parallel.degrees import Parallel
from chipsparse.profiles.published import PublishedPsnr
from chipsparse.sparse.cache.memory_plan import KeptBytes
from chipsparse.sparse.cost_model.layer_times import PartSeconds, milliseconds_text
from chipsparse.sparse.cost_model.run_times import RunEstimate


class PartLayers(Record):
    """The attention or the MLPs of all layers of one kind."""

    kind: str  # the model's name for such layers
    part: LayerPart
    sparse: int  # layers that run sparse
    dense: Mapping[str, int]  # layers that do not, by the reason
    blocks: int  # of rows that choose together
    block_size: int  # rows of a block
    total: int  # columns or neurons of a layer
    kept: Mapping[int, Sequence[int]]  # layers by the columns or neurons that each keeps
    # Seconds of the layer that keeps most; None where not known, or where the config has it dense.
    step: PartSeconds | None

    @property
    def name(self) -> str:
        """The kind of the layers, and which part of them."""
        return f"{self.kind} {PART_NAMES[self.part]}"

    @property
    def row(self) -> list[str]:
        """Cells of the table: counts, shares, and milliseconds where a cost model knows them."""
        share = ["all", "-"]
        times = ["-", "-"]
        if self.kept:
            most = max(self.kept)
            share = [f"{most:,} of {self.total:,}", f"{most / self.total:.1%}"]
        if self.step is not None:
            times = [milliseconds_text(self.step.sparse), milliseconds_text(self.step.dense)]
        sparse = f"{self.sparse}/{self.sparse + sum(self.dense.values())}"
        return [self.name, sparse, f"{self.blocks}x{self.block_size}", *share, *times]


class Memory(Record):
    """The memory of one process."""

    weights: int  # as far as they are known
    working: int  # of a transformer call, besides weights and caches
    caches_wanted: int  # all that the profile asks for
    device: int  # weights, work, caches and slots; on a CPU, where all memory is one, all
    vram: int | None  # budget of the device
    ram: int | None  # budget of host memory
    precision: str  # of caches: "model" or "fp8"


class RankForecast(Record):
    """One of several processes."""

    rank: int
    branch: int | None  # of guidance; None where it computes all
    heads: int  # of attention
    tokens: int  # of a call, outside of attention, with those of the text
    cache_bytes: int  # wherever they live
    sent_bytes: Mapping[Action, int]  # to others, in a step of each action


class Shared(Record):
    """The processes of a generation."""

    parallel: Parallel
    ranks: Sequence[RankForecast]
    # Of a step of each action, the time on one device over that of all processes together; None
    # where times are not known.
    efficiency: Mapping[Action, float] | None
    efficiency_run: float | None  # the same of all steps


class Quality(Record):
    """One quality of the profile."""

    counts: Mapping[str, int]  # steps by action
    work: float  # operations over those of a dense generation
    cache_bytes: int
    speedup_run: float | None  # None where times are not known
    published: PublishedPsnr | None  # PSNR of step caches near this speed-up on real weights

    @property
    def row(self) -> list[str]:
        """Cells of the table, without the name: steps, work, caches and speed-ups."""
        counts = Counter(self.counts)
        steps = counts["dense"] + counts["refresh"], counts["sparse"], counts["skip"]
        speedup = "-" if self.speedup_run is None else f"{self.speedup_run:.2f}x"
        published = "-" if self.published is None else str(self.published)
        work = f"{self.work:.0%}"
        caches = _size(self.cache_bytes)
        return [*map(str, steps), work, caches, speedup, published]


class Explanation(Result):
    """The forecast of one generation; of several processes, of the one with the largest share."""

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
    grids: Sequence[Sequence[int]]  # frames, rows and columns of the video or image tokens
    tokens: int  # of a transformer call, with those of the text
    text_tokens: int
    attention_precision: str
    layers: Sequence[PartLayers]
    schedule: str
    counts: Mapping[str, int]  # steps by action
    full_steps: Sequence[int] | None  # where the schedule lists them
    measured_speed: str  # of this class with this profile, in words
    measured_quality: str  # likewise
    weights: Mapping[str, int | None]
    memory: Memory
    caches: Mapping[str, KeptBytes]
    estimate: RunEstimate | None
    shared: Shared | None
    qualities: Mapping[str, Quality]
    notes: Sequence[str]

    def sections(self, *, verbose: bool = False) -> list[Section]:
        """Return the generation, its layers, caches and memory, then all qualities."""
        layers = ["layers", "sparse", "blocks", "keeps", "share", "sparse step", "dense"]
        qualities = ["quality", "full", "sparse", "skipped", "work", "caches"]
        qualities += ["speed-up", "other caches"]
        whys = ((part.name, *item) for part in self.layers for item in part.dense.items())
        dense = [("dense", f"{name}, {counted(n, 'layer')}: {why}") for name, why, n in whys]
        parts = [
            self._generation(),
            Table(layers, [part.row for part in self.layers]),
            Facts(dense),
            self._caches(),
            self._memory(),
            *([] if self.estimate is None else self._times(self.estimate)),
            *([] if self.shared is None else [self._ranks(self.shared)]),
            Table(qualities, [[name, *quality.row] for name, quality in self.qualities.items()]),
            Facts(
                [
                    ("speed run", self.measured_speed),
                    ("quality measured on", self.measured_quality),
                ],
            ),
            Facts([("note", note) for note in self.notes]),
        ]
        # A section each, so that the names of facts line up within a part alone.
        return [Section("", [part]) for part in parts]

    def _generation(self) -> Facts:
        size = [f"{self.pixels[1]}x{self.pixels[0]} pixels"]
        if self.settings.num_frames is not None:
            size.append(counted(self.settings.num_frames, "frame"))
        size.append(counted(self.settings.num_inference_steps, "step"))
        guided = "; two calls a step for guidance" if self.branches > 1 else ""
        grids = " + ".join("x".join(map(str, grid)) for grid in self.grids)
        text = f", and {self.text_tokens:,} of text and conditions" if self.text_tokens else ""
        in_fp8 = self.attention_precision == "fp8"
        full = None if self.full_steps is None else ranges_text(self.full_steps)
        rows = [
            ("model", f"{short_place(self.model)} ({self.transformer_class})"),
            ("profile", profile_text(self.profile, self.quality)),
            ("size", ", ".join(size) + guided),
            ("GPUs", "" if self.shared is None else sharing_text(self.shared.parallel)),
            ("tokens", f"{self.tokens:,}: grid of {grids}{text}"),
            ("attention", "in 8 bits (int8 and FP8) at dense steps and refreshes" * in_fp8),
            ("schedule", ", ".join(f"{count} {action}" for action, count in self.counts.items())),
            ("", self.schedule),
            ("", "" if full is None else f"in full: {full.replace(',', ', ')}"),
        ]
        return Facts(rows)

    def _caches(self) -> Table:
        kinds = [*dict.fromkeys(part.kind for part in self.layers)]
        rows = {
            name: [
                *(sizes.layer.get(kind, 0) for kind in kinds),
                sizes.total,
                sizes.device,
                sizes.host,
                sizes.slots,
            ]
            for name, sizes in self.caches.items()
        }
        if rows:
            rows["all"] = [sum(column) for column in zip(*rows.values(), strict=True)]
        return Table(
            ["cache", *(f"1 {kind}" for kind in kinds), "all", "on device", "on host", "slots"],
            [[name, *map(_size, sizes)] for name, sizes in rows.items()],
        )

    def _memory(self) -> Facts:
        memory = self.memory
        on_gpu = self.device.startswith("cuda")
        on_each = "" if self.shared is None else ", on each of them"
        budget = "" if memory.vram is None else f" of {format_bytes(memory.vram)}"
        weights = [f"{name} {format_bytes(n)}" for name, n in self.weights.items() if n is not None]
        on_host = sum(sizes.host for sizes in self.caches.values())
        total = f"{format_bytes(memory.device)}{budget} for weights, work, caches and slots"
        fp8 = "caches in FP8 (e4m3) with a scale for each row, half of their bytes"
        rows = [
            ("weights", f"{format_bytes(memory.weights)}: {', '.join(weights)}"),
            ("working", f"about {format_bytes(memory.working)} at most during a step"),
            ("GPU" if on_gpu else "memory", f"{total}{on_each}"),
            ("precision", fp8 if memory.precision == "fp8" else ""),
        ]
        if on_gpu and on_host:
            rows.append(("host", f"{format_bytes(on_host)} of pinned memory for caches{on_each}"))
        return Facts(rows)

    def _times(self, estimate: RunEstimate) -> tuple[Table, Facts]:
        """Return the time of a step of each action, and what it is estimated from."""
        shared = self.shared
        rates = estimate.rates
        columns = ["action", "steps", "a step", "against dense"]
        rows = []
        for action, count in self.counts.items():
            seconds = estimate.steps[Action(action)]
            speedup = "-" if action == "skip" else f"{estimate.stock / seconds:.2f}x"
            rows.append([action, str(count), _time(seconds), speedup])
        steps = str(sum(self.counts.values()))
        rows.append(["all", steps, seconds_text(estimate.run), f"{estimate.speedup_run:.2f}x"])
        if shared is not None and shared.efficiency is not None:
            columns = [*columns[:-1], "against dense, 1 GPU", "exchanges", "efficiency"]
            for row, action in zip(rows, map(Action, self.counts), strict=False):
                efficiency = shared.efficiency.get(action)
                row.append(_time(estimate.exchanging[action]))
                row.append("-" if efficiency is None else f"{efficiency:.0%}")
            rows[-1] += ["", f"{shared.efficiency_run:.0%}"]
        facts = []
        if estimate.moving:
            back = f" and {format_bytes(estimate.to_host)} back" if estimate.to_host else ""
            transfers = (
                f"a sparse step brings {format_bytes(estimate.to_device)}{back} in "
                f"{seconds_text(estimate.moving)}, {estimate.hidden:.0%} behind "
                f"{seconds_text(estimate.computing)} of computation"
            )
            facts.append(("transfers", transfers))
        if shared is not None:
            exchanges = (
                f"{rates.peer_link / 1e9:.0f} GB/s each way and {rates.peer_seconds * 1e3:.1f} "
                "ms each (NVLink), as if nothing was computed meanwhile"
            )
            facts.append(("exchanges", exchanges))
        source = "measured just now" if rates.measured else "not measured here"
        basis = (
            f"denoising alone, compiled blocks, one {rates.device} ({source}): attention "
            f"{rates.attention / 1e12:.0f} and linears {rates.linear / 1e12:.0f} TFLOP/s, memory "
            f"{rates.memory / 1e12:.2f} TB/s, host link {rates.link / 1e9:.0f} GB/s each way"
        )
        return Table(columns, rows), Facts([*facts, ("estimate", basis)])

    def _ranks(self, shared: Shared) -> Table:
        step = Action.SPARSE if "sparse" in self.counts else Action.DENSE
        rows = []
        for rank in shared.ranks:
            branch = "both" if rank.branch is None else str(rank.branch)
            sizes = format_bytes(rank.cache_bytes), _size(rank.sent_bytes[step])
            rows.append([str(rank.rank), branch, str(rank.heads), f"{rank.tokens:,}", *sizes])
        columns = ["rank", "branch", "heads", "tokens", "caches", f"sends, {step.value} step"]
        return Table(columns, rows)


def _size(count: int) -> str:
    return format_bytes(count) if count else "-"


def _time(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "-"
