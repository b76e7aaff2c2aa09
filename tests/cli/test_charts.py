"""Charts of the pages: what is drawn where, and how it becomes a piece of a page."""

import itertools
import random
import re
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from chipsparse.cli.pages.budget_map import budget_map, merged, paint
from chipsparse.cli.pages.charts import (
    ACTIONS,
    FIRST,
    NARROW,
    SECOND,
    SHADES,
    WIDE,
    Chart,
    Key,
    Renderer,
    dots,
    labels,
    level,
    steps_axis,
)
from chipsparse.cli.pages.frame_curves import curves_chart, spread
from chipsparse.cli.pages.generation_charts import bytes_unit, seconds_unit, stairs
from chipsparse.cli.pages.generation_record import Cell
from chipsparse.cli.pages.page import numbered
from chipsparse.cli.pages.quality_charts import best_points
from chipsparse.cli.pages.records import QualityPoint
from chipsparse.cli.pages.samples import spaced
from chipsparse.cli.views.units import percent

SVG = "{http://www.w3.org/2000/svg}"


def axes_of(draw):
    """Axes on which something was drawn."""
    axes = Figure((10, 4), dpi=72).add_subplot()
    draw(axes)
    return axes


# As a piece of a page.


def test_a_chart_is_drawn_for_wide_and_for_narrow_screens():
    def draw(axes):
        steps_axis(axes, 50, "up")
        marks = [(0, 1, "<first>"), (49, 3, "last, from /home/me/x.json")]
        dots(axes, marks, FIRST, label="a $b")
        axes.plot([0, 49], [1, 3], color=SECOND, linestyle="--", label="c")
        level(axes, 2, "bound 2")

    render = Renderer()
    drawn = render(Chart("title", draw, "caption"))
    assert drawn.keys == [Key("dot", "var(--first)", "a $b"), Key("dashed", "var(--second)", "c")]
    for svg, width in ((drawn.wide, WIDE), (drawn.narrow, NARROW)):
        root = ElementTree.fromstring(svg)
        assert root.get("viewBox") == f"0 0 {width} 280"
        assert root.get("width") is None
        tips = [each.text for each in root.iter(f"{SVG}title")]
        assert tips == ["<first>", "last, from x.json"]
        texts = [each.text for each in root.iter(f"{SVG}text")]
        assert {"up", "bound 2", "denoising step, from 0"} <= set(texts)
        assert "font" not in svg
        assert "#" not in re.sub(r"(href=\"|url\()#", "", svg)
    assert str(drawn.wide).count("<text") > str(drawn.narrow).count("<text")  # more ticks


def test_no_two_charts_share_an_id():
    def draw(axes):
        dots(axes, [(0, 1, "a")], FIRST)

    render = Renderer()
    charts = [render(Chart("same", draw, "same")) for _ in range(2)]
    found = [svg for each in charts for svg in (each.wide, each.narrow)]
    ids = [re.findall(r'\bid="([^"]+)"', svg) for svg in found]
    assert all(ids)
    assert len({*itertools.chain(*ids)}) == sum(map(len, ids))
    for svg, own in zip(found, ids, strict=True):
        assert set(re.findall(r"#([^\")]+)[\")]", svg)) <= set(own)


def test_a_line_of_steps_is_level_during_each_and_has_gaps():
    axes = axes_of(lambda axes: stairs(axes, [2.0, None, 3.0], FIRST, "-", "a"))
    (patch,) = axes.patches
    found, edges, _ = patch.get_data()
    assert [*edges] == [-0.5, 0.5, 1.5, 2.5]
    assert found == pytest.approx([2, float("nan"), 3], nan_ok=True)


# Heat-maps.


def some_cells(layers, steps):
    rng = random.Random(1)
    cells = {}
    for layer, step in itertools.product(range(layers), range(steps)):
        action = rng.choice(["dense", "refresh", "sparse", "sparse", "skip"])
        cells[layer, step] = Cell(action, rng.choice([0.1, 0.2, 0.5]) if action == "sparse" else 1)
    del cells[4, 7]
    return cells


