"""Charts of the pages: what is drawn where, and how it becomes a piece of a page."""

import itertools
import random
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

from chipsparse.cli.views.budget_map import Cell, merged
from chipsparse.cli.views.canvas import WIDE, Canvas
from chipsparse.cli.views.charts import NARROW, Key, draw_chart
from chipsparse.cli.views.colours import FIRST, SECOND
from chipsparse.cli.views.sections import Chart

SVG = "{http://www.w3.org/2000/svg}"


def test_a_chart_is_drawn_for_wide_and_for_narrow_screens():
    def draw(canvas):
        canvas.steps_axis(50, "up")
        marks = [(0, 1, "<first>"), (49, 3, "last, from /home/me/x.json")]
        canvas.dots(marks, FIRST, label="a $b")
        canvas.axes.plot([0, 49], [1, 3], color=SECOND, linestyle="--", label="c")
        canvas.level(2, "bound 2")

    drawn = draw_chart(Chart("title", draw, "caption"), "chart1")
    assert drawn.keys == [Key("dot", "var(--first)", "a $b"), Key("dashed", "var(--second)", "c")]
    for svg, width in ((drawn.wide, WIDE), (drawn.narrow, NARROW)):
        root = ElementTree.fromstring(svg)
        assert root.get("viewBox") == f"0 0 {width} 280"
        assert root.get("width") is None
        tips = [title.text for title in root.iter(f"{SVG}title")]
        assert tips == ["<first>", "last, from x.json"]
        texts = [text.text for text in root.iter(f"{SVG}text")]
        assert {"up", "bound 2", "denoising step, from 0"} <= set(texts)
        assert "font" not in svg
        assert "#" not in re.sub(r"(href=\"|url\()#", "", svg)
    assert str(drawn.wide).count("<text") > str(drawn.narrow).count("<text")  # more ticks


def test_every_cell_is_in_one_box_of_its_colour():
    rng = random.Random(1)
    cells = {}
    covered = {}
    for place in itertools.product(range(9), range(14)):
        action = rng.choice(["dense", "refresh", "sparse", "sparse", "skip"])
        cells[place] = Cell(action, rng.choice([0.1, 0.2, 0.5]) if action == "sparse" else 1)
    del cells[4, 7]
    for box in merged(cells, 9, 14):
        sides = (range(first, last + 1) for first, last in (box.layers, box.steps))
        for place in itertools.product(*sides):
            assert place not in covered
            covered[place] = box.cell
    assert covered == cells


def test_labels_cover_no_dot_and_no_other_label_and_stay_on_the_page():
    places = [(1.0, 30.0), (1.01, 30.0), (1.0, 30.1), (1.02, 30.0), (2.0, 35.0)]
    labels = ["1", "2", "3", "4", "wider than the margin"]

    axes = Figure((10, 4), dpi=72).add_subplot()
    canvas = Canvas(axes)
    canvas.dots([(*place, "") for place in places], FIRST)
    canvas.labels([(*place, text) for place, text in zip(places, labels, strict=True)])
    assert [text.get_text() for text in axes.texts] == labels
    middles = [axes.transData.transform(text.get_position()) for text in axes.texts]
    assert middles[4][0] + 3.75 * len(labels[4]) <= axes.figure.bbox.x1
    boxes = [(x - 3.75, y - 6, 7.5, 12) for x, y in middles]
    marks = [(x - 5, y - 5, 10, 10) for x, y in map(axes.transData.transform, places)]
    for index, (left, low, wide, high) in enumerate(boxes):
        for other in [*boxes[:index], *marks]:
            beside = left >= other[0] + other[2] or other[0] >= left + wide
            assert beside or low >= other[1] + other[3] or other[1] >= low + high
