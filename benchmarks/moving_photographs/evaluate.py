"""``python -m benchmarks photographs``: quality of all methods on the model of moving photographs.

Under ``torchrun`` the clips are shared over the processes. The records of each clip are a file of
their own in ``--out``; a further call makes what is missing there. A call of one process, or one
with ``--count 0``, merges them: it prints the tables, and ``--json`` has all records.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.curves import (
    DENSE,
    OURS,
    SKIPS,
    at_share,
    by_workload,
    decibels,
    generation_of,
    qualities,
    quality_rows,
)
from benchmarks.equal_work import SIZE, Entry, Lab, entries, run_fields
from benchmarks.records import Record, Run, read, table, write
from chipsparse.config import SparsityConfig
from chipsparse.cost_model.layer_times import MEANS_SHARE

OP = "moving_photographs"
# Times of HunyuanVideo's steps at 720p over a dense one; of a sparse step by its share of columns:
# 0.20 with 10 %, 0.29 with 20 %.
PRICES = {"dense": 1.0, "refresh": 1.14, "skip": 0.0}
SPARSE_FIXED, SPARSE_COLUMNS = 0.11, 0.9
SPEEDUPS = {f"{speedup:g}x": 1 / speedup for speedup in (2.5, 3.6, 5, 7)}
BASE = SparsityConfig().override(
    {
        "attention.density": 0.1,
        "attention.delta_rule": "means",
        "mlp.density": "dense",
        "schedule.first_dense_layers": 1,
        "schedule.forecast": 0.5,
        "schedule.forecast_after": 0.2,
        "memory.offload": "never",
        "cuda_graphs": "never",  # not worth their capture for a single clip
    }
)
SKIP_SHARES = (0.12, 0.16, 0.2, 0.24, 0.28, 0.34, 0.4, 0.5)
# Shares of the steps in full and sparse; draft, fast, balanced and others.
SPARSE_SHARES = ((0.1, 0.14), (0.12, 0.3), (0.18, 0.34), (0.08, 0.22), (0.14, 0.18), (0.22, 0.24))
# Which of the other methods' settings: those about their published speed-ups, and faster ones.
RIVALS = "|".join(
    (
        r"fewer steps",
        r"MagCache, first 20%, at most 4 skipped, threshold 0.(06|12|25)$",
        r"MagCache, first 10%, at most 12 skipped, threshold (0.25|0.5|1)$",
        r"SeaCache, order 0.* threshold 0.(2|35)$",
        r"SeaCache, order 1.* threshold (0.2|0.35|0.6|1)$",
        r"TaylorSeer, .*first 3, order 1, every [23469]$",
    )
)
# PSNR by speed-up of HunyuanVideo (540p to 720p, 50 steps), as their papers print it.
PUBLISHED = {
    "MagCache": {2.25: 34.5, 2.63: 31.8},
    "SeaCache": {2.01: 32.4, 3.14: 26.5},
    "TaylorSeer": {1.88: 24.1, 2.65: 20.4},
    "fewer steps": {1.95: 20.0},
}
PUBLISHED_CHANGE = "L1 of MiniMax-H3: 0.173 (0.066 to 0.363)"
ACTIONS = {"D": "dense", "R": "refresh", "S": "sparse", "skipped": "skip"}
COLUMNS = {
    **dict.fromkeys(("method", "variant", "setting"), "s"),
    **{"cost": ".3f", "speedup": ".2f", **dict.fromkeys(ACTIONS, ".0f")},
    **{"psnr": ".1f", "worst": ".1f", "ahead": "+.1f", "worst ahead": "+.1f", "clips": "d"},
}
FIRST_SCENE = 1 << 62  # training draws no scene from here on
PICTURE_FRAMES = 4
TINY = {"size": "64x64x5", "steps": 12, "count": 2}


def ways(steps: int, profiles: Sequence[Path] = ()) -> list[Entry]:
    """All ways but dense: ours, those of profiles, fewer steps, and diffusers' caches."""
    own = (OURS, SKIPS)
    others = entries(steps, profiles)
    chosen = [one for one in others if one.method in own or re.match(RIVALS, str(one))]
    return [*_skips(steps), *_sparse(steps), *chosen]


