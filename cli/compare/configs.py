"""Two configs against the stock model and against each other, over prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from chipsparse.cli.compare.options import CompareOptions, Subject
from chipsparse.cli.compare.record import (
    SIDES,
    Config,
    ConfigsComparison,
    ShownClip,
    Side,
)
from chipsparse.cli.errors import UserError, exit_code
from chipsparse.cli.generate.record import Settings
from chipsparse.cli.media import write as media
from chipsparse.cli.media.panels import difference_rows, stack_panels
from chipsparse.cli.prompts import first_prompts, shapes
from chipsparse.cli.ranks import called, meet, start_others, this_rank
from chipsparse.cli.request import Request, Work, out_of_range_text, resolve, working
from chipsparse.cli.settings import OPTION_OF
from chipsparse.cli.views.terminal import print_result
from chipsparse.cli.views.units import counted, sharing_text
from chipsparse.experiments.clips import ClipMaker
from chipsparse.experiments.engine import Experiment, sparse_way
from chipsparse.experiments.records import ClipRecord
from chipsparse.experiments.samples import DENSE, Sample
from chipsparse.experiments.statistics import LEAST_VALUES
from chipsparse.experiments.store import Store
from chipsparse.parallel.degrees import Parallel

BUNDLED_COUNT = 8  # prompts, where no file of them is given


def compare_configs(options: CompareOptions) -> None:
    """Check all that is cheap to check, then generate, compare, write and tell.

    Keeps what it has where the user interrupts after two prompts: that many give intervals.
    """
    rank, code = this_rank(options), 0
    with working(options, rank) as work:
        requests = _requests(options, work, rank.parallel)
        asked = list(requests.values())
        _check_settings(asked)
        samples = _samples(options, video=work.model.accepts("num_frames"))
        if options.output is not None:
            media.check_kind(options.output, video=work.model.accepts("num_frames"))
        if rank.starts:
            return start_others("compare", options, rank.ranks)
        notes = {side: note for side, each in requests.items() if (note := _range_note(each))}
        for note in notes.values():
            work.display.tell(f"chipsparse: warning: {note}")
        prompts = [sample.prompt for sample in samples]
        facts = called(options, *(each.profile for each in asked), prompts=prompts)
        rank = meet(rank, work.device, facts)
        settings = asked[0].settings
        maker = ClipMaker(
            asked[0].load, settings.pipeline_call, settings.num_inference_steps, work.display
        )
        experiment = Experiment(maker, samples, Store(ranks=rank), per_frame=True)
        ways = [
            sparse_way(side, each.profile, parallel=rank.parallel)
            for side, each in requests.items()
            if each.profile is not None
        ]
        experiment.plan(ways)
        records: list[ClipRecord] = []
        worst: tuple[float, Mapping[str, Any]] | None = None
        for done, sample in enumerate(samples):
            try:
                clips = list(experiment.run(ways, [sample], dense_first=False))
            except KeyboardInterrupt as error:
                if done < LEAST_VALUES:
                    raise
                code = exit_code(error)
                break
            records += [clip.record for clip in clips]
            lowest = min(
                np.inf if clip.record.psnr_db is None else clip.record.psnr_db for clip in clips
            )
            if worst is None or lowest < worst[0]:
                worst = lowest, {clip.way.name: clip.frames for clip in clips}
        if not rank.writes:
            return None
        assert worst is not None
        shown, unwritten = None, None
        if options.output is not None:
            try:
                with work.display.stage(f"writing {options.output}"):
                    shown = _write_clip(worst[1], options.output, options)
            except UserError as error:  # the numbers took longer than the clip
                unwritten = str(error)
    sides = dict(zip(SIDES, options.subjects, strict=True))
    result = ConfigsComparison(
        model=work.model.location,
        transformer_class=work.model.transformer_class,
        device=str(work.device),
        dtype=str(work.dtype).removeprefix("torch."),
        settings=Settings(**dataclasses.asdict(settings)),
        flow_shift=options.flow_shift,
        sharing="" if rank.parallel is None else sharing_text(rank.parallel),
        configs={
            side: Config(name=subject.text, profile=_source(requests.get(side)))
            for side, subject in sides.items()
        },
        range_notes=notes,
        asked=len(samples),
        summaries=ConfigsComparison.summarized(
            records, {side: side if side in requests else DENSE for side in SIDES}
        ),
        records=records,
        clip=shown,
        unwritten=unwritten,
    )
    print_result(result, as_json=options.json)
    if unwritten is not None:
        raise UserError(unwritten)
    if code:
        raise typer.Exit(code)


def _requests(
    options: CompareOptions, work: Work, parallel: Parallel | None
) -> dict[Side, Request]:
    """Return the requests of the sides that are configs."""

    def request(subject: Subject) -> Request:
        return resolve(
            dataclasses.replace(options, config=subject.path, quality=subject.quality),
            model=work.model,
            device=work.device,
            dtype=work.dtype,
            parallel=parallel,
            instead="configs are compared on prompts alone",
        )

    sides = zip(SIDES, options.subjects, strict=True)
    return {side: request(subject) for side, subject in sides if subject.kind != "dense"}


def _check_settings(requests: Sequence[Request]) -> None:
    """Raise `UserError` where both configs ask for other settings."""
    first, last = (dataclasses.asdict(requests[place].settings) for place in (0, -1))
    for name, value in first.items():
        if value != last[name]:
            option = OPTION_OF.get(name)
            way = f"give {option}" if option else "make them the same in both files"
            raise UserError(
                f"A generates with {name} {value} and B with {last[name]}; clips of other "
                f"settings do not compare: {way}"
            )


def _samples(options: CompareOptions, *, video: bool) -> list[Sample]:
    samples = first_prompts(
        options.prompts,
        bundled=shapes(video=video),
        usual=BUNDLED_COUNT,
        count=options.count,
        seed=options.seed,
    )
    if len(samples) < LEAST_VALUES:
        raise UserError(
            f"{options.prompts} has {counted(len(samples), 'prompt')}; intervals need at least "
            f"{LEAST_VALUES}, one a line"
        )
    return samples


def _range_note(request: Request) -> str | None:
    if request.profile is None or not request.out_of_range:
        return None
    return out_of_range_text(request.profile, request.out_of_range)


def _source(request: Request | None) -> str | None:
    return None if request is None or request.profile is None else request.profile.source


def _write_clip(frames: Mapping[str, Any], output: Path, options: CompareOptions) -> ShownClip:
    others = [
        (frames[side], f"{side}: {Path(subject.text).stem}")
        for side, subject in zip(SIDES, options.subjects, strict=True)
        if subject.kind != "dense"
    ]
    rows, factor = difference_rows((frames[DENSE], DENSE), others, factor=options.amplify)
    written = media.write_media({output: stack_panels(rows)}, fps=options.rate)
    return ShownClip(files=[str(file) for file in written[output]], amplified=factor)
