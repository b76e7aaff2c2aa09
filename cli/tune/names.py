"""What the measurements of `chipsparse tune` are called in its results file."""

from __future__ import annotations

PAIR = "pair, "
WITH_LPIPS = "with LPIPS, "


def pair_name(config: str, prompt: str, *, lpips: bool) -> str:
    """The name of a sparse generation that was compared with the dense one."""
    return f"{PAIR}{WITH_LPIPS if lpips else ''}{config}, {prompt}"


def pair_of(name: str) -> tuple[str, str] | None:
    """The config and the prompt of such a name; None for any other measurement."""
    if not name.startswith(PAIR):
        return None
    config, _, prompt = name.removeprefix(PAIR).removeprefix(WITH_LPIPS).partition(", ")
    return config, prompt


def dense_name(prompt: str) -> str:
    """The name of a dense generation of a prompt."""
    return f"dense, {prompt}"


def times_name(density: float, *, sparse_mlp: bool) -> str:
    """The name of the times of steps that keep so many columns."""
    return f"times, {density:g} of the columns{', sparse MLPs' * sparse_mlp}"
