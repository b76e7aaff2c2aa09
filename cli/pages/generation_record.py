"""The report of a generation, read back: its calls put together to denoising steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from chipsparse.cache.kinds import PARTS
from chipsparse.cli.pages.json_values import Values

ACTIONS = ("dense", "refresh", "sparse", "skip")
PART_TITLES = {"attention": "attention columns", "mlp": "MLP neurons"}
NO_LAYERS = "Nothing was sparse, or the generation broke off before anything could be recorded."


@dataclass(frozen=True)
class LayerCall:
    """A layer's attention or MLP in one transformer call.

    Attributes:
        layer: number of the block.
        part: "attention" or "mlp".
        action: "dense", "refresh" or "sparse".
        kept: share that was computed.
    """

    layer: int
    part: str
    action: str
    kept: float


@dataclass(frozen=True)
class Call:
    """A transformer call; see `StepRecord` for what the values are."""

    step: int
    branch: str
    transformer: str
    action: str
    finished: bool
    seconds: float | None
    layers: Sequence[LayerCall]
    predicted_change: float | None
    forecast: bool
    bytes_to_device: float
    bytes_to_host: float
    cache_bytes: float | None
    host_bytes: float | None
    allocated_bytes: float | None
    peak_allocated_bytes: float | None


@dataclass(frozen=True)
class Step:
    """All calls of a denoising step, one for each guidance branch.

    Attributes:
        number: from 0.
        calls: at least one.
    """

    number: int
    calls: Sequence[Call]

    @property
    def action(self) -> str:
        """What the calls did, the fullest of it."""
        return min((call.action for call in self.calls), key=ACTIONS.index)

    @property
    def action_text(self) -> str:
        """The action, and what else a table says of it."""
        done = self.action if self.finished else f"{self.action}, broke off"
        return "skipped, forecast" if any(call.forecast for call in self.calls) else done

    @property
    def seconds(self) -> float:
        """Of all calls together; 0 where none was measured."""
        return sum(call.seconds or 0.0 for call in self.calls)

    @property
    def finished(self) -> bool:
        """Whether every call came to its end."""
        return all(call.finished for call in self.calls)

    def cells(self, part: str) -> dict[int, tuple[str, float]]:
        """Action and mean share of every layer's part; nothing of a skipped step."""
        found: dict[int, list[LayerCall]] = {}
        for call in self.calls:
            for each in call.layers:
                if each.part == part:
                    found.setdefault(each.layer, []).append(each)
        return {
            layer: (
                min((each.action for each in calls), key=ACTIONS.index),
                statistics.fmean(each.kept for each in calls),
            )
            for layer, calls in found.items()
        }

    def computed(self, part: str) -> float | None:
        """Mean share over all layers: 1 where all was computed, 0 where the step was skipped."""
        if self.action == "skip":
            return 0.0
        shares = [kept for _, kept in self.cells(part).values()]
        return statistics.fmean(shares) if shares else None

    def largest(self, name: str) -> float | None:
        """The largest value of a field of its calls; None where it was not recorded."""
        values = [getattr(call, name) for call in self.calls]
        return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True)
class Comparison:
    """The sparse generation against the dense one.

    Attributes:
        speedup: of the denoising.
        psnr_db: None where both are the same.
        ssim: None where the pictures are too small for it.
    """

    speedup: float
    psnr_db: float | None
    ssim: float | None


@dataclass(frozen=True)
class GenerationRecord:
    """A generation.

    Attributes:
        values: the whole file, for what is only quoted.
        request: prompt and settings, where the command wrote it.
        steps: in order.
        steps_total: of the schedule; none of those before the first of `steps` was to be made, as
            where a generation starts from a picture.
        layers: of the model.
        comparison: with dense, if one was made.
        denoising_seconds: of the dense and the sparse run, as far as they are known.
        files: the name of each clip that was written, by kind.
    """

    values: Values
    request: Values
    steps: Sequence[Step]
    steps_total: int
    layers: int
    comparison: Comparison | None
    denoising_seconds: dict[str, float]
    files: dict[str, str]

    @property
    def steps_asked(self) -> int:
        """How many steps there were to be."""
        return self.steps_total - (self.steps[0].number if self.steps else 0)


def read_generation(values: Values) -> GenerationRecord:
    """Raises `UserError` where the file is damaged."""
    entries = values.objects("steps")
    calls = [_call(each) for each in entries]
    if calls:  # nothing is computed without a config
        values.require("config")
    totals = [each.index("steps_total") for each in entries if "steps_total" in each]
    numbers = sorted({call.step for call in calls})
    compared = values.object("comparison")
    return GenerationRecord(
        values=values,
        request=values.object("request"),
        steps=[Step(number, [call for call in calls if call.step == number]) for number in numbers],
        steps_total=max([*totals, *(number + 1 for number in numbers)], default=0),
        layers=1 + max((each.layer for call in calls for each in call.layers), default=-1),
        comparison=_comparison(compared) if compared.content else None,
        denoising_seconds=values.object("denoising_seconds").numbers_by_name(),
        files=_clip_names(values.object("files")),
    )


def _clip_names(files: Values) -> dict[str, str]:
    """The name of each clip, from its files; a report of an older version has the name alone."""
    return {
        kind: _clip_name(files.texts(kind)) if isinstance(names, list) else files.text(kind)
        for kind, names in files.content.items()
        if names
    }


def _clip_name(files: list[str]) -> str:
    """``out.png`` for the numbered frames ``out-000.png``, ``out-001.png``, ..."""
    first = Path(files[0])
    if len(files) == 1:
        return str(first)
    return str(first.with_name(first.stem.rpartition("-")[0] + first.suffix))


def _call(entry: Values) -> Call:
    return Call(
        step=entry.index("step"),
        branch=entry.text("branch"),
        transformer=entry.text("transformer"),
        action=entry.choice("action", ACTIONS),
        finished=entry.flag("finished"),
        seconds=entry.number_or_none("seconds"),
        layers=[
            LayerCall(
                each.index("layer"),
                each.choice("part", PARTS),
                each.choice("action", ACTIONS),
                each.number("kept"),
            )
            for each in entry.objects("layers")
        ],
        predicted_change=entry.number_or_none("predicted_change"),
        forecast=entry.flag("forecast"),
        bytes_to_device=entry.number("bytes_to_device"),
        bytes_to_host=entry.number("bytes_to_host"),
        cache_bytes=entry.number_or_none("cache_bytes"),
        host_bytes=entry.number_or_none("host_bytes"),
        allocated_bytes=entry.number_or_none("allocated_bytes"),
        peak_allocated_bytes=entry.number_or_none("peak_allocated_bytes"),
    )


def _comparison(entry: Values) -> Comparison:
    return Comparison(
        entry.number("speedup"), entry.number_or_none("psnr_db"), entry.number_or_none("ssim")
    )


def known(values: Iterable[float | None]) -> list[float]:
    """Those that were recorded."""
    return [value for value in values if value is not None]
