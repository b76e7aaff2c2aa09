"""Finished clips that cannot be written where they should be: kept instead of lost."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from chipsparse.cli.media.images import write_pngs
from chipsparse.cli.media.metadata import Style
from chipsparse.common.cache_folder import cache_folder


def keep_elsewhere(clips: Mapping[Path, np.ndarray], style: Style) -> Path | None:
    """Writes clips as PNG, which loses nothing, in the first folder that takes them.

    PNG, as many small files pass where one large one does not.

    Args:
        clips: uint8 ``[F, H, W, 3]`` by the paths that they should have had.
        style: has the facts about them.

    Returns:
        The folder; None where there is room nowhere.
    """
    for parent in _places():
        with suppress(OSError):
            parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix="chipsparse-kept-", dir=parent))
            whole = False
            try:
                for path, frames in clips.items():
                    write_pngs(folder / f"{path.stem}.png", frames, style)
                whole = True
                return folder
            finally:
                if not whole:
                    shutil.rmtree(folder, ignore_errors=True)
    return None


def _places() -> Iterator[Path]:
    with suppress(OSError):  # where no temporary folder can be written to
        yield Path(tempfile.gettempdir())
    if (folder := cache_folder()) is not None:
        yield folder
