"""The work of `chipsparse compare --suite`: all clips of a suite, its numbers and its page."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chipsparse.cli.commands.compare import CompareOptions
from chipsparse.cli.errors import UserError, user_errors
from chipsparse.cli.media import write as media
from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weights import weights_digest
from chipsparse.cli.options import command_words
from chipsparse.cli.pages.page import check_library, page
from chipsparse.cli.pages.part import part_of
from chipsparse.cli.progress import ProgressDisplay, duration
from chipsparse.cli.prompts import Prompt, first_prompts, shapes
from chipsparse.cli.ranks import Rank
from chipsparse.cli.request import resolve, working
from chipsparse.cli.suite.lab import SuiteLab
from chipsparse.cli.suite.record import environment, suite_json
from chipsparse.cli.suite.rows import suite_rows
from chipsparse.cli.wording import bundled_name, counted
from chipsparse.cli.work_progress import WorkProgress
from chipsparse.common.finished_files import write_whole
from chipsparse.experiments.clips import ClipMaker
from chipsparse.tuning.results_file import ResultsError, ResultsFile, ResultsWriteError

MEASURED, TO_SEND, PAGE = "measured.json", "suite.json", "suite.html"
BUNDLED_COUNT = 12  # prompts, where no file of them is given


@dataclass(frozen=True)
class Suite:
    """A finished suite.

    Attributes:
        content: of the file that can be sent.
    """

    folder: Path
    content: dict[str, Any]


def kept(options: CompareOptions) -> str:
    """What an interruption leaves."""
    if not (options.folder / MEASURED).is_file():
        return "nothing was measured"
    return f"all finished clips are in {options.folder}; go on with: {command(options)}"


def command(options: CompareOptions) -> str:
    """What goes on with it."""
    settled = {"model": None, "output": options.folder, "fps": options.rate}
    left = {name: None for name in ("device", "dtype") if getattr(options, name) == "auto"}
    return shlex.join(command_words("compare", options, {**settled, **left}))


def run_suite(options: CompareOptions) -> Suite:
    """Checks all that is cheap to check, then makes the clips that are missing."""
    try:
        with user_errors(ResultsWriteError):
            return _run(options)
    except ResultsError as error:
        text = str(error).replace("another results file", "another folder with --output")
        raise UserError(text) from error


def _run(options: CompareOptions) -> Suite:
    check_library()
    with working(options, Rank()) as (model, device, dtype, display):
        request = resolve(
            options,
            model=model,
            device=device,
            dtype=dtype,
            instead="a suite generates from prompts alone",
            optional=True,
        )
        settings = request.settings
        video = model.accepts("num_frames")
        prompts = suite_prompts(options, model)
        rows = suite_rows(options, model)
        folder, suffix = options.folder, ".mp4" if video else ".png"
        _check_folder(options, suffix)
        common = environment(model, settings, options.flow_shift, device, dtype)
        results = ResultsFile(folder / MEASURED, _about(common, model))
        progress = WorkProgress(display)
        generator = ClipMaker(
            request.load,
            lambda prompt: settings.pipeline_call(prompt, negative_prompt=options.negative_prompt),
            settings.num_inference_steps,
            progress,
            plain_lines=1,
        )
        lab = SuiteLab(generator, rows, prompts, results, suffix, options.rate)
        timed = False
        for prompt in prompts:
            lab.plan()
            lab.dense(prompt)
            if not timed:
                timed = _tell_time(display, progress, lab.plan())
            lab.others(prompt)
            content = suite_json(common, lab, with_prompts=options.with_prompts)
            _write(folder / TO_SEND, to_send(content))
        with display.stage(f"writing {folder / PAGE}"):
            _write(folder / PAGE, page([part_of(folder / TO_SEND, content)]))
    return Suite(folder, content)


def suite_prompts(options: CompareOptions, model: ModelDescription) -> list[Prompt]:
    """Of ``--prompts``, or bundled ones.

    What the bundled models were trained on are scenes of their own.
    """
    own = shapes(video=model.accepts("num_frames"))
    return first_prompts(
        options.prompts,
        bundled="suite.txt" if bundled_name(model.location) is None else own,
        usual=BUNDLED_COUNT,
        count=options.count,
        seed=options.seed,
    )


def _check_folder(options: CompareOptions, suffix: str) -> None:
    """Raises `UserError` where the folder could not be made or filled; leaves nothing."""
    folder = options.folder
    inside = folder if folder.is_dir() else folder.parent
    media.check_output(inside / f"suite{suffix}", fps=options.fps)


def _about(common: dict[str, Any], model: ModelDescription) -> dict[str, Any]:
    """What clips must have in common to be compared with each other."""
    facts = {name: value for name, value in common.items() if not isinstance(value, dict)}
    versions = {name: each for name, each in common["versions"].items() if name != "python"}
    return {**facts, **common["settings"], **versions, "weights": weights_digest(model)}


def _tell_time(display: ProgressDisplay, progress: WorkProgress, clips: int) -> bool:
    """Whether it is known: not before anything was made."""
    seconds = progress.seconds_left()
    if not clips or seconds is None:
        return False
    display.tell(
        f"{counted(clips, 'clip')} to make, about {duration(seconds)}; the same command "
        "goes on where it was broken off"
    )
    return True


def to_send(content: dict[str, Any]) -> str:
    """The text of the file that can be sent."""
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _write(file: Path, text: str) -> None:
    with user_errors(OSError, what=f"{file} cannot be written"):
        write_whole(file, text)
