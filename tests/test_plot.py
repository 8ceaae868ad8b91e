"""Charts: well-formed, every point where it belongs, ticks at round numbers."""

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hierspec.plot import COLOURS, DARK_COLOURS, PAIRED, Axis, Chart, Line

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


def colours(text: str, dark: bool) -> dict[str, str]:
    """The colour of each class of lines, as the style sheet has it for light or dark."""
    light, _, night = text.partition("@media (prefers-color-scheme: dark)")
    return dict(re.findall(r"\n\s+\.(c\d+) { stroke: (#\w+); }", night if dark else light))


@pytest.mark.parametrize("dark", [False, True])
def test_no_two_lines_have_one_colour(dark):
    lines = [Line(f"line {number}", [(1, 1), (2, 2)]) for number in range(len(COLOURS))]
    text = Chart("t", Axis("x"), Axis("y"), lines).svg()
    assert all(f">{line.name}<" in text for line in lines)
    drawn = colours(text, dark)
    assert list(drawn.values()) == list(DARK_COLOURS if dark else COLOURS)
    assert len(set(drawn.values())) == len(lines)
    used = re.findall(r'<path class="line (c\d+)"', text)
    assert all(used.count(name) == 2 for name in drawn)  # the line and its sample in the legend


def test_colours_that_would_be_shared_are_refused():
    points = [(1, 1), (2, 2)]
    twice = [Line("one", points, colour=2), Line("two", points, dashed=True, colour=2)]
    with pytest.raises(ValueError, match="one colour"):
        Chart("t", Axis("x"), Axis("y"), twice).svg()
    many = Chart("t", Axis("x"), Axis("y"), [Line(str(number), points) for number in range(20)]).svg()
    assert len(set(re.findall(r"c\d+ { stroke: ([^;]+); }", many.split("@media")[0]))) == 20
    paired = [Line("one", points, colour=2), Line("two", points, dashed=True, colour=2 + PAIRED)]
    assert Chart("t", Axis("x"), Axis("y"), paired).svg().count(' dashed"') == 2  # the line and its sample


@pytest.mark.parametrize(("palette", "ground"), [(COLOURS, "#ffffff"), (DARK_COLOURS, "#19202a")])
def test_every_colour_can_be_seen_on_its_ground(palette, ground):
    assert all(contrast(colour, ground) >= 3 for colour in palette)


def contrast(one: str, other: str) -> float:
    """As WCAG defines it: 3 is asked of lines and bars."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_scattered_points_are_not_joined():
    points = [(1, 3), (2, 1), (3, 2)]
    text = Chart("t", Axis("x"), Axis("y"), [Line("plans", points, joined=False)]).svg()
    assert not re.findall(r'class="line', text)
    assert len(ElementTree.fromstring(text).findall(f"{SPACE}circle")) == 3
    assert ">plans<" in text
