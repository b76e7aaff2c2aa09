"""Charts of the pages: axes, marks, heat-maps, and which points nothing beats."""

import itertools
import random
import re
import statistics

import numpy as np
import pytest

from chipsparse.cli.pages.axes import Axis, fitting, steps_axis
from chipsparse.cli.pages.budget_map import Cell, budget_map, shade
from chipsparse.cli.pages.chart import NARROW, WIDE, Box, Chart, Dots, Labels, Line, gaps, stairs
from chipsparse.cli.pages.elements import add, element, rendered
from chipsparse.cli.pages.frame_curves import Curves, curves_figure
from chipsparse.cli.pages.part import QualityPoint
from chipsparse.cli.pages.quality_speed import best_points, numbered
from chipsparse.cli.pages.samples import spaced
from chipsparse.cli.pages.units import of_bytes, of_seconds, percent

# Elements.


def test_texts_and_attributes_are_escaped():
    made = element("p", "a < b & c", element("b", "<i>"), "> d", title='"x" & <y>', class_="k")
    assert rendered(made) == (
        "<!DOCTYPE html>\n"
        '<p title="&quot;x&quot; &amp; <y&gt;" class="k">a &lt; b &amp; c<b>&lt;i&gt;</b>&gt; d</p>'
    )


def test_children_and_attributes_that_are_none_are_left_out():
    made = add(
        element("p", None, "a", None, "b", id=None, x=1.005, y=2.0), element("br"), None, "c"
    )
    assert made.attrib == {"x": "1", "y": "2"}
    assert (made.text, made[0].tail, len(made)) == ("ab", "c", 1)


# Axes.


@pytest.mark.parametrize(
    ("low", "high", "most", "expected"),
    [
        (0, 10, 6, [0, 2, 4, 6, 8, 10]),
        (0, 1.04, 6, [0, 0.5, 1]),
        (-0.5, 49.5, 12, [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]),
        (34.2, 41.3, 8, [36, 38, 40]),
        (0, 0.0007, 4, [0, 0.0005]),
    ],
)
def test_ticks_are_round(low, high, most, expected):
    assert Axis("", low, high).ticks(most) == pytest.approx(expected)


@pytest.mark.parametrize("most", [2, 6, 12])
def test_there_are_never_more_ticks_than_asked_for(most):
    rng = random.Random(0)
    for _ in range(500):
        low = rng.uniform(-100, 100)
        axis = Axis("", low, low + 10 ** rng.uniform(-6, 6))
        ticks = axis.ticks(most)
        assert len(ticks) <= most
        assert all(axis.low - 1e-9 <= tick <= axis.high + 1e-9 for tick in ticks)


def test_ticks_of_steps_are_whole():
    assert steps_axis(3).ticks(12) == [0, 1, 2]
    assert steps_axis(0).ticks(12) == [0]


def test_an_axis_fits_its_values():
    axis = fitting("", [3.0, 5.0])
    assert (axis.low, axis.high) == (0, pytest.approx(5.3))
    axis = fitting("", [3.0, 5.0], zero=False)
    assert (axis.low, axis.high) == (pytest.approx(2.88), pytest.approx(5.12))
    for values in ([], [0.0], [7.0, 7.0], [-2.0]):
        axis = fitting("", values, zero=False)
        assert axis.low < axis.high


# Marks.


def chart_of(*marks, x=None, y=None):
    axes = (x or Axis("across", 0, 10)), (y or Axis("up", 0, 100))
    return Chart("a chart", *axes, marks)


def test_marks_stand_where_the_axes_say():
    dots = Dots([(0, 0), (10, 100), (5, 50)], ["a", "b", "c"], "first")
    for width in (WIDE, NARROW):
        picture = chart_of(dots).draw(width)
        assert picture.get("viewBox") == f"0 0 {width} 280"
        low, high, middle = [
            (float(each.get("cx")), float(each.get("cy"))) for each in picture.iter("circle")
        ]
        assert low[0] < middle[0] < high[0] < width
        assert low[1] > middle[1] > high[1] > 0
        assert middle == pytest.approx(tuple(np.mean([low, high], axis=0)), abs=0.01)
        assert [each.text for each in picture.iter("title")] == ["a", "b", "c"]


def test_an_axis_may_grow_downwards():
    box = Box((0, 1), (0, 1), "first", "layer 0")
    y = Axis("layer", 0, 4, down=True)
    (found,) = chart_of(box, y=y).draw(WIDE).iter("rect")
    assert float(found.get("y")) == 30
    assert float(found.get("height")) == pytest.approx((280 - 42 - 30) / 4)


def test_a_line_has_gaps():
    (path,) = chart_of(Line([(0, 0), (1, 10), None, (5, 0)], "first")).draw(WIDE).iter("path")
    assert re.sub(r"[^ML]", "", path.get("d")) == "MLM"
    assert gaps([(0, 1), (1, 1), (3, 1)]) == [(0, 1), (1, 1), None, (3, 1)]
    assert gaps([]) == []
    assert stairs([2.0, None, 3.0]) == [(-0.5, 2), (0.5, 2), None, (1.5, 3), (2.5, 3)]


# Heat-maps.


def boxes_of(cells, layers, steps):
    """For each cell how often it is covered, and what the last box over it says."""
    found = budget_map(cells, layers=layers, steps=steps, caption="a map")
    wide = next(each for each in found.iter("svg") if each.get("class") == "wide")
    texts = [each.find("title").text for each in wide.iter("rect")]
    covered = {}
    for text, box in zip(texts, wide.iter("rect"), strict=True):
        place, _, said = text.partition(": ")
        layers_text, steps_text = place.split(", ")
        for cell in itertools.product(numbers(layers_text), numbers(steps_text)):
            assert cell not in covered
            covered[cell] = (box.get("class"), said)
    return covered, len(texts), found


