"""The experiment's figures, by hand."""

from prompt_beside_streams import Measured, _add_gaps

from hierspec_bench.serving.client import Reply


def test_gaps_count_as_meanwhile_where_they_overlap_the_prefill():
    measured = Measured(alone=[1.0], beside=[2.0], prompt_tokens=[1000])
    stream = Reply(pieces=[0.0, 1.0, 2.0, 5.0, 8.0, 9.0])
    _add_gaps(measured, [stream], began=2.5, first=6.0)
    assert measured.usual_gaps == [1.0, 1.0, 1.0]
    assert measured.gaps_meanwhile == [[3.0, 3.0]]
    figures = measured.figures()
    assert figures["first_over_alone"] == 2.0
    assert figures["longest_gap_over_usual"] == figures["longest_gap_over_usual_largest"] == 3.0


def test_a_gap_that_holds_the_whole_prefill_is_meanwhile():
    measured = Measured()
    _add_gaps(measured, [Reply(pieces=[0.0, 10.0])], began=2.0, first=3.0)
    assert (measured.usual_gaps, measured.gaps_meanwhile) == ([], [[10.0]])
