"""``python -m benchmarks photographs``: quality of all methods on the model of moving photographs.

Under ``torchrun`` the clips are shared over the processes. The records of each clip are a file of
their own in ``--out``; a further call makes what is missing there. A call of one process, or one
with ``--count 0``, merges them: it prints the tables, and ``--json`` has all records.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

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
from benchmarks.models import MODELS
from benchmarks.moving_photographs.methods import (
    SIZE,
    Entry,
    Lab,
    of_profile,
    rivals,
    run_fields,
)
from benchmarks.moving_photographs.mlp_rules import RULES, simulated
from benchmarks.prices import PRICED_AS, StepPrices, computed_prices, priced, prices_of
from benchmarks.records import Record, Run, read, table, write
from chipsparse.config import Action, SparsityConfig, Spread
from chipsparse.profiles.profile import find_profile
from chipsparse.skip import timetable
from chipsparse.sparse.cost_model import layer_times

OP = "moving_photographs"
QUALITIES = "qualities"  # the variant of the shipped ones
# The one that was published first, which others do not aim at, is not compared.
COMPARED = ("faithful", "balanced", "fast", "draft")
NAMED = {(QUALITIES, name) for name in COMPARED}
MODEL_CLASS = "WanTransformer3DModel"  # whose shipped profile is evaluated
# Shares of the steps that lists of full and skipped steps compute, and of those with sparse steps:
# in full and sparse.
SKIP_SHARES = (0.1, 0.12, 0.16, 0.2, 0.24, 0.28, 0.34, 0.4, 0.5)
SPARSE_SHARES = ((0.22, 0.24), (0.14, 0.18), (0.08, 0.22))
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
    "cost": ".3f",
    "speedup": ".2f",
    **dict.fromkeys(ACTIONS, ".0f"),
    "psnr": ".1f",
    "worst": ".1f",
    "ahead": "+.1f",
    "worst ahead": "+.1f",
    "clips": "d",
}
FIRST_SCENE = 1 << 62  # training draws no scene from here on
PICTURE_FRAMES = 4
TINY = {"size": "64x64x5", "steps": 12, "count": 2}


def shipped() -> dict[str, SparsityConfig]:
    """The configs of the shipped qualities of `MODEL_CLASS`, by name.

    Sparse steps are launched: for a single clip a CUDA graph is not worth its capture.
    """
    qualities = find_profile(None, MODEL_CLASS).qualities
    launched = {"cuda_graphs": "never"}
    return {name: config.override(launched) for name, config in qualities.items()}


def ways(
    steps: int,
    *,
    profiles: Sequence[Path] = (),
    lists: Sequence[str] = (),
    rules: bool = False,
) -> list[Entry]:
    """All ways but dense: the shipped qualities, lists of ours, profiles, fewer steps, and caches.

    Args:
        steps: of the dense generation.
        profiles: further files of ours.
        lists: numbers of full steps, or of full and sparse ones as ``9+17``; none: by shares.
        rules: also the simulated rules of sparse MLPs, at ``balanced`` and ``fast``.
    """
    counts = [_counts(text) for text in lists]
    if not lists:
        counts = [(round(share * steps), 0) for share in SKIP_SHARES]
        counts += [(round(full * steps), round(sparse * steps)) for full, sparse in SPARSE_SHARES]
    by_rules = _simulated() if rules else ()
    own_lists = (_list(*pair, steps) for pair in counts)
    own_profiles = (of_profile(path, steps) for path in profiles)
    return [*_qualities(steps), *own_lists, *by_rules, *own_profiles, *rivals(steps)]


def _counts(text: str) -> tuple[int, int]:
    """The numbers of full and sparse steps of a text such as ``9+17`` or ``20``."""
    match = re.fullmatch(r"(\d+)(?:\+(\d+))?", text)
    if match is None or int(match[1]) < 1:
        raise ValueError(f"--lists: expected numbers such as 20 or 9+17, got {text!r}")
    return int(match[1]), int(match[2] or 0)


def _qualities(steps: int) -> Iterator[Entry]:
    """The shipped qualities, with the steps that they have where their time is counted."""
    for name, config in shipped().items():
        own = MODELS[PRICED_AS].decided(config)
        sparse = Action.SPARSE in timetable.Schedule(own.schedule, timetable.Run(steps)).actions()
        yield Entry(OURS if sparse else SKIPS, QUALITIES, name, own)


def _list(full: int, sparse: int, steps: int) -> Entry:
    """``balanced`` with so many full and sparse steps; the rest is skipped."""
    config = shipped()["balanced"]
    schedule = replace(config.schedule, form=Spread(full / steps, sparse / steps))
    setting = f"{full} in full, {sparse} sparse" if sparse else f"{full} in full"
    method, variant = (OURS, "lists") if sparse else (SKIPS, "")
    return Entry(method, variant, setting, replace(config, schedule=schedule))


def _simulated() -> Iterator[Entry]:
    for name in ("balanced", "fast"):
        config = MODELS[PRICED_AS].decided(shipped()[name])
        first = max((budget.last + 1 for budget in config.layers), default=0)
        for density in (0.5, 0.3):  # by the kernels that there are
            sparse = config.override({"mlp.density": density})
            yield Entry(OURS, f"MLP {density:.0%}", name, sparse)
        for rule in RULES:
            within = partial(simulated, rule, first=first)
            yield Entry(OURS, f"MLP, {rule.name}", name, config, within=within)


def watched_dense() -> Any:
    """The stock model; its facts are the relative changes from each step's velocity to the next."""
    from chipsparse.experiments.engine import Applied, Way

    @contextmanager
    def apply(pipe: Any) -> Iterator[Applied]:
        step = pipe.scheduler.step
        last = None
        changes = list[torch.Tensor]()

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
        "--checkpoint",
        type=Path,
        help="folder of the model; with --tiny that of a tiny training",
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
    listed = "lists of ours: 20 has so many full steps, 9+17 also 17 sparse ones"
    parser.add_argument("--lists", nargs="*", default=[], help=listed)
    parser.add_argument("--rules", action="store_true", help="also simulated rules of sparse MLPs")
    parser.add_argument("--case", default="", help="only ways whose name holds this expression")
    parser.add_argument("--limit", type=float, default=540, help="seconds of this call")
    parser.add_argument("--pictures", type=Path, help="folder for some frames of each clip")


