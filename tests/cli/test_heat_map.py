"""Pixel values of heat-maps, and the pictures made of them."""

import numpy as np
import pytest

from chipsparse.cli.media.heat_map import COLOURS, choose_factor, difference, heat_map
from chipsparse.cli.media.panels import (
    GAP_PIXELS,
    Panel,
    difference_rows,
    join_panels,
    stack_panels,
)


def test_difference_is_that_of_the_channel_that_differs_most():
    a = np.array([[[[10, 200, 30], [0, 0, 0], [255, 255, 255]]]], np.uint8)
    b = np.array([[[[13, 190, 30], [0, 0, 0], [0, 255, 255]]]], np.uint8)
    np.testing.assert_array_equal(difference(a, b), [[[10, 0, 255]]])
    np.testing.assert_array_equal(difference(b, a), [[[10, 0, 255]]])


def test_colours():
    """Differences of 0, 51, ..., 255 after amplification have the colours of the table."""
    steps = np.array([[[0, 51, 102, 153, 204, 255]]], np.uint8)
    np.testing.assert_array_equal(heat_map(steps, 1)[0, 0], COLOURS)
    np.testing.assert_array_equal(heat_map(steps // 51, 51)[0, 0], COLOURS)
    # Halfway between black and (50, 10, 120), and beyond the scale.
    np.testing.assert_array_equal(heat_map(np.array([[[25]]], np.uint8), 1)[0, 0, 0], [25, 5, 59])
    np.testing.assert_array_equal(heat_map(np.array([[[32]]], np.uint8), 8)[0, 0, 0], [255] * 3)


def test_a_larger_difference_is_lighter():
    every = np.arange(256, dtype=np.uint8).reshape(1, 1, 256)
    luminance = heat_map(every, 1)[0, 0] @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(luminance) >= 0).all()
    assert luminance[255] - luminance[0] == pytest.approx(255)


@pytest.mark.parametrize(
    ("largest", "factor"), [(0, 64), (3, 64), (4, 32), (31, 8), (32, 4), (127, 2), (128, 1)]
)
def test_the_factor_is_the_largest_that_leaves_the_scale_to_hardly_any_pixel(largest, factor):
    assert choose_factor([np.full((1, 4, 4), largest, np.uint8)]) == factor
    # One pixel in two hundred does not matter, two do.
    differences = np.full((1, 10, 20), largest, np.uint8)
    differences[0, 0, 0] = 255
    assert choose_factor([differences]) == factor
    differences[0, 1, 0] = 255
    assert choose_factor([differences]) == 1


def test_one_factor_for_several_clips():
    assert choose_factor([np.zeros((1, 4, 4), np.uint8), np.full((1, 4, 4), 32, np.uint8)]) == 4


def clip(value, frames=2, height=20, width=60):
    return np.full((frames, height, width, 3), value, np.uint8)


def test_rows_of_a_reference_and_two_clips():
    rows, factor = difference_rows(
        (clip(100), "dense"), [(clip(101), "A"), (clip(104), "B")], factor=None
    )
    assert factor == 32
    joined = stack_panels(rows)
    strip = (joined.shape[1] - 2 * 20 - GAP_PIXELS) // 2
    assert joined.shape == (2, 2 * (strip + 20) + GAP_PIXELS, 3 * 60 + 2 * GAP_PIXELS, 3)
    lefts = [0, 60 + GAP_PIXELS, 2 * (60 + GAP_PIXELS)]
    tops = [strip, 2 * strip + 20 + GAP_PIXELS]

    def at(row, column):
        part = joined[:, tops[row] : tops[row] + 20, lefts[column] : lefts[column] + 60]
        assert len(np.unique(part.reshape(-1, 3), axis=0)) == 1
        return part[0, 0, 0].tolist()

    assert [at(0, column) for column in range(3)] == [[100] * 3, [101] * 3, [104] * 3]
    assert at(1, 0) == [0, 0, 0]
    assert at(1, 1) == heat_map(np.array([[[1]]], np.uint8), 32)[0, 0, 0].tolist()
    assert at(1, 2) == heat_map(np.array([[[4]]], np.uint8), 32)[0, 0, 0].tolist()
    assert joined[:, :strip, :60].max() > 200  # a label


def test_one_row_and_a_factor_of_ones_own():
    rows, factor = difference_rows((clip(9), "a"), [(clip(12), "b")], factor=5, in_one_row=True)
    assert factor == 5
    assert [panel.label for panel in rows[0]] == ["a", "b", "difference x5"]
    np.testing.assert_array_equal(
        rows[0][2].frames[0, 0, 0], heat_map(np.array([[[3]]], np.uint8), 5)[0, 0, 0]
    )


def test_a_label_that_does_not_fit_loses_its_last_words():
    def strip(label):
        joined = join_panels([Panel(clip(50, width=60), label)])
        return joined[0, :-20]

    np.testing.assert_array_equal(strip("flow of manner free floors"), strip("flow of"))
    assert (strip("flow of") != strip("flow")).any()


def test_refuses():
    with pytest.raises(ValueError, match="differ in shape"):
        join_panels([Panel(clip(1), ""), Panel(clip(1, frames=1), "")])
    with pytest.raises(ValueError, match="differ in length"):
        stack_panels([[Panel(clip(1), "")], []])
