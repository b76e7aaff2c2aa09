"""The work of `chipsparse compare` on ways to generate: two configs, or a suite."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.console import Console

import chipsparse
from chipsparse.cli.compare.options import MEASURED, CompareOptions, Subject
from chipsparse.cli.compare.record import Comparison, ShownClip
from chipsparse.cli.compare.rows import OURS, Row, differences
from chipsparse.cli.errors import UserError, described, exit_code, user_errors
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import difference_rows, stack_panels
from chipsparse.cli.model.weights import weights_digest
from chipsparse.cli.progress import ProgressDisplay
from chipsparse.cli.prompts import first_prompts, shapes
from chipsparse.cli.ranks import Rank, called, check_alone, meet, start_others, this_rank
from chipsparse.cli.request import (
    Request,
    choose_profile,
    out_of_range_text,
    required_profile,
    resolve,
    working,
)
from chipsparse.cli.settings import OPTION_OF
from chipsparse.cli.views.names import bundled_name, name_of, without_folders
from chipsparse.cli.views.page import check_charts, page
from chipsparse.cli.views.sections import Facts, Section
from chipsparse.cli.views.terminal import print_result, print_sections
from chipsparse.cli.views.units import counted, sharing_text
from chipsparse.common.machine import device_name, package_version
from chipsparse.experiments.clips import ClipMaker
from chipsparse.experiments.engine import Experiment, Way, sparse_way
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.rivals import CALIBRATION, FLOOR, MAG, SEA, suite_rivals
from chipsparse.experiments.samples import DENSE, Sample
from chipsparse.experiments.statistics import LEAST_VALUES
from chipsparse.experiments.store import Store
from chipsparse.profiles.tuned_range import digest

PAIR_PROMPTS, SUITE_PROMPTS = 8, 12  # where no file of them is given
TO_SEND, PAGE = "suite.json", "suite.html"
QUALITIES = {"faithful": 0.6, "balanced": 0.5, "fast": 0.4}  # about, of a dense clip
RIVALS = (DENSE, FLOOR, MAG, SEA)  # methods that are not ours
# Fields of a record that are not sent: texts are in the remarks, without folders.
UNSENT: dict[str, Any] = {"fallbacks": [], "notes": [], "facts": {}, "lpips_missing": None}


def compare_configs(options: CompareOptions) -> None:
    """Check all that is cheap to check, then generate, compare, write and print.

    Keeps the finished prompts where the user interrupts after two: that many give intervals.
    """
    rank, code = this_rank(options), 0
    sides = dict(zip("AB", options.subjects, strict=True))
    with working(options, rank) as (model, device, dtype, display):

        def request_of(subject: Subject) -> Request:
            return resolve(
                dataclasses.replace(options, config=subject.path, quality=subject.quality),
                model=model,
                device=device,
                dtype=dtype,
                parallel=rank.parallel,
                instead="configs are compared on prompts alone",
            )

        requests = {side: request_of(s) for side, s in sides.items() if s.kind != DENSE}
        first, last = (list(requests.values())[place] for place in (0, -1))
        _check_settings(first, last)
        video = model.accepts("num_frames")
        samples = first_prompts(
            options.prompts,
            bundled=shapes(video=video),
            usual=PAIR_PROMPTS,
            count=options.count,
            seed=options.seed,
        )
        if len(samples) < LEAST_VALUES:
            raise UserError(
                f"{options.prompts} has {counted(len(samples), 'prompt')}; intervals need at least "
                f"{LEAST_VALUES}, one a line"
            )
        if options.output is not None:
            media.check_kind(options.output, video=video)
        if rank.starts:
            return start_others("compare", options, rank.ranks)
        names = {side: f"{side}: {name_of(subject.text)}" for side, subject in sides.items()}
        outside = {
            side: out_of_range_text(each.profile, each.out_of_range)
            for side, each in requests.items()
            if each.profile is not None and each.out_of_range
        }
        for note in outside.values():
            display.tell(f"chipsparse: warning: {note}")
        prompts = [sample.prompt for sample in samples]
        profiles = [request.profile for request in requests.values()]
        rank = meet(rank, device, called(options, *profiles, prompts=prompts))
        maker = _maker(first, display)
        experiment = Experiment(maker, samples, Store(ranks=rank), per_frame=True)
        ways = [
            sparse_way(
                names[side],
                request.profile,
                parallel=rank.parallel,
                method=names[side],
                setting=request.profile.source,
            )
            for side, request in requests.items()
            if request.profile is not None
        ]
        experiment.plan(ways)
        worst: tuple[float, dict[str, Any]] = math.inf, {}
        done = 0
        for sample in samples:
            try:
                clips = list(experiment.run(ways, [sample]))
            except KeyboardInterrupt as error:
                if done < LEAST_VALUES:
                    raise
                code = exit_code(error)
                break
            done += 1
            lowest = _lowest([clip.record for clip in clips])
            if not worst[1] or lowest < worst[0]:
                worst = lowest, {clip.way.name: clip.frames for clip in clips}
        if not rank.writes:
            return None
        shown, unwritten = None, None
        if options.output is not None:
            try:
                with display.stage(f"writing {options.output}"):
                    shown = _write_clip(worst[1], options)
            except UserError as error:  # the numbers took longer than the clip
                unwritten = str(error)
        remarks = {names[side]: [note] for side, note in outside.items()}
        result = _result(_environment(first, options), experiment, ways, samples[:done], remarks)
        by_name = {row.name: row.clips for row in result.rows}
        a, b = (by_name.get(name, by_name[DENSE]) for name in names.values())
        result = result.model_copy(
            update={
                "sharing": "" if rank.parallel is None else sharing_text(rank.parallel),
                "sides": list(names.values()),
                "difference": differences(a, b),
                "clip": shown,
                "unwritten": unwritten,
            }
        )
    print_result(result, as_json=options.json)
    if unwritten is not None:
        raise UserError(unwritten)
    if code:
        raise typer.Exit(code)


def _check_settings(a: Request, b: Request) -> None:
    """Raise `UserError` where both configs ask for other settings."""
    others = b.settings.model_dump()
    for name, value in a.settings.model_dump().items():
        if value != others[name]:
            option = OPTION_OF.get(name)
            way = f"give {option}" if option else "make them the same in both files"
            raise UserError(
                f"A generates with {name} {value} and B with {others[name]}; clips of other "
                f"settings do not compare: {way}"
            )


def _write_clip(frames: Mapping[str, Any], options: CompareOptions) -> ShownClip:
    assert options.output is not None
    others = [(own, name) for name, own in sorted(frames.items()) if name != DENSE]
    rows, factor = difference_rows((frames[DENSE], DENSE), others, factor=options.amplify)
    written = media.write_media({options.output: stack_panels(rows)}, fps=options.rate)
    return ShownClip(files=[str(file) for file in written[options.output]], amplified=factor)


def run_suite(options: CompareOptions) -> None:
    """Check all that is cheap to check, make the clips that are missing, and print."""
    check_alone("--suite")
    check_charts()
    options = dataclasses.replace(options, model=options.suite)
    folder = options.folder
    with working(options, Rank()) as (model, device, dtype, display):
        request = resolve(
            options,
            model=model,
            device=device,
            dtype=dtype,
            instead="a suite generates from prompts alone",
            optional=True,
        )
        video = model.accepts("num_frames")
        suffix = ".mp4" if video else ".png"
        media.check_output(
            (folder if folder.is_dir() else folder.parent) / f"suite{suffix}", fps=options.fps
        )
        # The bundled models were trained on scenes of their own.
        own = shapes(video=video)
        samples = first_prompts(
            options.prompts,
            bundled="suite.txt" if bundled_name(model.location) is None else own,
            usual=SUITE_PROMPTS,
            count=options.count,
            seed=options.seed,
        )
        common = _environment(request, options)
        versions = {name: text for name, text in common["versions"].items() if name != "python"}
        facts = {name: value for name, value in common.items() if not isinstance(value, dict)}
        facts |= {**common["settings"], **versions, "weights": weights_digest(model)}
        store = Store(folder / MEASURED, facts, kind="suite clips", dense=folder / "dense")
        maker = _maker(request, display, plain_lines=1)
        ways = [*suite_rivals(maker, store, samples[0]), *_ours(options, request)]

        def write(way: Way, sample: Sample, frames: np.ndarray) -> None:
            file = folder / clip_file(way, sample, suffix)
            with user_errors(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
            media.write_media({file: frames}, fps=options.rate)

        experiment = Experiment(maker, samples, store, describe=described, write=write)
        also = {} if CALIBRATION in store.measured else {CALIBRATION: 1.0}
        for sample in samples:
            experiment.plan(ways, **also)
            for _ in experiment.run(ways, [sample]):
                pass
            result = _result(common, experiment, ways, samples)
            shown = next((each for each in samples if each.seed == result.seed), None)
            ran = [way for way in (experiment.dense_way, *ways) if not experiment.refusal(way)]
            files = {way.name: clip_file(way, shown, suffix) for way in ran if shown is not None}
            result = _to_send(result, with_prompts=options.with_prompts, files=files)
            _write(folder / TO_SEND, json.dumps(result.to_json(), indent=1, ensure_ascii=False))
        with display.stage(f"writing {folder / PAGE}"):
            _write(folder / PAGE, page([(folder / TO_SEND, result)]))
    print_result(result, as_json=options.json)
    if not options.json:
        hidden = "" if options.with_prompts else ", without the prompts"
        made = Facts([("page", str(folder / PAGE)), ("to send", f"{folder / TO_SEND}{hidden}")])
        print_sections(Console(), [Section("", [made])])


def _ours(options: CompareOptions, request: Request) -> Iterator[Way]:
    """Yield the named qualities; a profile without any, as of a tuning, is the only way."""
    profile = choose_profile(options, request.model, optional=True)
    if profile is not None and not profile.qualities:
        name = f"{OURS} profile"
        yield sparse_way(name, profile, cost=0.5, method=OURS, setting=name_of(profile.source))
        return
    for quality, cost in QUALITIES.items():
        name, asked = f"{OURS} {quality}", dataclasses.replace(options, quality=quality)
        try:
            profile = required_profile(asked, request.model)
        except UserError as error:
            yield Way(name, _refuse, refused=str(error), method=OURS)
        else:
            setting = f"--quality {quality}"
            yield sparse_way(name, profile, cost=cost, method=OURS, setting=setting)


def _refuse(pipe: Any) -> Any:
    raise AssertionError("a refused way is never applied")


def clip_file(way: Way, sample: Sample, suffix: str) -> str:
    """Return the name of a clip to look at, in the folder: one for each config of ours."""
    name = way.key if way.method == OURS and way.key else way.name
    return f"clips/{sample.name}-{name.replace(',', '').replace(' ', '-')}{suffix}"


def _result(
    common: Mapping[str, Any],
    experiment: Experiment,
    ways: Sequence[Way],
    samples: Sequence[Sample],
    remarks: Mapping[str, Sequence[str]] | None = None,
) -> Comparison:
    """Return the numbers of the clips that were made so far.

    Args:
        remarks: further ones of each way.
    """
    rows = []
    every = (experiment.dense_way, *ways)
    for way in every:
        refused = experiment.refusal(way)
        clips = [] if refused else [r for s in samples if (r := experiment.record(way, s))]
        fields = {"method": way.method, "setting": way.setting, "refused": refused}
        rows.append(Row.of(way.name, clips, remarks=(remarks or {}).get(way.name, ()), **fields))
    missing = (clip.lpips_missing for row in rows for clip in row.clips if clip.lpips_missing)
    judged = [row.clips for row in rows if row.clips and row.method not in RIVALS]
    seeds = set.intersection(*({clip.seed for clip in row.clips} for row in rows if row.clips))
    farthest = min(
        (clip for clips in judged for clip in clips if clip.seed in seeds),
        key=lambda clip: _lowest([clip]),
        default=None,
    )
    return Comparison(
        **common,
        lpips_missing=next(missing, None),
        asked=len(experiment.samples),
        rows=rows,
        seed=None if farthest is None else farthest.seed,
    )


def _to_send(result: Comparison, *, with_prompts: bool, files: Mapping[str, str]) -> Comparison:
    """Return the result of a suite without folders, and without prompts if so asked."""
    hidden = UNSENT if with_prompts else {**UNSENT, "prompt": ""}
    rows = [
        row.model_copy(
            update={
                "label": row.name.rpartition(" ")[2],
                "refused": None if row.refused is None else without_folders(row.refused),
                "remarks": [without_folders(text) for text in row.remarks],
                "clips": [clip.model_copy(update=hidden) for clip in row.clips],
            }
        )
        for row in result.rows
    ]
    missing = result.lpips_missing
    missing = None if missing is None else without_folders(missing)
    update = {"rows": rows, "lpips_missing": missing, "files": files}
    return result.model_copy(update=update)


def _maker(request: Request, display: ProgressDisplay, *, plain_lines: int = 5) -> ClipMaker:
    steps = request.settings.num_inference_steps
    return ClipMaker(request.load, request.pipeline_call, steps, display, plain_lines)


def _lowest(clips: Sequence[ClipRecord]) -> float:
    return min((clip.psnr_db for clip in clips if clip.psnr_db is not None), default=math.inf)


def _environment(request: Request, options: CompareOptions) -> dict[str, Any]:
    """Return the facts that all clips have in common; none of them tells whose machine it was."""
    model, packages = request.model, ("diffusers", "transformers", "triton")
    return {
        "model": name_of(model.location),
        "pipeline_class": model.pipeline_class.__name__,
        "transformer_class": model.transformer_class,
        "transformer_config": digest(model.transformer_config),
        "settings": request.settings.model_dump(),
        "flow_shift": options.flow_shift,
        "device": device_name(request.device),
        "dtype": str(request.dtype).removeprefix("torch."),
        "versions": {
            "chipsparse": chipsparse.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            **{name: package_version(name) for name in packages},
        },
    }


def _write(file: Path, text: str) -> None:
    with media.written_whole("--output", file) as half:
        half.write_text(text, encoding="utf-8")
