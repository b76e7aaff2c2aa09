"""A model family for the tests that all adapters pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """A tiny random-weight pipeline of the real classes, and calls that it must run.

    Attributes:
        name: what the tests call it.
        make: a new pipeline on the CPU in fp32, the same weights at every call.
        call: keyword arguments of the pipeline for a small picture, prompts as ``prompt_embeds`` or
            text; steps, generator and output type are the tests'.
        variants: further calls by name, as changes to ``call``: "odd size", "batch", "guided",
            "one frame", ... whatever the pipeline allows.
        fallbacks: what the report may say of them, as parts of sentences.
        kinds: how many kinds of repeated blocks the model has: one compiled graph for each.
        dense_parts: parts ("attention", "mlp") that never run sparse here.
        slow: all its tests are slow ones, but for a short generation.
        masked: variants whose attention runs dense, and what the report says of each.
        unpatched_steps: first steps of a generation that run as without chipsparse.
        brief: only its calls are tested, in slow tests; its adapter is another family's, too.
    """

    name: str
    make: Callable[[], Any]
    call: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()
    kinds: int = 1
    dense_parts: tuple[str, ...] = ()
    slow: bool = False
    brief: bool = False
    masked: Mapping[str, str] = field(default_factory=dict)
    unpatched_steps: int = 0
