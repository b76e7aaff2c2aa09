"""The tables of the documentation that repeat what the code and the records hold.

A page has a place for each of them, between two comments that a reader does not see::

    <!-- table: config -->
    ...
    <!-- end of table -->

``python -m docs.tables`` writes them anew; a test fails where one is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from docs.tables import config, measured, memory, models, qualities

ROOT = Path(__file__).parents[2]
TABLES: dict[str, Callable[[], str]] = {
    "moving photographs": measured.photographs,
    "moving photographs in short": measured.photographs_in_short,
    "few steps": measured.few_steps,
    "rules of sparse MLPs": measured.sparse_mlp_rules,
    "published quality": measured.published_quality,
    "config": config.sections,
    "qualities": qualities.qualities,
    "models": models.models,
    "what was measured": measured.what_was_measured,
    "other classes": models.other_classes,
    "full size": measured.full_size,
    "full size, 8 bits": measured.full_size_8_bits,
    "several GPUs": measured.several_gpus,
    "attention kernels": measured.attention_kernels,
    "sparse MLP": measured.sparse_mlp,
    "host memory": measured.host_memory,
    "memory": memory.memory,
    "tiny-wan time": measured.tiny_wan_time,
}
START = "<!-- table: {} -->"
END = "<!-- end of table -->"
PLACE = re.compile(r"<!-- table: (?P<name>.*?) -->\n(?P<content>.*?)<!-- end of table -->", re.S)


def pages() -> list[Path]:
    """Return the README and all pages of the documentation, in the order of their names."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def renewed(text: str) -> str:
    """Return the text of a page with its tables as they are now.

    Raises:
        ValueError: if a place names no table, or does not end.
    """

    def write(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in TABLES:
            raise ValueError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        return f"{START.format(name)}\n\n{TABLES[name]()}\n\n{END}"

    if text.count("<!-- table: ") != len(PLACE.findall(text)):
        raise ValueError(f"each place for a table must end with {END}")
    return PLACE.sub(write, text)
