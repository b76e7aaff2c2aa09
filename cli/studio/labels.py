"""The names of the page's fields, and options of `generate` in their terms."""

from __future__ import annotations

import re
from typing import Any

from chipsparse.cli.options import option_name

# The label of each field, by the option of `generate` that it is.
LABELS = {
    "model": "Model",
    "prompt": "Prompt",
    "image": "Image",
    "quality": "Quality",
    "seed": "Seed",
    "compare": "Also make the dense one",
    "height": "Height",
    "width": "Width",
    "frames": "Frames",
    "steps": "Steps",
    "guidance_scale": "Guidance",
    "negative_prompt": "Negative prompt",
    "scheduler": "Scheduler",
    "flow_shift": "Flow shift",
    "strength": "Strength",
    "lora": "LoRA",
    "lora_scale": "LoRA weight",
}
# What decides about the result and not about the time that it takes.
FREE = ("prompt", "negative_prompt", "seed")


def with_labels(sentence: str) -> str:
    """Return a sentence about options of the command with the labels of fields in their place.

    An option that begins it gets a colon: ``--height 33 does not fit`` is ``Height: 33 does not
    fit``. Options that are no field stay.
    """
    for name, label in LABELS.items():
        option = re.escape(option_name(name))
        sentence = re.sub(rf"^{option}\b:?(?!-)", f"{label}:", sentence)
        sentence = re.sub(rf"{option}\b(?!-)", label, sentence)
    return sentence


def as_options(chosen: dict[str, Any]) -> dict[str, Any]:
    """Return the options of what fields hold, without those that are empty."""
    stripped = {
        name: value.strip() if isinstance(value, str) else value for name, value in chosen.items()
    }
    options = {name: value for name, value in stripped.items() if value not in (None, "")}
    scale = options.pop("lora_scale", None)
    if "lora" in options:
        lora = options["lora"]
        options["lora"] = [lora if scale is None else f"{lora}:{scale}"]
    return options


def work_of(chosen: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return what generations have in common that take the same time."""
    options = as_options(chosen)
    # Any image is scaled to the size that is made.
    options["image"] = "image" in options
    return tuple(sorted((name, str(v)) for name, v in options.items() if name not in FREE))
