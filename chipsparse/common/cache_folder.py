"""Where the user's programs keep what they can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """The folder of this library, which may not be there yet; None where there is no home."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "chipsparse"
    except RuntimeError:
        return None
