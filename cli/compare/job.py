"""The work of `chipsparse compare` on ways to generate: two configs, or a suite."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import typer
from rich.console import Console

from chipsparse.cli.compare.files import check_lpips, fail_where_broken, write_clip
from chipsparse.cli.compare.options import CLIPS, MEASURED, PAGE, TO_SEND, CompareOptions
from chipsparse.cli.compare.record import Comparison
from chipsparse.cli.compare.ways import METRIC_OF, OURS, Row, differences, usual_bounds
from chipsparse.cli.errors import UserError, described, exit_code, user_errors
from chipsparse.cli.launching import called, start_others
from chipsparse.cli.media import write as media
from chipsparse.cli.media.formats import check_kind, check_output
from chipsparse.cli.media.panels import Panel
from chipsparse.cli.prompts import read_prompts, shapes
from chipsparse.cli.ranks import Rank, check_alone, meet, this_rank
from chipsparse.cli.request import Request, choose_profile, resolve, working
from chipsparse.cli.settings import OPTION_OF
from chipsparse.cli.views.names import bundled_name, name_of, without_folders
from chipsparse.cli.views.page import page
from chipsparse.cli.views.sections import Facts, Section
from chipsparse.cli.views.terminal import print_result, print_sections
from chipsparse.cli.views.units import counted
from chipsparse.common import stopping
from chipsparse.common.files import check_inputs_stay
from chipsparse.experiments.engine import Experiment, Way, sparse_way
from chipsparse.experiments.lpips import find_lpips
from chipsparse.experiments.rivals import CALIBRATION, FLOOR, MAG, SEA, suite_rivals
from chipsparse.experiments.samples import DENSE, Sample
from chipsparse.experiments.statistics import LEAST_VALUES
from chipsparse.experiments.store import Store
from chipsparse.profiles.profile import ASSETS, default_profile

# Where no file of them is given.
PAIR_PROMPTS = 8
SUITE_PROMPTS = 12
QUALITIES = {"faithful": 0.6, "balanced": 0.5, "fast": 0.4}  # about, of a dense clip
RIVALS = (DENSE, FLOOR, MAG, SEA)  # methods that are not ours
# Rows have these texts of their clips among their remarks.
UNSENT: dict[str, Any] = {"fallbacks": [], "notes": [], "facts": {}, "lpips_missing": None}


# Two configs.


def compare_configs(options: CompareOptions) -> None:
    """Check all that is cheap to check, then generate, compare, write and print.

    Keeps the finished prompts where the user interrupts after two: that many give intervals.
    """
    rank = this_rank(options.gpus, options.guidance_parallel)
    code = 0
    alone = "configs are compared on prompts alone"
    with working(options, rank) as (place, display), ExitStack() as stack:
        requests = {
            name: resolve(dataclasses.replace(options, **config), place, instead=alone)
            for name, config in options.configs.items()
            if not config.get("dense")
        }
        first = next(iter(requests.values()))
        last = next(reversed(requests.values()))
        _check_settings(first, last)
        video = place.model.accepts("num_frames")
        samples = _samples(options, shapes(video=video), PAIR_PROMPTS)
        _check_lpips(options, first)
        if len(samples) < LEAST_VALUES:
            raise UserError(
                f"{options.prompts} has {counted(len(samples), 'prompt')}; intervals need at least "
                f"{LEAST_VALUES}, one a line",
            )
        if options.output is not None:
            check_kind(options.output, video=video)
            single = first.settings.num_frames in (None, 1)
            check_inputs_stay(options.writes(single=single), options.reads())
        if rank.starts:
            start_others("compare", options, rank.ranks)
            return
        remarks = {name: request.warnings for name, request in requests.items()}
        display.warn(itertools.chain(*remarks.values()))
        profiles = [request.profile for request in requests.values()]
        prompts = [sample.prompt for sample in samples]
        rank = meet(rank, place.device, called(options, *profiles, prompts=prompts))
        ways = []
        bounds = dict[str, Mapping[str, float]]()
        for name, request in requests.items():
            if (profile := request.profile) is not None:
                titles: dict[str, Any] = {"method": name, "setting": name_of(profile.source)}
                ways.append(sparse_way(name, profile, parallel=rank.parallel, **titles))
                bounds[name] = _bounds(options, profile.quality)
        store = Store(ranks=rank)
        experiment = Experiment(first.maker(display), samples, store, per_frame=True)
        experiment.plan(ways)
        names = [DENSE, *requests]
        result: Comparison | None = None
        shown: list[Panel] = []  # of the prompt that is farthest from dense

        def tell() -> None:
            """Print what was finished, where the process ends within a long step."""
            if rank.writes and result is not None and len(result.rows[0].clips) >= LEAST_VALUES:
                print_result(_with_sides(result, options), as_json=options.json)

        stack.enter_context(stopping.done_at_least(tell))
        for sample in samples:
            try:
                clips = list(experiment.run(ways, [sample]))
            except KeyboardInterrupt as error:
                if sample.index < LEAST_VALUES:
                    raise
                code = exit_code(error)
                stopping.settle()
                break
            result = _result(first, experiment, ways, options, bounds, remarks=remarks)
            if result.seed == sample.seed:
                made = {clip.way.name: clip.generation for clip in clips}
                shown = [(clip.frames, name) for name in names if (clip := made.get(name))]
        stack.close()  # from here on the result is printed in any case
        if not rank.writes or result is None:
            return
        result = _with_sides(result, options)
    try:
        if options.output is not None:
            dense, *others = shown
            written = write_clip(options.output, dense, others, options, fps=options.rate)
            result = result.model_copy(update={"clip": written})
    finally:  # the numbers took longer than the clip
        print_result(result, as_json=options.json)
    if code:
        raise typer.Exit(code)
    fail_where_broken(result.broken)


def _with_sides(result: Comparison, options: CompareOptions) -> Comparison:
    """Return the result of two configs with their difference from each other."""
    clips_of = {row.name: row.clips for row in result.rows}
    sides = [clips_of.get(name, clips_of[DENSE]) for name in options.configs]
    update: dict[str, Any] = {"sides": [*options.configs], "difference": differences(*sides)}
    return result.model_copy(update=update)


def _check_settings(a: Request, b: Request) -> None:
    others = b.settings.model_dump()
    for name, value in a.settings.model_dump().items():
        if value != others[name]:
            option = OPTION_OF.get(name)
            way = f"give {option}" if option else "make them the same in both files"
            raise UserError(
                f"A generates with {name} {value} and B with {others[name]}; clips of other "
                f"settings do not compare: {way}",
            )


# A suite.


def run_suite(options: CompareOptions) -> None:
    """Check all that is cheap to check, make the clips that are missing, and print."""
    check_alone("--suite")
    options = dataclasses.replace(options, model=options.suite)
    folder = options.folder
    alone = "a suite generates from prompts alone"
    with working(options, Rank()) as (place, display):
        request = resolve(options, place, instead=alone, optional=True)
        model = place.model
        video = model.accepts("num_frames")
        suffix = ".mp4" if video else ".png"
        existing = folder if folder.is_dir() else folder.parent
        check_output(existing / f"suite{suffix}", fps=options.fps)
        # The bundled models were trained on scenes of their own.
        is_bundled = bundled_name(model.location) is not None
        bundled = shapes(video=video) if is_bundled else "suite.txt"
        samples = _samples(options, bundled, SUITE_PROMPTS)
        _check_lpips(options, request)
        facts = request.measured_with
        store = Store(folder / MEASURED, facts, kind="suite clips", dense=folder / DENSE)
        maker = request.maker(display, plain_lines=1)
        ours = _ours(options, request)
        ways = [*suite_rivals(maker, store, samples[0]), *ours]
        qualities = {way.name: way.name.removeprefix(f"{OURS} ") for way in ours}
        bounds = {name: _bounds(options, quality) for name, quality in qualities.items()}

        def write(way: Way, sample: Sample, frames: np.ndarray) -> None:
            file = folder / clip_file(way, sample, suffix)
            with user_errors(OSError):
                file.parent.mkdir(parents=True, exist_ok=True)
            media.write_media({file: frames}, fps=options.rate)

        experiment = Experiment(maker, samples, store, describe=described, write=write)
        hidden = {} if options.with_prompts else {"prompt": ""}
        for sample in samples:
            also = {} if CALIBRATION in store.measured else {CALIBRATION: 1.0}
            experiment.plan(ways, **also)
            for _ in experiment.run(ways, [sample]):
                pass
            result = _result(request, experiment, ways, options, bounds, hidden=hidden)
            shown = [item for item in samples if item.seed == result.seed]
            made = [way for way in (experiment.dense_way, *ways) if not experiment.refusal(way)]
            files = {way.name: clip_file(way, item, suffix) for way in made for item in shown}
            result = result.model_copy(update={"files": files})
            text = json.dumps(result.to_json(), indent=1, ensure_ascii=False)
            media.write_text("--output", folder / TO_SEND, text)
        with display.stage(f"writing {folder / PAGE}"):
            media.write_text("--output", folder / PAGE, page([(folder / TO_SEND, result)]))
    print_result(result, as_json=options.json)
    if not options.json:
        without = "" if options.with_prompts else ", without the prompts"
        made_files = [("page", str(folder / PAGE)), ("to send", f"{folder / TO_SEND}{without}")]
        print_sections(Console(), [Section("", [Facts(made_files)])])
    fail_where_broken(result.broken)


def _ours(options: CompareOptions, request: Request) -> list[Way]:
    """Return the named qualities; a profile without any, as of a tuning, is the only way."""
    profile = request.profile or default_profile()
    if not profile.qualities:
        setting = name_of(profile.source)
        return [sparse_way(f"{OURS} profile", profile, cost=0.5, method=OURS, setting=setting)]
    ways = []
    for quality, cost in QUALITIES.items():
        asked = dataclasses.replace(options, quality=quality)
        own = choose_profile(asked, request.model)
        assert own is not None  # as the profile has such a quality
        name = f"{OURS} {quality}"
        setting = f"--quality {quality}"
        ways.append(sparse_way(name, own, cost=cost, method=OURS, setting=setting))
    return ways


def clip_file(way: Way, sample: Sample, suffix: str) -> str:
    """Return the name of a clip to look at, in the folder: one for each config of ours."""
    name = way.key if way.method == OURS and way.key else way.name
    return f"{CLIPS}/{sample.name}-{name.replace(',', '').replace(' ', '-')}{suffix}"


# Both.


def _samples(options: CompareOptions, bundled: str, usual: int) -> list[Sample]:
    """Return the first prompts: all of the file's or the usual bundled ones, unless counted."""
    file = options.prompts or ASSETS / "prompts" / bundled
    count = options.count
    texts = read_prompts(file)
    wanted = count or (usual if options.prompts is None else len(texts))
    if wanted > len(texts):
        raise UserError(
            f"{file} has {counted(len(texts), 'prompt')}; --count {count} asks for more",
        )
    return [Sample(i, text, options.seed + i) for i, text in enumerate(texts[:wanted])]


