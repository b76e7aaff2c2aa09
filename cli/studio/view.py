"""A generation as HTML: the row of steps, the preview, and the result."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image

from chipsparse.cli.views.units import counted, decibels, percent, seconds_text, times

if TYPE_CHECKING:
    from chipsparse.cli.studio.run import Live

LETTERS = {"dense": "D", "refresh": "R", "sparse": "S", "skip": "\N{EN DASH}"}


def shown(live: Live) -> str:
    """Return what goes on or came out of a generation."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for form in (counted, decibels, percent, seconds_text, times, picture):
        environment.filters[form.__name__] = form
    return environment.get_template("studio.html").render(live=live, letters=LETTERS)


def picture(pixels: np.ndarray) -> str:
    """Return an image, uint8 ``[H, W, 3]``, as an address that holds it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
