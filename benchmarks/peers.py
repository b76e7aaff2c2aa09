"""Quality over speed of several ways to generate: rows, such as those of `peer_rows`.

All in one process, in an order that is shuffled for every prompt, and paired by prompt and seed
with the stock model. There is one record for every clip; a run that is started again with the same
file goes on where it was. Speed is told in two ways: processor time of the denoising loop, for
machines that are not quiet, and the multiply-adds that were really done.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.clips import Clips, Workload
from benchmarks.computed_work import WorkCounter
from benchmarks.contact_sheet import contact_sheet
from benchmarks.peer_rows import Row
from benchmarks.peers_table import DENSE, IDENTITY
from benchmarks.records import Record, environment
from benchmarks.run import Run
from chipsparse.pipelines.diffusers_caches import CacheRun, cached, calibrated_ratios
from chipsparse.quality import flicker, psnr, ssim

FIRST = Row(DENSE, "first")
CALIBRATION = {"method": "MagCache", "setting": "calibration", "seed": None}


def run(
    workload: Workload,
    results: Run,
    rows: Sequence[Row],
    *,
    op: str,
    steps: int,
    frames: int | None = None,
    only: str | None = None,
    first: int = 0,
    sheet: Path | None = None,
) -> None:
    """Measures what the results lack, one record per clip.

    Args:
        workload: model and prompts.
        results: with what was measured before; grows.
        rows: what to compare.
        op: the benchmark's name.
        steps: denoising steps.
        frames: of a clip, None for the profile's.
        only: a regular expression that "method, setting" of a row must hold; None: all rows.
        first: number of the first prompt to take; a prompt's number is its seed.
        sheet: a PNG of what this run made of its first prompt, row by row, the stock clip first.
    """
    rows = [row for row in rows if re.search(only or "", f"{row.method}, {row.setting}")]
    bench = _Bench(workload, results, rows, op=op, steps=steps, frames=frames)
    for seed, prompt in list(enumerate(workload.prompts))[first:]:
        made = bench.measure(seed, prompt)
        if sheet is not None and made:
            contact_sheet(torch.cat(made)).save(sheet)
            sheet = None


@dataclass(frozen=True)
class _Made:
    """A clip and the multiply-adds that it took."""

    clips: Clips
    multiply_adds: int


class _Bench:
    """Generates row by row and keeps what was measured."""

    def __init__(
        self,
        workload: Workload,
        results: Run,
        rows: Sequence[Row],
        *,
        op: str,
        steps: int,
        frames: int | None,
    ) -> None:
        self._workload, self._results = workload, results
        self._changes = {"num_inference_steps": steps}
        if frames is not None:
            self._changes["num_frames"] = frames
        shown = None if workload.makes_images else workload.settings(**self._changes)["num_frames"]
        self._run = {"op": op, "model": workload.name, "steps": steps, "frames": shown}
        self._rows = rows
        self._work = WorkCounter()
        self._caches: CacheRun | None = None

    def measure(self, seed: int, prompt: str) -> list[torch.Tensor]:
        """What is not known of a prompt yet; the frames that were made, the stock clip's first."""
        missing = [
            row
            for row in self._rows
            if self._known({**_named(row), "prompt": prompt, "seed": seed}) is None
        ]
        if not missing:
            return []
        caches = self._prepared() if any(row.cache is not None for row in missing) else None
        stock = self._generate(FIRST, seed, prompt)
        frames = {FIRST: stock.clips.frames}
        facts = {**_named(FIRST), "prompt": prompt, "seed": seed}
        if self._known(facts) is None:
            self._keep({**facts, **_compared(stock, stock, [])})
        for row in random.Random(seed).sample(missing, len(missing)):
            try:
                with cached(caches, row.cache) as heard:
                    made = self._generate(row, seed, prompt)
            except Exception as error:
                if row.cache is None:
                    raise
                # That a cache cannot run here is a result, whatever it stumbles over.
                found: Record = {"refused": f"{type(error).__name__}: {error}"}
            else:
                found = _compared(made, stock, heard)
                frames[row] = made.clips.frames
            self._keep({**_named(row), "prompt": prompt, "seed": seed, **found})
        return [frames[row] for row in (FIRST, *self._rows) if row in frames]

    def _prepared(self) -> CacheRun:
        """What caches are made for, MagCache's ratios included; they are measured once."""
        if self._caches is None:
            pipe, steps = self._workload.pipe, self._run["steps"]
            known = self._known(CALIBRATION)
            if known is None:
                # With noise that no prompt is measured with.
                seed, prompt = len(self._workload.prompts), self._workload.prompts[0]
                ratios = calibrated_ratios(pipe, steps, lambda: self._generate(FIRST, seed, prompt))
                known = {**CALIBRATION, "ratios": ratios}
                self._keep(known)
            self._caches = CacheRun(pipe, steps, tuple(known["ratios"]))
        return self._caches

    def _generate(self, row: Row, seed: int, prompt: str) -> _Made:
        with self._work.of(self._workload.pipe.transformer):
            clips = self._workload.generate(
                row.config,
                prompts=[prompt],
                first_seed=seed,
                make_session=self._work.sessions(row.session),
                **self._changes,
            )
        return _Made(clips, self._work.multiply_adds)

    def _known(self, facts: Record) -> Record | None:
        """The record of such a clip from this run or an earlier one."""
        wanted = {**self._run, **facts}
        for record in self._results.records:
            if all(record.get(name) == wanted.get(name) for name in IDENTITY):
                return record
        return None

    def _keep(self, facts: Record) -> None:
        record = {**self._run, **facts, **environment(self._workload.device)}
        self._results.add(record)
        if "refused" in record:
            shown = record["refused"] or "{psnr:6.2f} dB  {work:6.1%} of the work".format(**record)
            print(f"{record['seed']} {record['method']}, {record['setting']}: {shown}", flush=True)


def _named(row: Row) -> Record:
    return {"method": row.method, "setting": row.setting}


def _compared(made: _Made, stock: _Made, heard: Sequence[str]) -> Record:
    """What a record says of a clip: how close to the stock one, and what it took."""
    clips, dense = made.clips, stock.clips
    frames, expected = clips.frames[0], dense.frames[0]
    moves = len(frames) > 2
    kept = [] if clips.report is None else [step.attention_kept for step in clips.report.steps]
    kept = [share for share in kept if share is not None]
    return {
        "refused": None,
        "psnr": psnr(expected, frames),
        "ssim": ssim(expected, frames),
        "flicker": flicker(frames) if moves else None,
        "dense_flicker": flicker(expected) if moves else None,
        "seconds": clips.seconds,
        "processor_seconds": clips.processor_seconds,
        "multiply_adds": made.multiply_adds,
        "work": made.multiply_adds / stock.multiply_adds,
        "actions": None if clips.report is None else dict(clips.report.actions()),
        "attention_kept": statistics.fmean(kept) if kept else None,
        "fallbacks": [] if clips.report is None else list(clips.report.fallbacks),
        "remarks": list(heard),
    }