def test_every_cell_is_in_one_box_of_its_colour():
    cells, covered = some_cells(9, 14), {}
    for run, first, last in merged(cells, 9, 14):
        for cell in itertools.product(range(first, last + 1), range(run.first, run.last + 1)):
            assert cell not in covered
            covered[cell] = (run.colour, run.text)
    assert covered.keys() == cells.keys()
    for place, cell in cells.items():
        said = f"sparse, {cell.kept:.1%} computed" if cell.action == "sparse" else cell.action
        assert covered[place] == (paint(cell, 0.1, 0.5), said)


def test_cells_that_are_alike_share_a_box():
    cells = {(layer, step): Cell("dense", 1.0) for layer in range(60) for step in range(50)}
    cells |= {(layer, 9): Cell("sparse", 0.1) for layer in range(60)}
    axes = axes_of(budget_map(cells, layers=60, steps=50, caption="").draw)
    boxes = [each for each in axes.patches if each.get_gid()]
    assert [(each.get_bbox().x0, each.get_bbox().x1) for each in boxes] == [
        (-0.5, 8.5),
        (8.5, 9.5),
        (9.5, 49.5),
    ]
    assert boxes[1].get_gid() == "tip: layers 0 to 59, step 9: sparse, 10.0% computed"
    assert axes.get_ylim() == (59.5, -0.5)  # the first layer is on top


def test_the_shades_lie_between_the_least_and_the_most():
    shades = [paint(Cell("sparse", kept), 0.1, 0.5) for kept in (0.1, 0.31, 0.5)]
    assert shades == [SHADES[0], SHADES[5], SHADES[9]]
    assert paint(Cell("sparse", 0.1), 0.1, 0.1001) == SHADES[9]
    assert paint(Cell("dense", 1.0), 0.1, 0.5) == ACTIONS["dense"]


def test_the_keys_are_those_of_the_cells():
    cells = {(0, 0): Cell("dense", 1), (0, 1): Cell("sparse", 0.25)}
    axes = axes_of(budget_map(cells, layers=1, steps=2, caption="").draw)
    assert axes.get_legend_handles_labels()[1] == ["dense: all", "sparse: 25.0%"]


# Curves over frames.


def clip_of(*values):
    return [{"psnr_db": value} for value in values]


def test_curves_are_medians_with_a_band():
    clips = [clip_of(30.0, 40.0, None), clip_of(34.0, None, None), clip_of(35.0)]
    assert spread(clips, "psnr_db", 1.0) == [(0, 30, 34, 35), (1, 40, 40, 40)]
    axes = axes_of(curves_chart("psnr_db", {"A": clips}).draw)
    (line,) = axes.lines
    assert [*line.get_ydata()] == [34, 40]
    assert len(axes.collections) == 1


@pytest.mark.parametrize("clips", [[], [clip_of(30.0)], [[{"ssim": 1}, {"ssim": 1}]]])
def test_a_single_frame_makes_no_curve(clips):
    assert curves_chart("psnr_db", {"A": clips}) is None


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

    def draw(axes):
        dots(axes, [(*place, "") for place in places], FIRST)
        labels(axes, [(*place, str(number)) for number, place in enumerate(places, 1)])

    axes = axes_of(draw)
    assert [each.get_text() for each in axes.texts] == ["1", "2", "3", "4", "5"]
    middles = [axes.transData.transform(each.get_position()) for each in axes.texts]
    boxes = [(x - 3.75, y - 6, 7.5, 12) for x, y in middles]
    marks = [(x - 5, y - 5, 10, 10) for x, y in map(axes.transData.transform, places)]
    for index, (left, low, wide, high) in enumerate(boxes):
        for other in [*boxes[:index], *marks]:
            apart = left >= other[0] + other[2] or other[0] >= left + wide
            assert apart or low >= other[1] + other[3] or other[1] >= low + high


# Units and samples.


def test_units_fit_the_largest_value():
    assert seconds_unit([0.2, 0.9])[0] == "ms"
    assert seconds_unit([0.2, 59])[0] == "s"
    assert seconds_unit([900])[0] == "min"
    assert (bytes_unit([5])[0], bytes_unit([2 << 30])[0]) == ("MiB", "GiB")
    assert [percent(each) for each in (0.0, 0.1104, 0.999, 1.0)] == ["0%", "11.0%", "100%", "100%"]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [0]), (2, [0, 1]), (6, [0, 1, 2, 3, 4, 5]), (33, [0, 6, 13, 19, 26, 32])],
)
def test_samples_are_evenly_spaced(count, expected):
    assert spaced(count, 6) == expected
