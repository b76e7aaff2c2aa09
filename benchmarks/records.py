"""Result records: what every measurement writes, and the table it prints."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from chipsparse.common.machine import device_name, package_version

Record = dict[str, Any]

# Fields that records made before have under another name.
RENAMED = {
    "group_rows": "block_size",
    "keep_fraction": "density",
    "mlp_keep_fraction": "mlp_density",
}


def environment(device: torch.device) -> Record:
    """The fields that every record carries; the version of what is not installed is None."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "diffusers": package_version("diffusers"),
        "commit": _commit(),
    }


def write(records: Sequence[Record], path: Path) -> None:
    """Writes records as a JSON list, infinity (the PSNR of equal clips) as null.

    The file appears whole or not at all.
    """
    finite = json.loads(json.dumps(list(records)), parse_constant=lambda _: None)
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8"
    ) as file:
        json.dump(finite, file, indent=1, allow_nan=False)
        file.write("\n")
    os.replace(file.name, path)


def read(path: Path) -> list[Record]:
    """The records of a file, by the names that their fields have now."""
    records: list[Record] = json.loads(path.read_text(encoding="utf-8"))
    return [{RENAMED.get(name, name): each[name] for name in each} for each in records]


def table(records: Sequence[Record], columns: dict[str, str]) -> str:
    """A Markdown table; ``columns`` maps a record's field to a format such as ``.2f``."""
    lines = ["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"]
    for record in records:
        cells = []
        for name, form in columns.items():
            value = record.get(name)
            cells.append("" if value is None else format(value, form))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
