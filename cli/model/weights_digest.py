"""Tells weights from others, without reading all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from chipsparse.cli.model.description import ModelDescription
from chipsparse.cli.model.weight_files import WEIGHTS

SAMPLED_BYTES = 1 << 16  # of each weights file's end, where its last tensor is


def weights_digest(model: ModelDescription) -> str | None:
    """Tells the weights in a folder from others; None for a hub model, which its name tells."""
    folder = Path(model.location)
    if not folder.is_dir():
        return None
    return files_digest(file for file in folder.glob("*/*") if file.suffix in WEIGHTS)


def files_digest(files: Iterable[Path]) -> str:
    """Tells files of weights from others, by their names, sizes and ends."""
    found = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        with file.open("rb") as stream:
            stream.seek(max(0, size - SAMPLED_BYTES))
            found.update(f"{file.parent.name}/{file.name} {size}".encode() + stream.read())
    return found.hexdigest()[:12]
