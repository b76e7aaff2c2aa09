"""Quality over speed of chipsparse, static windows and diffusers' own caches, alone and stacked.

All in one process, in an order that is shuffled for every prompt, and paired by prompt and seed
with the stock model. There is one record for every clip; a run that is started again with the same
file goes on where it was. Speed is told in two ways: processor time of the denoising loop, for
machines that are not quiet, and the multiply-adds that were really done.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.clips import Clips, Workload
from benchmarks.computed_work import WorkCounter
from benchmarks.contact_sheet import contact_sheet
from benchmarks.peer_caches import CacheRun, cached, calibrated_ratios
from benchmarks.peer_rows import DENSE, Row, rows
from benchmarks.records import Record, environment
from benchmarks.run import Run
from chipsparse.quality import flicker, psnr, ssim

OP = "peers"
COLUMNS = {
    "model": "",
    "method": "",
    "setting": "",
    "prompts": "",
    "speedup": ".2f",
    "work": ".1%",
    "psnr_median": ".1f",
    "psnr_min": ".1f",
    "ssim_median": ".3f",
    "flicker": ".2f",
    "refused": "",
}
FIRST = Row(DENSE, "first")
CALIBRATION = {"method": "MagCache", "setting": "calibration", "seed": None}
# What makes a clip the same.
IDENTITY = ("model", "method", "setting", "prompt", "seed", "steps", "frames")


def run(
    workload: Workload,
    results: Run,
    *,
    steps: int,
    frames: int | None = None,
    sheet: Path | None = None,
) -> None:
    """Measures what the results lack, one record per clip.

    Args:
        workload: model and prompts.
        results: with what was measured before; grows.
        steps: denoising steps.
        frames: of a clip, None for the profile's.
        sheet: a PNG of what this run made of its first prompt, row by row, the stock clip first.
    """
    bench = _Bench(workload, results, steps=steps, frames=frames)
    for seed, prompt in enumerate(workload.prompts):
        made = bench.measure(seed, prompt)
        if sheet is not None and made:
            contact_sheet(torch.cat(made)).save(sheet)
            sheet = None


def earlier(path: Path | None) -> list[Record]:
    """The records of a file, none where there is no file yet."""
    if path is None or not path.exists():
        return []
    found: list[Record] = json.loads(path.read_text(encoding="utf-8"))
    return found


def summaries(records: Sequence[Record]) -> list[Record]:
    """One record per model, method and setting: medians over its clips.

    ``speedup`` is the median of dense processor seconds over the clip's, ``work`` that of the share
    of dense's multiply-adds, ``flicker`` that of the clip's over dense's. What was refused has its
    reason and no numbers.
    """
    clips = [record for record in records if record["op"] == OP and "refused" in record]
    baselines: dict[tuple[Any, ...], list[float]] = {}
    for clip in clips:
        if clip["method"] == DENSE:
            baselines.setdefault(_pair(clip), []).append(clip["processor_seconds"])
    grouped: dict[tuple[str, str, str], list[Record]] = {}
    for clip in clips:
        grouped.setdefault((clip["model"], clip["method"], clip["setting"]), []).append(clip)
    return [
        {"model": model, "method": method, "setting": setting, **_medians(group, baselines)}
        for (model, method, setting), group in grouped.items()
    ]


def _pair(clip: Record) -> tuple[Any, ...]:
    """What a clip shares with the dense one that it is compared with."""
    return tuple(clip[name] for name in IDENTITY if name not in ("method", "setting"))


def _medians(clips: Sequence[Record], baselines: dict[tuple[Any, ...], list[float]]) -> Record:
    made = [clip for clip in clips if clip["refused"] is None]
    found: Record = {"prompts": len(clips), "refused": None}
    if not made:
        return found | {"refused": clips[0]["refused"]}
    # Equal clips have an infinite PSNR, which a file of records holds as null.
    psnrs = [math.inf if clip["psnr"] is None else clip["psnr"] for clip in made]
    speedups = [
        statistics.fmean(baselines[_pair(clip)]) / clip["processor_seconds"] for clip in made
    ]
    flickers = [
        clip["flicker"] / clip["dense_flicker"] for clip in made if clip["flicker"] is not None
    ]
    return found | {
        "speedup": statistics.median(speedups),
        "seconds": statistics.median(clip["processor_seconds"] for clip in made),
        "work": statistics.median(clip["work"] for clip in made),
        "psnr_median": statistics.median(psnrs),
        "psnr_min": min(psnrs),
        "ssim_median": statistics.median(clip["ssim"] for clip in made),
        "flicker": statistics.median(flickers) if flickers else None,
        "inert": all(psnr == math.inf for psnr in psnrs),
        "remarks": made[0]["remarks"],
    }


@dataclass(frozen=True)
class _Made:
    """A clip and the multiply-adds that it took."""

    clips: Clips
    multiply_adds: int


class _Bench:
    """Generates row by row and keeps what was measured."""

    def __init__(self, workload: Workload, results: Run, *, steps: int, frames: int | None) -> None:
        self._workload, self._results = workload, results
        self._changes = {"num_inference_steps": steps}
        if frames is not None:
            self._changes["num_frames"] = frames
        shown = None if workload.makes_images else workload.settings(**self._changes)["num_frames"]
        self._run = {"op": OP, "model": workload.name, "steps": steps, "frames": shown}
        self._rows = rows(workload.profile.sparsity, steps, video=not workload.makes_images)
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
        caches = self._prepared()
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
