"""How long a plain round takes now, on machines that change."""

from itertools import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hierspec.pacing.plain_rounds import LARGE_BATCH, ONE_TOKEN, WITH_STORES, PlainRounds


def after(*times, window=ONE_TOKEN):
    rounds = PlainRounds(window)
    for seconds in times:
        rounds.add(1, seconds)
    return rounds


def test_before_any_round_it_is_a_measured_pass():
    assert not PlainRounds().timed
    assert PlainRounds().seconds == 1
    assert PlainRounds().relative_variance == 0


def test_rounds_that_agree_are_averaged():
    assert after(1.0, 1.1, 0.9, 1.0, 1.2).seconds == pytest.approx(1.04)


@pytest.mark.parametrize("window", [ONE_TOKEN, LARGE_BATCH, WITH_STORES])
def test_a_disturbance_is_forgotten_as_soon_as_it_is_over(window):
    rounds = after(*repeat(1.0, 40), *repeat(4.5, 40), window=window)
    assert rounds.seconds == 4.5
    for _ in range(window.latest):
        rounds.add(1, 1.1)
    assert rounds.seconds == pytest.approx(1.1)


def test_a_single_slow_round_does_not_count():
    assert after(1.0, 1.0, 1.0, 9.0).seconds == 1


def test_more_rounds_make_it_surer():
    few, many = after(1.0, 1.1, window=LARGE_BATCH), after(*[1.0, 1.1] * 8, window=LARGE_BATCH)
    assert 0 < many.relative_variance < few.relative_variance / 4


def test_tokens_are_averaged_apart_from_times():
    """A round of three tokens is not three times as fast a machine."""
    rounds = PlainRounds(WITH_STORES)
    for _ in range(8):
        rounds.add(1, 1.2)
        rounds.add(3, 1.6)
    assert rounds.seconds == pytest.approx(0.7)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=50), st.sampled_from([ONE_TOKEN, LARGE_BATCH, WITH_STORES]))
def test_it_is_never_beyond_what_was_seen(times, window):
    rounds = after(*times, window=window)
    assert min(times) * (1 - 1e-9) <= rounds.seconds <= max(times) * (1 + 1e-9)
    assert rounds.relative_variance <= 1
