"""Charts: well-formed, every point where it belongs, ticks at round numbers."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hierspec.plot import Axis, Chart, Line

SPACE = "{http://www.w3.org/2000/svg}"
numbers = st.floats(1e-3, 1e9)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=8), st.booleans(), st.booleans())
def test_points_lie_inside_and_in_order(points, log_x, log_y):
    chart = Chart("a < b & c", Axis("x", log_x), Axis("y", log_y), [Line("one", points), Line("two", points[:1], True)])
    drawn = ElementTree.fromstring(chart.svg())
    assert drawn.find(f"{SPACE}title").text == "a < b & c"
    circles = drawn.findall(f"{SPACE}circle")
    assert len(circles) == len(points) + 1
    places = [(float(circle.get("cx")), float(circle.get("cy"))) for circle in circles[: len(points)]]
    assert all(84 <= x <= 570 and 64 <= y <= 378 for x, y in places)
    for (one, (x1, y1)), (other, (x2, y2)) in itertools.pairwise(zip(points, places, strict=True)):
        assert one[0] < other[0] or x1 >= x2
        assert one[1] < other[1] or y1 <= y2  # upwards is less


@given(st.floats(1e-6, 1e6), st.floats(1.0, 1e9))
def test_ticks_of_a_logarithmic_axis(low, ratio):
    scale = Axis("x", logarithmic=True).scale([low, low * ratio])
    assert scale.low <= low * (1 + 1e-6)
    assert scale.high >= low * ratio * (1 - 1e-6)
    assert len(scale.ticks) >= 2 or ratio < 10
    for tick in scale.ticks:
        assert float(f"{tick:e}"[0]) in (1, 2, 5)
    assert scale.share(scale.low) == 0
    assert scale.share(scale.high) == pytest.approx(1)
    middle = math.sqrt(scale.low * scale.high)
    assert scale.share(middle) == pytest.approx(0.5)


@given(st.floats(-1e6, 1e6), st.floats(0.0, 1e6))
def test_ticks_of_a_linear_axis(low, width):
    scale = Axis("x").scale([low, low + width])
    rounding = 1e-6 * (scale.high - scale.low)
    assert scale.low <= min(0, low) + rounding
    assert scale.high >= low + width - rounding
    assert 3 <= len(scale.ticks) <= 11


def test_what_cannot_be_drawn_is_told():
    with pytest.raises(ValueError, match="logarithmic"):
        Chart("t", Axis("x", logarithmic=True), Axis("y"), [Line("one", [(0.0, 1.0)])]).svg()
    with pytest.raises(ValueError, match="point"):
        Chart("t", Axis("x"), Axis("y"), []).svg()


def test_the_legend_names_lines_and_colours_may_be_shared():
    lines = [Line("one", [(1, 1), (2, 2)], colour=2), Line("two", [(1, 2), (2, 3)], dashed=True, colour=2)]
    text = Chart("t", Axis("x"), Axis("y"), lines).svg()
    assert ">one<" in text
    assert ">two<" in text
    assert len(set(re.findall(r'class="line" stroke="(#\w+)"', text))) == 1
    assert text.count("stroke-dasharray") == 2  # the line and its sample in the legend