def run(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, to: Run) -> None:
    """Makes the clips that are missing, paired with dense; merges them in one process."""
    begun = time.monotonic()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if args.tiny:
        vars(args).update(TINY)
    if args.count:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(device)
        _make(args, device, dtype, begun + args.limit)
    if world == 1:
        to.add(*read(*sorted(args.out.glob("*.json"))))
        for name, clips in by_workload(to.records).items():
            print(f"## {name}\n\n{report(clips, known_prices())}\n")


def _make(args: argparse.Namespace, device: torch.device, dtype: torch.dtype, end: float) -> None:
    """Makes the missing clips of this process, up to a time."""
    from benchmarks.moving_photographs.clips import Scene
    from benchmarks.moving_photographs.model import read_checkpoint
    from chipsparse.experiments.engine import Sample
    from chipsparse.experiments.lpips import Lpips
    from chipsparse.experiments.quality import compare_clips

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
        dense=watched_dense(),
        lpips=lambda *_: Lpips(None, "not asked for"),
        compare=partial(compare_clips, psnr_alone=True),
        write=None if args.pictures is None else partial(_picture, args.pictures),
    )
    options = {"profiles": args.profiles, "lists": args.lists, "rules": args.rules}
    every_way = ways(lab.steps, **options)
    known = {str(entry): entry for entry in every_way if re.search(args.case, str(entry))}
    run_name = re.sub(r"[^A-Za-z0-9.]+", "-", f"{name} {generation_of(shared)}")
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # So narrow layers, which stand for wide ones, would stay dense by their time.
    every_part_pays = mock.patch.object(layer_times, "LEAST_GAIN", -math.inf)
    with every_part_pays, lab.prepared():
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
                made[name_of(record)] = record | _facts(entry)
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


def _facts(entry: Entry) -> Record:
    """The fields of a record that say what was computed, by which it is priced."""
    from chipsparse.experiments.engine import step_digest

    facts: Record = {"config": _digest(entry)}
    if entry.config is not None:
        facts["step_config"] = step_digest(entry.config)
    times = {rule.name: rule.time for rule in RULES}
    time = times.get(entry.variant.removeprefix("MLP, "))
    if entry.config is not None and time is not None:
        thirty = entry.config.override({"mlp.density": 0.3})
        facts |= {"mlp_time": time, "step_config_sparse_mlp": step_digest(thirty)}
    return facts


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


def known_prices() -> dict[str, StepPrices]:
    """The prices of the configs that ours can have, by their `step_digest`.

    Where steps with sparse MLPs were not run and those with dense ones were, the cost model says
    how the two differ.
    """
    found: dict[str, StepPrices] = {}
    for config in shipped().values():
        own = prices_of(config)
        found[own.digest] = own
        computed = computed_prices(config)
        for density in (0.5, 0.3):
            other = prices_of(config.override({"mlp.density": density}))
            if own.measured and not other.measured:
                other = other.scaled_as(computed, own)
            found.setdefault(other.digest, other)
    return found


def report(clips: Sequence[Record], prices: Mapping[str, StepPrices]) -> str:
    """The tables of one kind of generation in Markdown, with what makes the model comparable."""
    whole = made_in_all_ways(priced(clips, prices))
    equal = quality_rows(of_qualities(whole), costs(whole))
    title = "PSNR in dB at equal cost, mean (worst), of clips made in all ways:"
    columns = dict.fromkeys(equal[0] if equal else (), "s")
    lines = [table(rows_of(whole), COLUMNS), "", title, "", table(equal, columns), ""]
    lines.append(hardness(whole))
    refused = {name_of(clip): clip["refused"] for clip in clips if clip["refused"] is not None}
    return "\n".join([*lines, *(f"- {name} refused: {why}" for name, why in refused.items())])


def of_qualities(clips: Iterable[Record]) -> list[Record]:
    """The clips of the shipped qualities, of lists of skips and of other methods."""
    return [
        clip
        for clip in clips
        if clip["method"] != OURS or (clip["variant"], clip["setting"]) in NAMED
    ]


def costs(clips: Iterable[Record]) -> dict[str, float]:
    """The costs of the shipped qualities by name and speed-up, the slowest first."""
    own = [clip for clip in clips if (clip["variant"], clip["setting"]) in NAMED]
    by_name = {clip["setting"]: clip["cost"] for clip in own if clip["refused"] is None}
    names = sorted(by_name, key=lambda name: -by_name[name])
    return {f"`{name}`, {1 / by_name[name]:.1f}x": by_name[name] for name in names}


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
            quality = qualities(clips, 1 / speedup).get(method)
            here = f"{quality.mean:.1f}" if quality else "not measured"
            pairs.append(f"{here} ({psnr:g}) at {speedup:g}x")
        lines.append(f"- {method}, dB (published for HunyuanVideo): {', '.join(pairs)}")
    return "\n".join(lines)
