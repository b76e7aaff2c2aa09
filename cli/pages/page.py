"""The page of a batch: one HTML file that needs nothing else, not even scripts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import chipsparse
from chipsparse.cli.batch.record import Batch
from chipsparse.cli.views.names import command_text, file_name, name_of, without_folders
from chipsparse.cli.views.units import percent
from chipsparse.cli.wording import bundled_name, counted, seconds_text
from chipsparse.common.byte_sizes import format_bytes

TEMPLATES = Path(__file__).with_name("templates")


def batch_page(batch: Batch, source: Path) -> str:
    """The page of a batch, which lies beside its files: a thumbnail of each, with its prompt.

    Args:
        source: the file of prompts.
    """
    made = [row for row in batch.rows if row.state in ("made", "already there")]
    return (
        _templates()
        .get_template("batch_page.html")
        .render(
            batch=batch,
            source=source.name,
            model=bundled_name(batch.model) or name_of(batch.model),
            made=made,
            failed=[row for row in batch.rows if row.state == "failed"],
            missing=[row for row in batch.rows if row.state == "missing"],
            settings=list(dict.fromkeys(row.settings for row in batch.rows)),
            seconds=sorted(row.seconds for row in made if row.seconds is not None),
        )
    )


@functools.cache
def _templates() -> Environment:
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
        command=command_text,
        counted=counted,
        file_name=file_name,
        name=name_of,
        percent=percent,
        seconds=seconds_text,
    )
    made.globals.update(
        style=Markup((TEMPLATES / "style.css").read_text(encoding="utf-8")),
        version=chipsparse.__version__,
    )
    return made


def _named(value: Any) -> Any:
    """A text of the page with names in place of paths: it tells nobody who made it, and where."""
    return value if isinstance(value, Markup) else without_folders(str(value))
