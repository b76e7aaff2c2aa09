"""Warnings that point at the user's own line, however deep below it they are raised."""

from __future__ import annotations

import sys
import warnings

# Whose lines a user did not write.
LIBRARIES = ("chipsparse", "diffusers", "transformers", "accelerate", "torch", "contextlib")


def warn_user(message: str, category: type[Warning]) -> None:
    """Warns at the innermost line that is none of a library's.

    It is shown each time, unless the user's filters say otherwise: that something was said for one
    pipeline does not silence it for the next one.
    """
    frame = sys._getframe(1)
    name = frame.f_globals.get("__name__", "")
    while frame.f_back is not None and name.partition(".")[0] in LIBRARIES:
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, name)
