"""How many steps a graph runs ahead: all that surely go on, and few of those that only some leads allow."""

from types import SimpleNamespace

import numpy as np
import pytest

from hierspec.backends.cuda.ahead import steps_allowed
from hierspec.core.foresight import SUREST


def allowed(sure: int, perhaps: int, never: int) -> np.ndarray:
    rows = np.zeros((sure + perhaps + never, SUREST + 1), bool)
    rows[:sure] = True
    rows[sure : sure + perhaps, -1] = True
    return rows


@pytest.mark.parametrize(
    ("rows", "room", "steps"),
    [
        (allowed(4, 0, 3), 20, 4),  # a fixed block: in one call
        (allowed(0, 7, 0), 20, 3),  # only after sure tokens
        (allowed(0, 2, 5), 20, 2),
        (allowed(1, 6, 0), 20, 3),
        (allowed(5, 2, 0), 20, 5),
        (allowed(0, 0, 7), 20, 0),
        (allowed(7, 0, 0), 2, 2),  # the end of the text
    ],
)
def test_steps_that_likely_end_earlier_are_left_to_another_call(rows, room, steps):
    ask = SimpleNamespace(ahead=rows)
    assert len(steps_allowed([ask], room, 16, 4)) == steps


def test_several_requests_go_on_together():
    ask = SimpleNamespace(ahead=allowed(3, 0, 0))
    assert not steps_allowed([ask, ask], 20, 16, 4)
    assert not steps_allowed([SimpleNamespace(ahead=None)], 20, 16, 4)
