"""Calls of a transformer that run denser than asked, and skipped steps that cost quality."""

from __future__ import annotations

from chipsparse.reasons.reason import Level, Reason, fallback, note, nothing_sparse

ENABLE_THERE = "enable chipsparse on the pipeline that runs"
NAME_THE_LOOP = f"{ENABLE_THERE}, or run the loop within handle.generation(scheduler)"
# Why the step of a call is not known, and what would help.
UNKNOWN_LOOP = (
    "the loop is neither the enabled pipeline's own nor within handle.generation(), so its steps "
    "are not known",
    NAME_THE_LOOP,
)
OTHER_TIMESTEP = (
    "the scheduler of this generation does not have the timestep of this call next, so its step is "
    "not known",
    "give handle.generation() the scheduler that runs the loop",
)
OTHER_SCHEDULER = "the scheduler of the enabled pipeline does not run this call"


def conditions_changed(condition: str) -> Reason:
    """Return the fallback for calls after a change of a condition, which is named."""
    return fallback(
        "calls.conditions_changed",
        f"calls run in full where {condition} changes: what was kept before is not used",
    )


def branch_left_alone(branch: str, cause: str) -> Reason:
    """Return the fallback for a guidance branch whose calls run as without chipsparse."""
    return fallback("calls.branch_dense", f"calls of branch {branch} run dense: {cause}")


def steps_unknown() -> Reason:
    """Return the fallback for a call that names its step, but not how many there are."""
    sentence = f"{OTHER_SCHEDULER}, so the number of steps is not known"
    return fallback("calls.steps_unknown", sentence, NAME_THE_LOOP)


def times_unknown() -> Reason:
    """Return the note for a call that names its step, and whose timestep is not known."""
    sentence = f"{OTHER_SCHEDULER}, so forecasts go by steps"
    return note("calls.times_unknown", sentence, ENABLE_THERE)


def at_no_step(cause: str, remedy: str) -> tuple[Reason, Reason]:
    """Return the reasons for a call at no known step: the fallback, and if nothing is sparse."""
    code = "calls.unknown_step"
    return fallback(code, f"calls run dense: {cause}", remedy), nothing_sparse(code, cause, remedy)


def controlnet_unread() -> Reason:
    """Return the note for a ControlNet whose outputs skipped steps do not read."""
    return note(
        "calls.controlnet_unread",
        "the pipeline's ControlNet runs at skipped steps too, which do not read its outputs",
    )


def moved(to: str, before: str) -> Reason:
    """Return the fallback for a generation that goes on in another device or dtype."""
    return fallback(
        "calls.moved",
        "some steps run dense as the first ones do, to record anew: the model goes on in "
        f"{to} instead of {before}",
    )


def exchanged(names: list[str]) -> tuple[Reason, Reason]:
    """Return the reasons for transformers that were exchanged: some of them, or all."""
    verb = "was" if len(names) == 1 else "were"
    cause = f"the pipeline's {' and '.join(names)} {verb} exchanged after enable()"
    remedy = "call chipsparse.enable(pipe, ...) again"
    code = "calls.exchanged"
    return (
        fallback(code, f"a transformer runs dense: {cause}", remedy),
        nothing_sparse(code, cause, remedy),
    )


def on_rank(rank: int, text: str) -> Reason:
    """Return the fallback of another process."""
    return fallback("calls.on_rank", f"rank {rank}: {text}")


def not_corrected(cause: str) -> Reason:
    """Return the note for skipped steps that stay as they were."""
    return note("calls.not_corrected", f"skipped steps are not corrected: {cause}")


def sampler_adds_noise(sampler: str, *, config: str, is_known: bool) -> Reason:
    """Return what skipped steps cost with a sampler that adds noise.

    Args:
        sampler: the name of its class.
        config: what the user asked for: ``quality fast``, or ``this config``.
        is_known: whether its clean sample can be computed.
    """
    if is_known:
        cost = (
            f"skipped steps reuse the clean sample, and {config} comes out further from the dense "
            "result than elsewhere"
        )
    else:
        cost = (
            "its clean sample is not known, so what skipped steps reuse points at noise that is "
            "gone, and the result may be far from the dense one"
        )
    return Reason(
        "calls.noisy_sampler",
        Level.QUALITY,
        f"{sampler} adds noise at its steps: {cost}",
        "a sampler without noise comes closer, as do more full steps",
    )
