"""The reasons why a quality is no faster than dense, of what was measured and of the machine."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch

from chipsparse.cli.explain.explanation import UNTIMED, Forecaster
from chipsparse.cli.request import Request
from chipsparse.cli.views.units import counted, seconds_text
from chipsparse.experiments.clips import Generation
from chipsparse.experiments.records import StepResult

AS_FAST = 1.05  # less than this is no gain that anyone notices, or noise
IN_FULL = {"dense": "in full", "refresh": "in full with a refresh", "skip": "skipped"}
REFERENCES = (
    "On a CPU sparse steps run on the references of the kernels, which are not made for speed."
)


def why_no_faster(
    request: Request,
    dense: Generation,
    sparse: Generation,
    busy: str | None,
) -> list[str]:
    """Return sentences on why sparse was no faster than dense; none where it was.

    ``busy`` says what else kept the CPU busy.
    """
    speedup = dense.denoising_seconds / sparse.denoising_seconds
    if speedup >= AS_FAST:
        return []
    sentences = [step_times(dense.steps, sparse.steps)]
    nothing = request.too_few_steps or sparse.nothing_sparse
    if nothing is not None:
        return [*sentences, sentence(nothing)]
    if request.device.type == "cpu" and any(step.action == "sparse" for step in sparse.steps):
        sentences.append(REFERENCES)
    small = too_small(request)
    if small is not None:
        sentences.append(sentence(small))
    if busy is not None:
        sentences.append(f"The CPU had other work: {busy}.")
    return sentences


def sentence(text: str) -> str:
    """Return words as a sentence of its own."""
    return f"{text[:1].upper()}{text[1:]}."


def step_times(dense: Sequence[StepResult], sparse: Sequence[StepResult]) -> str:
    """Return how many steps there were of each action, and the mean time of one."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for step in sparse:
        seconds[step.action].append(step.seconds)
    groups = [
        f"{len(group)} {IN_FULL.get(action, action)} in {seconds_text(statistics.fmean(group))}"
        for action, group in seconds.items()
    ]
    usual = seconds_text(statistics.fmean(step.seconds for step in dense))
    return (
        f"A dense step takes {usual}. Of {counted(len(sparse), 'step')}: {', '.join(groups)} each."
    )


def too_small(request: Request) -> str | None:
    """Return a sentence where the host is what a GPU waits for, so that little can be gained."""
    if request.device.type != "cuda" or request.dtype is torch.float32 or request.planned is None:
        return None
    assert request.profile is not None
    # The weights are there already.
    forecast = Forecaster(request, weights=0).look_ahead(request.profile, None)
    why = forecast.why_untimed
    return None if why is None else why.removeprefix(f"{UNTIMED}: ")
