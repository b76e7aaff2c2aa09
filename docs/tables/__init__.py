"""The tables of the documentation that say what the code and the records say.

A page has a place for each of them, between two comments that nobody sees::

    <!-- table: config -->
    ...
    <!-- end of table -->

``python -m docs.tables`` writes them anew; a test fails where one is out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from docs.tables import config, measured, models

PAGES = Path(__file__).parents[1]
TABLES: dict[str, Callable[[], str]] = {
    "config": config.sections,
    "old names": config.old_names,
    "models": models.models,
    "model details": models.details,
    "other classes": models.other_classes,
    "attention kernels": measured.attention_kernels,
    "attention by share": measured.attention_by_share,
    "sparse MLP": measured.sparse_mlp,
    "full size": partial(measured.full_size, "full_size_h200.json"),
    "full size, named qualities": partial(measured.full_size, "full_size_qualities_h200.json"),
    "full size, 8 bits": partial(measured.full_size_8_bits, "full_size_fp8_h200.json"),
    "full size, further families": partial(measured.full_size, "full_size_families_h200.json"),
    "several GPUs": partial(measured.several_gpus, "parallel_h200.json"),
    "host memory": measured.host_memory,
    "tiny-wan time": measured.tiny_wan_time,
    "tiny-wan quality": measured.tiny_wan_quality,
    "captured mass": measured.captured_mass,
    "tiny-flux quality": measured.tiny_flux_quality,
    "equal work, 17,408 tokens": partial(measured.equal_work, "17408"),
    "equal work, 57,600 tokens": partial(measured.equal_work, "57600"),
    "equal work, 2,304 tokens": partial(measured.equal_work, "2304"),
    "equal work, tiny-flux": partial(measured.equal_work, "flux"),
}
START, END = "<!-- table: {} -->", "<!-- end of table -->"
PLACE = re.compile(r"<!-- table: (?P<name>.*?) -->\n(?P<content>.*?)<!-- end of table -->", re.S)


def pages() -> list[Path]:
    """All pages, in the order of their names."""
    return sorted(PAGES.glob("*.md"))


def renewed(text: str) -> str:
    """A page with its tables as they are now.

    Raises:
        ValueError: if it has a place for a table that there is not, or one that does not end.
    """

    def write(place: re.Match[str]) -> str:
        name = place["name"]
        if name not in TABLES:
            raise ValueError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        return f"{START.format(name)}\n\n{TABLES[name]()}\n\n{END}"

    if text.count("<!-- table: ") != len(PLACE.findall(text)):
        raise ValueError(f"each place for a table must end with {END}")
    return PLACE.sub(write, text)
