"""A moment and a result as HTML."""

from __future__ import annotations

import base64
import functools
import io
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from chipsparse.cli.studio.run import Moment, Result, Run
from chipsparse.cli.views.units import counted, decibels, percent, seconds_text, times

TEMPLATES = Path(__file__).with_name("templates")
LETTERS = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "\N{EN DASH}"}


def style() -> str:
    """Return the style sheet of both."""
    return (TEMPLATES / "studio.css").read_text(encoding="utf-8")


def moment(shown: Moment) -> str:
    """Return what goes on, the steps that are done and planned, and the preview."""
    pictures = [] if shown.preview is None else [_picture(frame) for frame in shown.preview]
    return _filled("moment.html", moment=shown, strips=_strips(shown.runs), pictures=pictures)


def result(made: Result) -> str:
    """Return times and differences, the steps, and what else is worth knowing."""
    notes = [*made.warnings, *made.sparse.fallbacks, *made.sparse.notes]
    if made.kept:
        notes.append("The dense run is that of before: it does not depend on the quality.")
    strips = _strips(made.runs, stopped="stopped")
    return _filled("result.html", tiles=_tiles(made), strips=strips, notes=notes)


@functools.cache
def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _filled(template: str, **values: Any) -> str:
    return _templates().get_template(template).render(letters=LETTERS, **values)


def _tiles(made: Result) -> list[tuple[str, str]]:
    """Return numbers with what they are."""
    tiles = [(seconds_text(made.sparse.denoising_seconds), "sparse, all steps")]
    compared, share = made.comparison, made.sparse.work_share
    if made.dense is None or compared is None:
        return tiles if share is None else [*tiles, (percent(share), "of dense's operations")]
    tiles += [
        (seconds_text(made.dense.denoising_seconds), "dense, all steps"),
        (times(compared.speedup), "as fast as dense"),
        (decibels(compared.psnr_db), "PSNR"),
    ]
    if compared.ssim is not None:
        tiles.append((f"{compared.ssim:.4f}", "SSIM"))
    if len(made.sparse.frames) > 1 and not compared.identical:
        worst = made.psnr_per_frame[made.worst_frame]
        tiles.append((decibels(worst), f"worst frame, number {made.worst_frame}"))
    return tiles


def _strips(runs: Any, stopped: str = "") -> list[dict[str, Any]]:
    """Return the steps of runs; those of finished ones with times and shares.

    Steps whose branches differ have the letter M.
    """
    strips = []
    for run in runs:
        cells = []
        for number, action in enumerate([*run.actions, *run.planned[len(run.actions) :]]):
            planned, title = number >= len(run.actions), f"step {number + 1}: {action}"
            if run.made is not None:
                step = run.made.steps[number]
                shares = {"attention": step.attention_kept, "MLP": step.mlp_kept}
                parts = [f"{percent(v)} of {name}" for name, v in shares.items() if v is not None]
                title = ", ".join([title, *parts, seconds_text(step.seconds)])
            title += ", planned" if planned else ""
            kind = action.partition("+")[0]
            cells.append((LETTERS.get(action, "M"), kind, title, planned))
        strips.append({"way": run.way, "cells": cells, "note": _note(run) or stopped})
    return strips


def _note(run: Run) -> str:
    """Return what a finished run computed."""
    if run.made is None:
        return ""
    steps, seconds = counted(len(run.made.steps), "step"), run.made.denoising_seconds
    kept = [step.attention_kept for step in run.made.steps if step.action == "sparse"]
    shares = [share for share in kept if share is not None]
    text = f"{steps} in {seconds_text(seconds)}"
    mean = percent(float(np.mean(shares))) if shares else ""
    return f"{text}; a sparse one computes {mean} of the attention" if shares else text


def _picture(pixels: np.ndarray) -> str:
    """Return an image as an address that holds it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
