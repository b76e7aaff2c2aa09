"""Facts in the files of clips about how they were made.

`parameters` is the form that viewers and other programs for image generation read: the prompt, the
negative prompt, and one line of ``Name: value`` pairs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import chipsparse

if TYPE_CHECKING:
    from chipsparse.cli.generate.record import RequestRecord

# What others call these; what is not here begins with a capital letter.
NAMES = {"guidance_scale": "CFG scale", "dtype": "Precision", "chipsparse": "Version"}
TEXTS = ("prompt", "negative_prompt")


def generation_metadata(request: RequestRecord) -> dict[str, str]:
    """Return the facts about a generation, without any folder: a file may be sent to others.

    They are in the order in which they are to be shown.
    """
    settings, dense = request.settings, request.mode == "dense"
    guidance = settings.true_cfg_scale
    sides = (settings.width, settings.height)
    facts = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale if guidance is None else guidance,
        "seed": request.seed,
        "size": None if None in sides else "x".join(map(str, sides)),
        "frames": settings.num_frames,
        "model": _without_folder(request.model),
        "lora": ", ".join(f"{_without_folder(e.file)}:{e.scale:g}" for e in request.loras) or None,
        "scheduler": request.scheduler,
        "flow_shift": request.flow_shift,
        "strength": request.strength,
        "dtype": request.dtype,
        "mode": request.mode,
        "profile": None if dense else _without_folder(request.profile),
        "quality": None if dense else request.quality,
        "chipsparse": chipsparse.__version__,
    }
    return {name: str(value) for name, value in facts.items() if value is not None}


def parameters(facts: Mapping[str, str]) -> str:
    """Return the facts for people and other programs."""
    lines = [facts["prompt"]] if "prompt" in facts else []
    if facts.get("negative_prompt"):
        lines.append(f"Negative prompt: {facts['negative_prompt']}")
    pairs = (f"{_name(name)}: {_value(name, v)}" for name, v in facts.items() if name not in TEXTS)
    return "\n".join([*lines, ", ".join(pairs)])


def as_json(facts: Mapping[str, str]) -> str:
    """Return the facts for chipsparse."""
    return json.dumps(dict(facts), ensure_ascii=False)


def _name(name: str) -> str:
    return NAMES.get(name, name.replace("_", " ").capitalize())


def _value(name: str, value: str) -> str:
    value = f"chipsparse {value}" if name == "chipsparse" else value
    quoted = any(mark in value for mark in ',:\n"')
    return json.dumps(value, ensure_ascii=False) if quoted else value


def _without_folder(location: str | None) -> str | None:
    """Return the name of a model or a profile; that of a model on the hub has no folder."""
    if location is None:
        return None
    path = Path(location).expanduser()
    here = path.is_absolute() or path.exists()
    return os.path.basename(os.path.abspath(path)) if here else location
