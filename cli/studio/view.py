"""What the page shows of a moment and of a result, as HTML."""

from __future__ import annotations

import base64
import functools
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from chipsparse.cli.generation.denoise import Generation
from chipsparse.cli.studio.feed import Run, Shown, Way
from chipsparse.cli.studio.maker import Result
from chipsparse.cli.views.units import decibels, percent, times
from chipsparse.cli.wording import counted, seconds_text

TEMPLATES = Path(__file__).with_name("templates")
Tile = tuple[str, str]  # a number, and what it is
LETTERS = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "\N{EN DASH}"}


@dataclass(frozen=True)
class Cell:
    """A step of a strip.

    Attributes:
        kind: an action, which has a colour.
        planned: whether it is to come.
    """

    letter: str
    kind: str
    title: str
    planned: bool = False


@dataclass(frozen=True)
class Strip:
    """The steps of a run, and what is to be said of it."""

    way: Way
    cells: list[Cell]
    note: str


def style() -> str:
    """The style sheet of both."""
    return (TEMPLATES / "studio.css").read_text(encoding="utf-8")


def moment(shown: Shown, *, error: str | None = None) -> str:
    """What goes on, the steps that are done and planned, and the preview.

    Args:
        error: one sentence about what went wrong there.
    """
    pictures = [] if shown.preview is None else [_picture(each) for each in shown.preview]
    facts = {"stage": shown.stage, "clock": shown.clock, "error": error}
    strips = [_strip(run) for run in shown.runs]
    return _filled("moment.html", strips=strips, pictures=pictures, **facts)


def result(made: Result) -> str:
    """Times and differences, the steps, and what else is worth knowing."""
    by_way = {"sparse": made.sparse, "dense": made.dense}
    strips = [_strip(run, by_way[run.way], _note(by_way[run.way])) for run in made.runs]
    notes = [*made.request["warnings"], *made.sparse.fallbacks, *made.sparse.notes]
    if made.kept:
        notes.append("The dense run is that of before: it does not depend on the quality.")
    return _filled("result.html", tiles=_tiles(made), strips=strips, notes=notes)


def _filled(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(letters=LETTERS, **values)


@functools.cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _tiles(made: Result) -> list[Tile]:
    tiles = [(seconds_text(made.sparse.denoising_seconds), "sparse, all steps")]
    compared = made.comparison
    if made.dense is None or compared is None:
        share = made.sparse.work_share
        return tiles if share is None else [*tiles, (percent(share), "of dense's operations")]
    tiles += [
        (seconds_text(made.dense.denoising_seconds), "dense, all steps"),
        (times(compared.speedup), "as fast as dense"),
        (decibels(compared.psnr_db), "PSNR"),
    ]
    if compared.ssim is not None:
        tiles.append((f"{compared.ssim:.4f}", "SSIM"))
    if len(made.sparse.frames) > 1 and not compared.identical:
        worst = compared.psnr_per_frame[made.worst_frame]
        tiles.append((decibels(worst), f"worst frame, number {made.worst_frame}"))
    return tiles


def _strip(run: Run, made: Generation | None = None, note: str = "") -> Strip:
    """The steps of a run; of one that is finished with times and shares.

    Steps whose branches differ have the letter M.
    """
    cells = []
    for number, action in enumerate(run.actions):
        title = [f"step {number + 1}: {action}"]
        if made is not None:
            step = made.steps[number]
            shares = {"attention": step.attention_kept, "MLP": step.mlp_kept}
            title += [f"{percent(v)} of {name}" for name, v in shares.items() if v is not None]
            title.append(seconds_text(step.seconds))
        cells.append(Cell(LETTERS.get(action, "M"), action.partition("+")[0], ", ".join(title)))
    for number, action in enumerate(run.planned[len(cells) :], start=len(cells)):
        planned = f"step {number + 1}: {action}, planned"
        cells.append(Cell(LETTERS[action], action, planned, planned=True))
    return Strip(run.way, cells, note)


def _note(made: Generation | None) -> str:
    """What a run computed; nothing of one that was stopped."""
    if made is None:
        return "stopped"
    steps, seconds = counted(len(made.steps), "step"), seconds_text(made.denoising_seconds)
    kept = [step.attention_kept for step in made.steps if step.action == "sparse"]
    shares = [share for share in kept if share is not None]
    if not shares:
        return f"{steps} in {seconds}"
    mean = sum(shares) / len(shares)
    return f"{steps} in {seconds}; a sparse one computes {percent(mean)} of the attention"


def _picture(pixels: np.ndarray) -> str:
    """An image as an address that holds it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
