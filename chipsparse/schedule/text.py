"""A schedule in one line of words."""

from __future__ import annotations

import math

from chipsparse.schedule.schedule import LEAST_GAP, Schedule

BETWEEN = {
    "none": "",
    "middle": f", one {{}} step in each gap of {LEAST_GAP} and more",
    "every_other": ", every other step of a gap {}",
    "all": ", all others {}",
}
SHARES = {0.5: "half a forecast", 1.0: "a full forecast"}


def list_text(schedule: Schedule, *, sparse: bool) -> str:
    """Return the words of a list of full steps: ``13 of 50 steps in full, close at the ...``."""
    config, full = schedule.config, schedule.full_steps
    assert full is not None
    if len(full) == schedule.run:
        return "the only step in full" if len(full) == 1 else f"all {len(full)} steps in full"
    of = "" if schedule.run is None else f" of {schedule.run}"
    form = "as listed" if config.full_share is None else "close at the start"
    what = "sparse" if sparse else "dense"
    if isinstance(config.between, str):
        between, rest = BETWEEN[config.between].format(what), config.between != "all"
    else:
        listed = len(config.between)
        between, rest = f", {listed} {what}, likewise" if listed else "", True
    corrects = config.correct and schedule.corrects and len(full) > 1
    corrected = ", then corrected" if corrects else ""
    skipped = f", the rest skipped{forecast_text(schedule)}{corrected}" if rest else ""
    return f"{len(full)}{of} steps in full, {form}{between}{skipped}"


def forecast_text(schedule: Schedule) -> str:
    """Return how skipped outputs are forecast, as the end of a phrase; empty: held."""
    config = schedule.config
    if not config.forecast:
        return ""
    share = SHARES.get(config.forecast, f"{config.forecast:g} of a forecast")
    if not config.forecast_after:
        return f" with {share}"
    if schedule.steps is None:
        return f" with {share} after {100 * config.forecast_after:g}% of the steps"
    begun = schedule.first + math.ceil(config.forecast_after * (schedule.steps - schedule.first))
    return f" with {share} from step {begun} on"
