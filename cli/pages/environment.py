"""What all templates share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import chipsparse
from chipsparse.cli.pages.names import without_folders
from chipsparse.cli.pages.units import decibels, shortened, times
from chipsparse.cli.wording import counted, seconds_text
from chipsparse.common.byte_sizes import format_bytes

TEMPLATES = Path(__file__).with_name("templates")
LONGEST_TITLE = 80


def environment() -> Environment:
    """Whatever templates show is escaped, and paths are cut to names."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=_named,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        bytes=format_bytes,
        counted=counted,
        decibels=decibels,
        seconds=seconds_text,
        shortened=lambda text: shortened(text, LONGEST_TITLE),
        times=times,
    )
    made.globals.update(
        version=chipsparse.__version__,
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
    )
    return made


def _named(value: Any) -> Any:
    """A text of the page with names in place of paths: it tells nobody who made it, and where."""
    return value if isinstance(value, Markup) else without_folders(str(value))
