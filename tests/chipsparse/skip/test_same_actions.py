"""All bundled schedules take the actions that they took before they had forms, step by step.

The stored rows are of the former code: a hash of the planned and the taken actions and of the
forecasts, of 1 to 60 steps that begin at step 0 or 7. Each quality has a row where a sparse step
costs nothing, where it costs as much as a dense one, and where no layer can be sparse.
"""

import hashlib
import json
from pathlib import Path

import pytest

from chipsparse.profiles.profile import ASSETS, load_profile
from chipsparse.skip.timetable import Run, resolve
from chipsparse.sparse.plan import SparsityPlan
from tests.chipsparse.sparse.test_plan import WIDE_LAYOUT

ROWS = json.loads(Path(__file__).with_name("same_actions.json").read_text(encoding="utf-8"))
COSTS = (0.0, 1.0, None)
LETTERS = {"dense": "d", "refresh": "r", "sparse": "s", "skip": "-"}


def letters(actions):
    return "".join(LETTERS[action.value] for action in actions)


def line(config, steps, first, cost):
    plan = SparsityPlan(config, WIDE_LAYOUT, steps, first, sparse_cost=cost)
    planned = letters(resolve(config.schedule.form, Run(steps, first, cost)).actions()[first:])
    shares = ",".join(f"{plan.schedule.forecast(step):g}" for step in range(first, steps))
    return f"{steps} {first} {planned} {letters(plan.actions(first))} {shares}"


def row(config, cost):
    runs = [(steps, first) for steps in range(1, 61) for first in (0, 7) if first < steps]
    text = "\n".join(line(config, steps, first, cost) for steps, first in runs)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@pytest.mark.parametrize("path", ROWS)
def test_all_qualities_take_the_same_actions_as_before(path):
    qualities = load_profile(ASSETS / path).qualities
    assert qualities.keys() == ROWS[path].keys()
    for name, config in qualities.items():
        assert [row(config, cost) for cost in COSTS] == ROWS[path][name]


def test_every_bundled_profile_has_rows():
    files = [*ASSETS.glob("profiles/**/*.yaml"), *ASSETS.glob("tiny-*/chipsparse.yaml")]
    names = {file.relative_to(ASSETS).as_posix() for file in files}
    assert names | {"qualities.yaml"} == ROWS.keys()
