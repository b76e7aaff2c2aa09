"""What `generate --json` prints: an object, or a list of them for a series."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from chipsparse.cli.denoise import Generation
from chipsparse.cli.summary import Comparison, Outcome


def to_json(outcomes: list[Outcome], *, many: bool) -> str:
    """One JSON object; of a series a list with one for each picture."""
    entries = [_outcome_json(outcome) for outcome in outcomes]
    content: Any = entries if many else entries[0]
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        **outcome.request,
        "error": outcome.error,
        "files": {kind: [str(file) for file in files] for kind, files in outcome.files.items()},
        "sparse": _generation_json(outcome.sparse),
        "dense": _generation_json(outcome.dense),
        "comparison": comparison_json(outcome.comparison),
        "peak_process_bytes": outcome.peak_process_bytes,
    }


def comparison_json(comparison: Comparison | None) -> dict[str, Any] | None:
    """A comparison as JSON values; `psnr_db` is null where the videos are the same."""
    if comparison is None:
        return None
    content = dataclasses.asdict(comparison)
    content["identical"] = math.isinf(comparison.psnr_db)
    return content | {"psnr_db": None} if content["identical"] else content


def _generation_json(made: Generation | None) -> dict[str, Any] | None:
    if made is None:
        return None
    content = {
        field.name: getattr(made, field.name)
        for field in dataclasses.fields(made)
        if field.name not in ("frames", "steps")
    }
    frames, height, width, _ = made.frames.shape
    content |= {"frames": frames, "height": height, "width": width}
    content["steps"] = [dataclasses.asdict(step) for step in made.steps]
    return content
