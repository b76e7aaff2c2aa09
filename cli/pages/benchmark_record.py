"""What `chipsparse bench --json` prints."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator

from chipsparse.cli.pages.records import Count, FileRecord, Number, Record, Settings
from chipsparse.cli.views.names import command_text
from chipsparse.cli.wording import seconds_text
from chipsparse.common.byte_sizes import format_bytes
from chipsparse.config import Part

RESTLESS = 0.05  # share by which stock steps may differ before and behind the others


class Milliseconds(Record):
    """Of a layer, by the action of the step."""

    dense: Number
    refresh: Number
    sparse: Number


class LayerTimes(Record):
    """One layer of a kind; see `PartTimes`."""

    part: Part
    kind: str
    kept: Count
    total: Count
    baseline_ms: Number
    milliseconds: Milliseconds
    speedup: Number


class StepTimes(Record):
    """Denoising steps; see `chipsparse.cli.step_times.StepTimes`."""

    stock: Number
    stock_before: Number
    stock_after: Number
    patched: Mapping[str, Number] = {}
    counts: Mapping[str, Number] = {}
    stock_peak_bytes: Count | None = None
    patched_peak_bytes: Count | None = None
    fallbacks: Sequence[str] = ()
    stock_run: Number | None = None
    patched_run: Number | None = None
    speedup_run: Number | None = None

    @property
    def notes(self) -> list[str]:
        """What else there is to say of them."""
        notes = [f"fallback: {sentence}" for sentence in self.fallbacks]
        own, stock = self.patched_peak_bytes, self.stock_peak_bytes
        if own is not None and stock is not None:
            notes.append(
                f"Peak memory on the GPU: {format_bytes(own)}, stock {format_bytes(stock)}."
            )
        before, after = self.stock_before, self.stock_after
        if abs(after - before) > RESTLESS * abs(before):
            both = f"{seconds_text(before)} before the others and {seconds_text(after)} after them"
            notes.append(f"Stock steps took {both}: this machine's speed changes.")
        return notes


class Benchmark(FileRecord):
    """Times of single layers and of whole steps."""

    kind = "benchmark"
    marks = frozenset({"layers", "tokens", "command", "settings"})

    model: str
    transformer_class: str
    profile: str
    random_weights: bool = False
    device_name: str
    dtype: str
    versions: Mapping[str, str | None] = {}
    settings: Settings = Settings()
    tokens: Count
    heads: Count
    head_dim: Count
    layers: Sequence[LayerTimes] = ()
    dense: Sequence[str] = ()
    steps: StepTimes | None = None
    command: Annotated[str, AfterValidator(lambda text: command_text(shlex.split(text)))]

    @property
    def title(self) -> str:
        """The headline."""
        return f"Times on {self.device_name}"