def numbers(text):
    ends = [int(each) for each in re.findall(r"\d+", text)]
    return range(ends[0], ends[-1] + 1)


def test_every_cell_is_in_one_box_of_its_colour():
    rng = random.Random(1)
    layers, steps = 9, 14
    cells = {}
    for layer, step in itertools.product(range(layers), range(steps)):
        action = rng.choice(["dense", "refresh", "sparse", "sparse", "skip"])
        cells[layer, step] = Cell(action, rng.choice([0.1, 0.2, 0.5]) if action == "sparse" else 1)
    del cells[4, 7]
    covered, _, _ = boxes_of(cells, layers, steps)
    assert covered.keys() == cells.keys()
    for place, cell in cells.items():
        said = f"sparse, {cell.kept:.1%} computed" if cell.action == "sparse" else cell.action
        assert covered[place] == (f"box {shade(cell, 0.1, 0.5)}", said)


def test_cells_that_are_alike_share_a_box():
    cells = {(layer, step): Cell("dense", 1.0) for layer in range(60) for step in range(50)}
    cells |= {(layer, 9): Cell("sparse", 0.1) for layer in range(60)}
    covered, count, _ = boxes_of(cells, 60, 50)
    assert (count, len(covered)) == (3, 3000)


def test_the_shades_lie_between_the_least_and_the_most():
    shades = [shade(Cell("sparse", kept), 0.1, 0.5) for kept in (0.1, 0.31, 0.5)]
    assert shades == ["shade-0", "shade-5", "shade-9"]
    assert shade(Cell("sparse", 0.1), 0.1, 0.1001) == "shade-9"
    assert shade(Cell("dense", 1.0), 0.1, 0.5) == "action-dense"


def test_the_keys_are_those_of_the_cells():
    _, _, found = boxes_of({(0, 0): Cell("dense", 1), (0, 1): Cell("sparse", 0.25)}, 1, 2)
    keys = [each.text or each[0].tail for each in found.iter("li")]
    assert keys == ["dense: all", "sparse: 25.0%"]


# Curves over frames.


def test_curves_are_medians_with_a_band():
    clips = [{"psnr_db": [30.0, 40.0, None]}, {"psnr_db": [34.0, None, None]}, {"psnr_db": [35.0]}]
    found = curves_figure("psnr_db", [Curves("A", clips)])
    wide = next(each for each in found.iter("svg") if each.get("class") == "wide")
    band, line = wide.iter("path")
    points = [tuple(map(float, each.split())) for each in line.get("d")[1:].split("L")]
    edges = [tuple(map(float, each.split())) for each in band.get("d")[1:-1].split("L")]
    assert len(points) == 2  # no clip has a value in the last frame
    assert edges[-1][1] > points[0][1] > edges[0][1]  # 30, the median 34, 35
    share = (edges[-1][1] - points[0][1]) / (edges[-1][1] - edges[0][1])
    assert share == pytest.approx((statistics.median([30, 34, 35]) - 30) / 5, abs=0.01)


@pytest.mark.parametrize("clips", [[], [{"psnr_db": [30.0]}], [{"ssim": [1, 1]}]])
def test_a_single_frame_makes_no_curve(clips):
    assert curves_figure("psnr_db", [Curves("A", clips)]) is None


# Quality over speed.


def test_the_best_points_are_those_that_nothing_beats():
    places = [(1.0, 40.0), (2.0, 35.0), (1.5, 30.0), (2.0, 33.0), (3.0, 20.0), (0.9, 40.0)]
    points = [QualityPoint(str(place), *place) for place in places]
    assert [(p.speedup, p.psnr_db) for p in best_points(points)] == [(1, 40), (2, 35), (3, 20)]
    assert best_points([]) == []


def test_points_have_the_number_of_their_file():
    first, second, third = (QualityPoint(name, 1.0, 30.0) for name in "abc")
    found = numbered([[], [first], [second, third]])
    assert found == {"2": first, "3.1": second, "3.2": third}


def test_labels_cover_no_dot_and_no_other_label():
    places = [(1.0, 30.0), (1.01, 30.0), (1.0, 30.1), (1.02, 30.0), (2.0, 35.0)]
    labels = Labels(places, [str(number) for number in range(1, 6)])
    drawn = list(labels.draw(lambda x: 400 * x, lambda y: -40 * y))
    assert [each.text for each in drawn] == ["1", "2", "3", "4", "5"]
    boxes = [(float(each.get("x")) - 3.75, float(each.get("y")) - 10, 7.5, 12) for each in drawn]
    dots = [(400 * x - 5, -40 * y - 5, 10, 10) for x, y in places]
    for index, (left, top, wide, high) in enumerate(boxes):
        for other in [*boxes[:index], *dots]:
            apart = left >= other[0] + other[2] or other[0] >= left + wide
            assert apart or top >= other[1] + other[3] or other[1] >= top + high


# Units and samples.


def test_units_fit_the_largest_value():
    assert of_seconds([0.2, 0.9]).name == "ms"
    assert of_seconds([0.2, 59]).name == "s"
    assert of_seconds([900]).name == "min"
    assert (of_bytes([5]).name, of_bytes([2 << 30]).name) == ("MiB", "GiB")
    assert [percent(each) for each in (0.0, 0.1104, 0.999, 1.0)] == ["0%", "11.0%", "100%", "100%"]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [0]), (2, [0, 1]), (6, [0, 1, 2, 3, 4, 5]), (33, [0, 6, 13, 19, 26, 32])],
)
def test_samples_are_evenly_spaced(count, expected):
    assert spaced(count, 6) == expected
