"""Scores of drafts, of which the best is finished: ``clip``, ``sharpness``, or a function."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from chipsparse.cli.errors import UserError, user_errors
from chipsparse.pipelines.model_files import HUB_NAME, from_cache, read_json

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np

# Frames, uint8 `[T, H, W, 3]`, and the prompt; larger is better.
Measure: TypeAlias = "Callable[[np.ndarray, str], float]"

CLIP = "clip"
SHARPNESS = "sharpness"
CLIP_MODEL = "openai/clip-vit-base-patch32"
MOST_FRAMES = 8  # that CLIP looks at, evenly spread
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601
LARGEST = 1e30  # that a record holds
FORMS = f"use {CLIP}, {SHARPNESS}, FILE.py:FUNCTION or MODULE:FUNCTION"


@dataclass(frozen=True)
class Score:
    """A way to tell good drafts from bad ones; larger is better."""

    name: str  # as it was typed
    measure: Measure
    is_fixed: bool  # a score in the manifest still holds; a user's function may have changed

    def of(self, frames: np.ndarray, prompt: str, file: Path) -> float:
        """Return the score of a file.

        Args:
            frames: All frames of the file, uint8 ``[T, H, W, 3]``.
            prompt: The prompt that it was made of.
            file: Its name, for errors.

        Raises:
            UserError: The score could not be computed, or is no finite number.
        """
        with user_errors(Exception, what=f"--best {self.name} failed for {file}"):
            value = float(self.measure(frames, prompt))
        if not math.isfinite(value) or abs(value) > LARGEST:
            raise UserError(f"--best {self.name} gave {value} for {file}; it must be a number")
        return value


def check_score(name: str) -> None:
    """Raise `UserError` where ``--best`` names no score, as far as its text and files tell."""
    kind, colon, function = name.partition(":")
    if kind == CLIP or name == SHARPNESS:
        if colon and not function:
            raise UserError(f"--best {name} names no model; write {CLIP}:OWNER/NAME or a folder")
        if function and not Path(function).is_dir() and not HUB_NAME.fullmatch(function):
            raise UserError(f"--best {name}: there is no folder {function}, nor has it OWNER/NAME")
        return
    file, _, function = name.rpartition(":")
    if file.endswith(".py"):
        if not Path(file).is_file():
            raise UserError(f"--best {name}: there is no file {file}")
        if function.isidentifier():
            return
    elif function.isidentifier() and all(part.isidentifier() for part in file.split(".")):
        return
    raise UserError(f"--best {name} is no score; {FORMS}")


def load_score(name: str) -> Score:
    """Return a score that is ready to use; raise `UserError` where it cannot be loaded."""
    if name == SHARPNESS:
        return Score(name, sharpness, is_fixed=True)
    kind, _, location = name.partition(":")
    if kind == CLIP:
        return Score(name, clip_similarity(location or CLIP_MODEL), is_fixed=True)
    return Score(name, _function(name), is_fixed=False)


def sharpness(frames: np.ndarray, prompt: str) -> float:
    """Return the variance of the Laplacian of the luma, the mean of all frames.

    The measure is LAPV of Pertuz et al., "Analysis of focus measure operators for shape-from-focus"
    (2013), with the kernel of four neighbours. Luma runs from 0 to 255.

    Args:
        frames: uint8 ``[T, H, W, 3]``, at least 3 pixels high and wide.
        prompt: It has no effect.
    """
    import numpy as np

    variances = []
    for frame in frames:  # one by one, because all at once would take much memory
        luma = frame.astype(np.float32) @ np.asarray(LUMA, np.float32)
        rows = luma[:-2, 1:-1] + luma[2:, 1:-1]
        columns = luma[1:-1, :-2] + luma[1:-1, 2:]
        variances.append(float(np.var(rows + columns - 4 * luma[1:-1, 1:-1])))
    return float(np.mean(variances))


def clip_similarity(location: str) -> Measure:
    """Return the cosine similarity of frames and prompt, the mean of at most `MOST_FRAMES`.

    Hessel et al., "CLIPScore" (2021), without its scale. It runs on the CPU, which leaves the
    GPU's memory to the pipeline.

    Args:
        location: A CLIP model of transformers: a folder, or a name on the Hugging Face hub.

    Raises:
        UserError: The model cannot be loaded.
    """
    import numpy as np
    import torch

    if not Path(location).exists():
        read_json(location, "config.json")  # says in a sentence what is wrong with a hub name
    with user_errors(Exception, what=f"--best {CLIP}: the model {location} could not be loaded"):
        from transformers import CLIPModel, CLIPProcessor

        local = from_cache(location)
        model: Any = CLIPModel.from_pretrained(location, **local).eval()
        processor = CLIPProcessor.from_pretrained(location, **local)

    def similarity(frames: np.ndarray, prompt: str) -> float:
        count = min(MOST_FRAMES, len(frames))
        places = np.linspace(0, len(frames) - 1, count).round().astype(int)
        inputs = processor(
            text=[prompt],
            images=list(frames[places]),
            return_tensors="pt",
            padding=True,
            truncation=True,
        )
        with torch.inference_mode():
            outputs = model(**inputs)
        pairs = torch.cosine_similarity(outputs.image_embeds, outputs.text_embeds)
        return float(pairs.mean())

    return similarity


def _function(name: str) -> Measure:
    """Return the function of ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``."""
    place, _, function = name.rpartition(":")
    with user_errors(Exception, what=f"--best {name} could not be imported"):
        module = _of_file(Path(place)) if place.endswith(".py") else _of_name(place)
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"--best {name}: {place} has no function {function}")
    measure: Measure = found
    return measure


def _of_file(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _of_name(name: str) -> ModuleType:
    """Import a module, also one in the current folder, as ``python -m`` would."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
