"""What the page shows of a moment and of a result, as HTML."""

from __future__ import annotations

import base64
import functools
import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from chipsparse.cli.generation.denoise import Generation
from chipsparse.cli.pages.units import decibels, percent, times
from chipsparse.cli.studio.feed import Shown
from chipsparse.cli.studio.maker import Result
from chipsparse.cli.wording import counted, seconds_text

TEMPLATES = Path(__file__).with_name("templates")
LETTERS = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "\N{EN DASH}"}


@dataclass(frozen=True)
class Tile:
    """A number, and what it is."""

    value: str
    name: str


def style() -> str:
    """The style sheet of both."""
    return (TEMPLATES / "studio.css").read_text(encoding="utf-8")


def moment(shown: Shown, *, error: str | None = None) -> str:
    """What goes on, the steps that are done and planned, and the preview.

    Args:
        shown: the moment.
        error: one sentence about what went wrong there.
    """
    pictures = [] if shown.preview is None else [_picture(each) for each in shown.preview]
    return (
        _templates()
        .get_template("moment.html")
        .render(
            stage=shown.stage,
            clock=shown.clock,
            runs=shown.runs,
            pictures=pictures,
            letters=LETTERS,
            error=error,
        )
    )


def result(made: Result) -> str:
    """Times and differences, the steps, and what else is worth knowing."""
    by_way = {"sparse": made.sparse, "dense": made.dense}
    notes = {run.way: _note(by_way[run.way]) for run in made.runs}
    remarks = [*made.request["warnings"], *made.sparse.fallbacks, *made.sparse.notes]
    if made.kept:
        remarks.append("The dense run is that of before: it does not depend on the quality.")
    return (
        _templates()
        .get_template("result.html")
        .render(
            tiles=_tiles(made),
            runs=made.runs,
            notes=notes,
            letters=LETTERS,
            remarks=remarks,
        )
    )


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
    tiles = [Tile(seconds_text(made.sparse.denoising_seconds), "sparse, all steps")]
    compared = made.comparison
    if made.dense is None or compared is None:
        share = made.sparse.work_share
        return tiles if share is None else [*tiles, Tile(percent(share), "of dense's operations")]
    tiles += [
        Tile(seconds_text(made.dense.denoising_seconds), "dense, all steps"),
        Tile(times(compared.speedup), "as fast as dense"),
        Tile(_decibels(compared.psnr_db), "PSNR"),
    ]
    if compared.ssim is not None:
        tiles.append(Tile(f"{compared.ssim:.4f}", "SSIM"))
    if len(made.sparse.frames) > 1 and not compared.identical:
        worst = compared.psnr_per_frame[made.worst_frame]
        tiles.append(Tile(_decibels(worst), f"worst frame, number {made.worst_frame}"))
    return tiles


def _decibels(value: float) -> str:
    return decibels(None if math.isinf(value) else value)


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