def _skips(steps: int) -> Iterator[Entry]:
    for share in SKIP_SHARES:
        schedule = {"schedule.full_share": share, "schedule.sparse_steps": 0.0}
        yield Entry(SKIPS, "", f"{round(share * steps)} in full", BASE.override(schedule))


def _sparse(steps: int) -> Iterator[Entry]:
    def entry(variant: str, setting: str, rule: str, **schedule: Any) -> Entry:
        changes = {f"schedule.{name}": value for name, value in schedule.items()}
        config = BASE.override({"attention.delta_rule": rule, **changes})
        return Entry(OURS, variant, setting, config)

    for rule, shares in (("means", SPARSE_SHARES), ("difference", SPARSE_SHARES[:3])):
        for full, sparse in shares:
            setting = f"{round(full * steps)} in full, {round(sparse * steps)} sparse"
            yield entry(rule, setting, rule, full_share=full, sparse_steps=sparse)
    published = {"warmup_steps": 6, "refresh_every": 10}
    yield entry("published", "warm-up 6, refresh every 10", "difference", **published)


def cost(calls: Mapping[str, int], density: float) -> float:
    """The time of a generation at HunyuanVideo's prices, over the dense one's.

    Args:
        calls: how often each action was.
        density: mean share of the columns over the layers that are sparse.
    """
    prices = {**PRICES, "sparse": SPARSE_FIXED + SPARSE_COLUMNS * density}
    return sum(prices[action] * count for action, count in calls.items()) / sum(calls.values())


def density(config: SparsityConfig, layers: int) -> float:
    """The mean share of columns over the layers that may be sparse, means as their cost."""
    shares: list[Any] = [config.attention.density] * layers
    for budget in config.layers:
        for chosen in budget.ranges if budget.attention is not None else ():
            for layer in chosen:
                shares[layer] = budget.attention
    sparse = shares[config.schedule.first_dense_layers :]
    mean = statistics.fmean(1.0 if share == "dense" else share for share in sparse or [1.0])
    return mean + MEANS_SHARE * (config.attention.delta_rule == "means")


