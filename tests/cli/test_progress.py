"""One clock for a command of many generations, with a clock of the test's own."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from chipsparse.cli.progress import ProgressDisplay, clock_text


@pytest.fixture
def clock():
    """Seconds that pass when the test says so."""
    return SimpleNamespace(now=100.0)


@pytest.fixture
def progress(clock):
    return ProgressDisplay(Console(file=io.StringIO(), width=200), lambda: clock.now)


def test_clock_text():
    assert clock_text(9.96, 59.4) == "10 s elapsed, about 59 s left"
    assert clock_text(63, 3599.9) == "1 min 3 s elapsed, about 1 h 0 min left"
    assert clock_text(3700, 7.25) == "1 h 1 min elapsed, about 7.2 s left"


def test_estimates_are_those_of_the_plan_in_force(progress, clock):
    progress.plan({"calibration, a": 5.0})
    clock.now += 4
    assert (progress.seconds_left(), progress.clock_text()) == (None, "4.0 s elapsed")
    with progress.working("dense, known before"):  # what was not planned does not count
        clock.now += 0.001

    def fail():
        with progress.working("calibration, a"):
            clock.now += 4
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert progress.seconds_left() is None
    progress.plan({"dense, a": 1.0, "pair, a": 0.5})
    with progress.working("dense, a"):
        clock.now += 4
    assert progress.seconds_left() == pytest.approx(4)
    progress.plan({"round 2": 2.0, "dense, b": 1.0})
    assert progress.seconds_left() == pytest.approx(24)


def test_steps_that_take_longer_are_known_to(progress, clock):
    costs = [1.0, 1.0, 10.0, 4.0]
    left = 32.0
    progress.plan({"sparse, a": 1.0, "sparse, b": 1.0})
    for name in ("sparse, a", "sparse, b"):
        with progress.working(name, step_costs=costs), progress.denoising("r", 4) as done:
            for step, cost in enumerate(costs):
                clock.now += cost
                done(step, "dense", None)
                left -= cost
                assert progress.seconds_left() == pytest.approx(left)


def test_lines_off_a_terminal_have_the_clock_of_the_whole(progress, clock):
    progress.plan({"dense, a": 1.0, "dense, b": 1.0})
    for name in "ab":
        with progress.working(f"dense, {name}"), progress.denoising(name, 1) as done:
            clock.now += 2
            done(0, "dense", None)
    assert progress._console.file.getvalue().splitlines() == [
        "a: step 1 of 1 (dense), 2.0 s elapsed, about 2.0 s left",
        "b: step 1 of 1 (dense), 4.0 s elapsed",
    ]


def test_on_a_terminal_the_bar_has_the_clock_of_the_whole_and_no_other(clock):
    shown = io.StringIO()
    console = Console(file=shown, width=200, force_terminal=True, color_system=None)
    with ProgressDisplay(console, lambda: clock.now) as progress, progress.stage("loading"):
        progress.plan({"dense, a": 1.0, "dense, b": 1.0})
        with progress.working("dense, a"), progress.denoising("dense a", 4) as done:
            clock.now += 2
            done(0, "dense", None)
            progress._bar.refresh()
            text = shown.getvalue()
    assert "step 1 of 4 (dense) 2.0 s elapsed, about 14 s left" in text
    assert any("loading" in line and "s elapsed" in line for line in text.splitlines())
    assert "0:00:0" not in text
