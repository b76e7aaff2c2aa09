"""Facts in the files of clips about how they were made."""

from __future__ import annotations

import os
from pathlib import Path

from chipsparse.cli.options import Item
from chipsparse.cli.request import Request
from chipsparse.common.text_files import readable
from chipsparse.common.version import __version__


def generation_metadata(request: Request, item: Item) -> dict[str, str]:
    """Return the facts about a generation, in the order in which they are to be shown.

    They name no folder: a file may be sent to others.
    """
    settings = request.settings
    options = request.generate_options
    profile = None if options.dense else request.profile
    guidance = settings.true_cfg_scale
    facts = {
        "prompt": item.prompt,
        "negative_prompt": options.negative_prompt,
        "steps": settings.num_inference_steps,
        "guidance_scale": settings.guidance_scale if guidance is None else guidance,
        "seed": item.seed,
        "size": f"{settings.width}x{settings.height}" if settings.width else None,
        "frames": settings.num_frames,
        "model": _without_folder(request.model.location),
        "lora": ", ".join(f"{lora.file.name}:{lora.scale:g}" for lora in options.loras) or None,
        "scheduler": None if options.scheduler is None else type(request.scheduler).__name__,
        "flow_shift": options.flow_shift,
        "strength": options.strength,
        "dtype": request.dtype_name,
        "mode": options.mode,
        "profile": None if profile is None else _without_folder(profile.source),
        "quality": None if profile is None else profile.quality,
        "chipsparse": __version__,
    }
    return {name: readable(str(value)) for name, value in facts.items() if value is not None}


def _without_folder(location: str) -> str:
    """Return the name of a model or a profile; that of a model on the hub has no folder."""
    path = Path(location).expanduser()
    here = path.is_absolute() or path.exists()
    return os.path.basename(os.path.abspath(path)) if here else location