def watched_dense() -> Any:
    """The stock model; its facts are the relative changes from each step's velocity to the next."""
    from chipsparse.experiments.engine import Applied, Way

    @contextmanager
    def apply(pipe: Any) -> Iterator[Applied]:
        step, last, changes = pipe.scheduler.step, None, list[torch.Tensor]()

        def watched(velocity: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if last is not None:
                change = velocity - last
                by_norm = [change.norm(p=p) / last.norm(p=p) for p in (1, 2)]
                changes.append(torch.stack(by_norm))
            last = velocity.clone()
            return step(velocity, *args, **kwargs)

        def facts(generation: Any) -> Mapping[str, Any]:
            made = torch.stack(changes[1 - len(generation.steps) :]).cpu()  # no warm-up's
            return {"change_l1": made[:, 0].tolist(), "change_l2": made[:, 1].tolist()}

        pipe.scheduler.step = watched
        try:
            yield Applied(facts=facts)
        finally:
            del pipe.scheduler.step

    return Way(DENSE, apply, method=DENSE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument(
        "--checkpoint", type=Path, help="folder of the model; with --tiny that of a tiny training"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the clips' records")
    parser.add_argument("--size", default="512x512x61", help="HEIGHTxWIDTHxFRAMES")
    parser.add_argument("--first", type=int, default=0, help="number of the first clip, from 0")
    parser.add_argument("--count", type=int, default=24, help="how many clips")
    parser.add_argument("--steps", type=int, help="denoising steps, default the model's")
    parser.add_argument("--guidance", type=float, help="default the model's")
    parser.add_argument("--shift", type=float, help="of noise levels, default the model's")
    parser.add_argument("--words", type=float, default=0.8, help="share of words that captions say")
    parser.add_argument("--profiles", type=Path, nargs="*", default=[], help="further ones of ours")
    parser.add_argument("--case", default="", help="only ways whose name holds this expression")
    parser.add_argument("--limit", type=float, default=540, help="seconds of this call")
    parser.add_argument("--pictures", type=Path, help="folder for some frames of each clip")


def run(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Makes the clips that are missing, paired with dense; merges them in one process."""
    begun, world = time.monotonic(), int(os.environ.get("WORLD_SIZE", 1))
    if args.tiny:
        vars(args).update(TINY)
    if args.count:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        _make(args, device, dtype, begun + args.limit)
    if world == 1:
        to.add(*read(*sorted(args.out.glob("*.json"))))
        for name, clips in by_workload(to.records).items():
            print(f"## {name}\n\n{report(clips)}\n")


def _make(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, end: float) -> None:
    """Makes the missing clips of this process, up to a time."""
    from benchmarks.moving_photographs.clips import Scene
    from benchmarks.moving_photographs.model import read_checkpoint
    from chipsparse.experiments.engine import Sample
    from chipsparse.experiments.lpips import Lpips
    from chipsparse.experiments.quality import compare_clips
    from chipsparse.experiments.store import Store

    args.out.mkdir(parents=True, exist_ok=True)
    model = read_checkpoint(args.checkpoint)
    facts = model.facts
    asked = {name: getattr(args, name) for name in ("steps", "guidance", "shift")}
    facts |= {name: value for name, value in asked.items() if value is not None}
    settings: dict[str, Any] = dict(zip(SIZE, map(int, args.size.split("x")), strict=True))
    settings |= {"num_inference_steps": facts["steps"], "guidance_scale": facts["guidance"]}

    def sample(index: int) -> Sample:
        scene = Scene.drawn(FIRST_SCENE + index, facts["photographs"])
        return Sample(index, scene.caption(args.words, index), max(0, index), f"clip {index}")

    samples = [sample(index) for index in range(args.first, args.first + args.count)]
    name = "photographs after {trained_steps} steps, guidance {guidance:g}, ".format(**facts)
    name += f"{args.words:.0%} of the words"
    shared = run_fields(OP, name, settings, facts["shift"])
    lab = Lab(
        model.pipeline(dtype, device),
        settings,
        shared,
        samples,
        calibrating=sample(-1),  # one that is not compared
        store=Store(),
        dense=watched_dense(),
        lpips=lambda *_: Lpips(None, "not asked for"),
        compare=partial(compare_clips, psnr_alone=True),
        timed=False,
        write=None if args.pictures is None else partial(_picture, args.pictures),
    )
    known = {str(entry): entry for entry in ways(lab.steps, args.profiles)}
    known = {way: entry for way, entry in known.items() if re.search(args.case, way)}
    layers = len(model.transformer.blocks)
    run_name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{name} {generation_of(shared)}")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with lab.prepared(compiled=False):
        for clip in samples[rank::world]:
            file = args.out / f"{run_name}-{clip.index:03d}.json"
            made = {name_of(record): record for record in (read(file) if file.is_file() else [])}
            missing = [
                entry
                for way, entry in known.items()
                if way not in made or made[way]["config"] != _digest(entry)
            ]
            for record in lab.records(missing, [clip]) if missing else ():
                entry = known.get(name_of(record), Entry(DENSE))
                record["config"], record["cost"] = _digest(entry), record.get("work")
                if entry.config is not None and record["refused"] is None:
                    record["cost"] = cost(record["calls"], density(entry.config, layers))
                made[name_of(record)] = record
                write([*made.values()], file)
                if time.monotonic() > end:
                    print(f"clip {clip.index}: the time is up", flush=True)
                    return


def name_of(record: Record) -> str:
    """The name of the way of a record or a row."""
    return str(Entry(record["method"], record["variant"], record["setting"]))


def _digest(entry: Entry) -> str:
    from chipsparse.experiments.engine import config_digest

    return "" if entry.config is None else config_digest(entry.config)


def _picture(folder: Path, way: Any, sample: Any, frames: np.ndarray) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    places = np.linspace(0, len(frames) - 1, PICTURE_FRAMES).round().astype(int)
    picture = Image.fromarray(np.concatenate(frames[places], 1))
    picture.save(folder / picture_name(sample.index, way.name), quality=85)


def picture_name(clip: int, way: str) -> str:
    """The file of a clip's frames, by its number, which is its seed, and the name of its way."""
    return f"{clip:03d}-{re.sub(r'[^A-Za-z0-9.]+', '-', way)}.jpg"


def rows_of(clips: Sequence[Record]) -> list[Record]:
    """A row for each way, by its cost: means over its clips, against skipped steps alone."""
    by_way: dict[tuple[str, ...], list[Record]] = {}
    for clip in clips:
        if clip["method"] != DENSE and clip["refused"] is None:
            key = tuple(clip[name] for name in ("method", "variant", "setting"))
            by_way.setdefault(key, []).append(clip)
    skips: dict[str, list[tuple[float, float]]] = {}
    for clip in clips:
        if (clip["method"], clip["variant"], clip["refused"]) == (SKIPS, "", None):
            skips.setdefault(clip["prompt"], []).append((clip["cost"], decibels(clip)))
    rows = []
    for (method, variant, setting), made in by_way.items():
        psnrs = [decibels(clip) for clip in made]
        row: Record = {"method": method, "variant": variant, "setting": setting}
        row |= {"cost": statistics.fmean(clip["cost"] for clip in made), "clips": len(made)}
        row |= {"psnr": statistics.fmean(psnrs), "worst": min(psnrs), "speedup": 1 / row["cost"]}
        calls = sum((Counter(clip.get("calls") or {}) for clip in made), Counter[str]())
        for name, action in ACTIONS.items() if calls else ():
            row[name] = made[0]["steps"] * calls[action] / calls.total()
        levels = [at_share(skips.get(clip["prompt"], []), clip["cost"]) for clip in made]
        if None not in levels:  # on the same clips
            known = [level for level in levels if level is not None]
            row["ahead"] = row["psnr"] - statistics.fmean(known)
            row["worst ahead"] = row["worst"] - min(known)
        rows.append(row)
    return sorted(rows, key=lambda row: row["cost"])


def made_in_all_ways(clips: Sequence[Record]) -> list[Record]:
    """The records of the clips that are compared at equal cost."""
    made = Counter(clip["prompt"] for clip in clips)
    return [clip for clip in clips if made[clip["prompt"]] == max(made.values())]


def report(clips: Sequence[Record]) -> str:
    """The tables of one kind of generation in Markdown, with what makes the model comparable."""
    whole = made_in_all_ways(clips)
    equal = quality_rows(whole, "cost", SPEEDUPS)
    title = "PSNR in dB at equal cost, mean (worst), of clips made in all ways:"
    columns = dict.fromkeys(equal[0] if equal else (), "s")
    lines = [table(rows_of(clips), COLUMNS), "", title, "", table(equal, columns), ""]
    lines.append(hardness(whole))
    refused = {name_of(clip): clip["refused"] for clip in clips if clip["refused"] is not None}
    return "\n".join([*lines, *(f"- {name} refused: {why}" for name, why in refused.items())])


def hardness(clips: Sequence[Record]) -> str:
    """A list of the changes between steps, and of other methods beside their published figures."""
    ranges = []
    for norm in ("l1", "l2"):
        of_clips = [clip[f"change_{norm}"] for clip in clips if clip["method"] == DENSE]
        values = [value for changes in of_clips for value in changes]
        if values:
            mean = statistics.fmean(values)
            ranges.append(f"{norm.upper()} {mean:.3f} ({min(values):.3f} to {max(values):.3f})")
    change = "Change of the model's output from step to step, over its size"
    lines = [f"- {change}: {', '.join(ranges)}; {PUBLISHED_CHANGE}"]
    for method, figures in PUBLISHED.items():
        pairs = []
        for speedup, psnr in figures.items():
            quality = qualities(clips, "cost", 1 / speedup).get(method)
            here = f"{quality.mean:.1f}" if quality else "not measured"
            pairs.append(f"{here} ({psnr:g}) at {speedup:g}x")
        lines.append(f"- {method}, dB (published for HunyuanVideo): {', '.join(pairs)}")
    return "\n".join(lines)
