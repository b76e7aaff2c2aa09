"""One clock for a command of many generations, with a clock of the test's own."""

import io

import pytest
from rich.console import Console

from chipsparse.cli.progress import ProgressDisplay, WorkProgress, clock_text


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shown():
    return io.StringIO()


@pytest.fixture
def progress(clock, shown):
    return WorkProgress(ProgressDisplay(Console(file=shown, width=200)), clock)


@pytest.mark.parametrize(
    ("elapsed", "left", "text"),
    [
        (0.04, None, "0.0 s elapsed"),
        (9.96, 59.4, "10 s elapsed, about 59 s left"),
        (63, 3599.9, "1 min 3 s elapsed, about 1 h 0 min left"),
        (3700, 7.25, "1 h 1 min elapsed, about 7.2 s left"),
    ],
)
def test_clock_text(elapsed, left, text):
    assert clock_text(elapsed, left) == text


def test_nothing_is_estimated_before_anything_was_measured(progress, clock):
    progress.plan({"calibration, a": 5.0})
    clock.now += 4
    assert progress.seconds_left() is None
    assert progress.clock_text() == "4.0 s elapsed"
    with progress.working("dense, known before"):  # what was not planned takes no time
        clock.now += 0.001
    assert progress.seconds_left() is None

    def fail():
        with progress.working("calibration, a"):
            clock.now += 5
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert progress.seconds_left() is None


def test_steps_that_take_longer_are_known_to(progress, clock):
    """Those of both generations that one work takes, the first of which the second only plays."""
    progress.plan({"replay, a": 5.0})
    first, second = [1.0, 1.0, 10.0, 4.0], [0.0, 0.0, 2.0, 2.0]
    with progress.working("replay, a", step_costs=first + second):
        left = 20.0
        for costs in (first, second):
            with progress.denoising("r", 4) as steps:
                for step, cost in enumerate(costs):
                    clock.now += cost
                    steps.done(step, "dense")
                    left -= cost
                    assert progress.seconds_left() == pytest.approx(left)


def test_each_kind_has_its_own_rate_and_the_latest_stands_for_the_others(progress, clock):
    progress.plan({"dense, a": 1.0, "dense, b": 1.0, "pair, a": 0.5, "pair, b": 0.5})
    with progress.working("dense, a"):
        clock.now += 8
    assert progress.seconds_left() == pytest.approx(8 + 4 + 4)
    with progress.working("pair, a"):
        clock.now += 1
    assert progress.seconds_left() == pytest.approx(8 + 1)
    progress.plan({"round 2": 2.0, "dense, b": 1.0})
    assert progress.seconds_left() == pytest.approx(2 * 2 + 8)


def test_lines_off_a_terminal_have_the_clock_of_the_whole(progress, clock, shown):
    progress.plan({"dense, a": 1.0, "dense, b": 1.0})
    for name in ("a", "b"):
        with progress.working(f"dense, {name}"), progress.denoising(f"dense {name}", 2) as steps:
            for step in range(2):
                clock.now += 2
                steps.done(step, "dense")
    assert shown.getvalue().splitlines() == [
        "dense a: step 1 of 2 (dense), 2.0 s elapsed, about 6.0 s left",
        "dense a: step 2 of 2 (dense), 4.0 s elapsed, about 4.0 s left",
        "dense b: step 1 of 2 (dense), 6.0 s elapsed, about 2.0 s left",
        "dense b: step 2 of 2 (dense), 8.0 s elapsed, about 0.0 s left",
    ]


def test_on_a_terminal_the_bar_has_the_clock_of_the_whole_and_no_other(clock):
    shown = io.StringIO()
    console = Console(file=shown, width=200, force_terminal=True, color_system=None)
    with ProgressDisplay(console) as display, display.stage("loading the model"):
        progress = WorkProgress(display, clock)
        progress.plan({"dense, a": 1.0, "dense, b": 1.0})
        with progress.working("dense, a"), progress.denoising("dense a", 4) as steps:
            clock.now += 2
            steps.done(0, "dense")
            display._bar.refresh()
            text = shown.getvalue()
    assert "step 1 of 4 (dense) 2.0 s elapsed, about 14 s left" in text
    assert any("loading the model" in line and "s elapsed" in line for line in text.splitlines())
    assert "0:00:0" not in text