def _check_lpips(options: CompareOptions, request: Request) -> None:
    if options.max_lpips is not None:
        settings = request.settings
        check_lpips(options, find_lpips(settings.height or 1 << 20, settings.width or 1 << 20))


def _bounds(options: CompareOptions, quality: str | None) -> dict[str, float]:
    """Return the bounds of each clip of a config: those given, or the usual ones of its quality."""
    given = {METRIC_OF[name]: bound for name, bound in options.bounds.given.items()}
    return given or usual_bounds(quality)


def _result(
    request: Request,
    experiment: Experiment,
    ways: Sequence[Way],
    options: CompareOptions,
    bounds: Mapping[str, Mapping[str, float]],
    *,
    remarks: Mapping[str, Sequence[str]] | None = None,
    hidden: Mapping[str, Any] | None = None,
) -> Comparison:
    """Return the numbers of the clips that were made so far, with further remarks of ways.

    ``bounds`` has the ways that bounds decide on, each with its own; `options` say if any is given.
    A result to send has values in place of what is ``hidden`` of the clips, and no folders.
    """
    rows = []
    missing = None
    plain = str if hidden is None else without_folders
    for way in (experiment.dense_way, *ways):
        refused = experiment.refusal(way)
        records = [] if refused else [experiment.record(way, item) for item in experiment.samples]
        clips = [record for record in records if record is not None]
        own = (remarks or {}).get(way.name, ())
        why = None if refused is None else plain(refused)
        facts: dict[str, Any] = {"method": way.method, "setting": way.setting, "refused": why}
        facts["bounds"] = bounds.get(way.name) or _bounds(options, None)
        row = Row.of(way.name, clips, remarks=own, **facts)
        missing = next((clip.lpips_missing for clip in clips if clip.lpips_missing), missing)
        update = {
            "remarks": [plain(text) for text in row.remarks],
            "clips": [clip.model_copy(update={**UNSENT, **(hidden or {})}) for clip in clips],
        }
        rows.append(row.model_copy(update=update))
    judged = [row for row in rows if row.name in bounds]
    broken = [text for row in judged for text in row.broken()] if options.bounds.given else []
    return Comparison(
        **request.facts,
        passed=not broken if options.bounds.given else None,
        identical=all(clip.identical for row in judged for clip in row.clips),
        broken=broken,
        lpips_missing=None if missing is None else plain(missing),
        asked=len(experiment.samples),
        rows=rows,
        seed=_farthest(rows),
    )


def _farthest(rows: Sequence[Row]) -> int | None:
    """Return the seed of the prompt in which ours are farthest from dense, of complete ones."""
    complete = set.intersection(*({clip.seed for clip in row.clips} for row in rows if row.clips))
    ours = (row for row in rows if row.method not in RIVALS)
    clips = [clip for row in ours for clip in row.clips if clip.seed in complete]
    psnrs = [math.inf if clip.psnr_db is None else clip.psnr_db for clip in clips]
    return clips[psnrs.index(min(psnrs))].seed if clips else None
