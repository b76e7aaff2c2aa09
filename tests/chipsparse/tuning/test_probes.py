"""Which steps a calibration measures at."""

import pytest

from chipsparse.tuning.probes import ProbeSteps


@pytest.mark.parametrize("steps", [4, 5, 6, 10, 20, 28, 50, 100])
def test_probes_lie_within_the_generation(steps):
    probes = ProbeSteps.spread(steps)
    assert probes.anchors[0] >= 1  # the step before it gives the softmax constants
    assert probes.anchors[-1] < steps - 1
    assert len(set(probes.anchors)) == len(probes.anchors)
    for step in probes.disturbed:
        assert step < steps - 1
        anchor = probes.latest(step)
        assert anchor is not None
        assert anchor in probes.measured(step)  # so that there are errors to pass on


def test_a_long_generation():
    probes = ProbeSteps.spread(50)
    assert probes.anchors == (1, 12, 24, 36, 47)
    assert probes.ages == (1, 2, 4, 8, 16)
    assert probes.disturbed == (5, 16, 40, 48)
    assert probes.alive(25) == [12, 24]
    assert probes.measured(28) == [12, 24]
    assert probes.measured(15) == []


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="at least 4 denoising steps, got 3"):
        ProbeSteps.spread(3)
