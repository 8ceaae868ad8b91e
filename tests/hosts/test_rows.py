"""Requests are recognised by their tokens, wherever their rows have gone."""

from types import SimpleNamespace

import numpy as np

from hierspec.hosts.rows import Rows


def known(*tokens):
    return SimpleNamespace(text=np.array(tokens, np.int32))


def rows_of(*requests, patience=1):
    rows = Rows(patience)
    rows.recognise([None] * len(requests))
    for row, request in enumerate(requests):
        rows.put(row, request)
    return rows


def texts(*requests):
    return [None if request is None else request.text for request in requests]


def test_rows_that_move_are_found_by_their_whole_text():
    first, second, third = known(1, 2, 3), known(9, 2, 3), known(1, 2)
    rows = rows_of(first, second, third)
    assert rows.recognise(texts(third, first, second)) == ([third, first, second], [])
    assert rows.recognise(texts(second, third)) == ([second, third], [first])


def test_a_text_that_only_ends_or_begins_like_another_is_not_taken_for_it():
    rows = rows_of(known(1, 2, 3, 4))
    assert rows.recognise([np.array([7, 2, 3, 4], np.int32)])[0] == [None]
    rows = rows_of(known(1, 2, 3, 4))
    assert rows.recognise([np.array([1, 2, 3, 4, 5], np.int32)])[0] == [None]


def test_of_two_equal_texts_each_row_gets_one():
    one, other = known(5, 6), known(5, 6)
    found, ended = rows_of(one, other).recognise(texts(one, other))
    assert {id(each) for each in found} == {id(one), id(other)}
    assert not ended


def test_batches_that_take_turns_are_waited_for():
    one, other = known(1), known(2)
    rows = rows_of(one, patience=2)
    assert rows.recognise(texts(other)) == ([None], [])
    rows.put(0, other)
    assert rows.recognise(texts(one)) == ([one], [])
    assert rows.recognise([None]) == ([None], [other])
    assert rows.recognise([None]) == ([None], [one])
    assert len(rows) == 0


def test_after_a_while_texts_that_went_on_are_found_wherever_they_are():
    first, second, third = known(1, 2, 3), known(5, 2, 3, 4), known(7, 8)
    rows = rows_of(first, second, third)
    # The second and the first have changed places; the third has ended, and another one is new.
    now = texts(known(5, 2, 3, 4, 5, 6), known(1, 2, 3, 9), known(7, 9, 9), None)
    assert {id(request): tokens for request, tokens in rows.catch_up(now)} == {id(second): [5, 6], id(first): [9]}
