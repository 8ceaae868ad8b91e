"""Engines that take turns: each makes every call, texts are those of the calls alone, and sums are compared."""

import json
from itertools import count

import pytest
import steps_in_turn
from steps_in_turn import ClosedLoop, calls_from, in_turn

import hierspec
from hierspec.testing.checkpoints import tiny_checkpoint

PROMPTS = ["abc abc abc", "the dog", "xyz"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("turns") / "tiny", "llama", context=4096)


def test_every_call_is_made_and_never_more_at_once_than_there_are_clients(folder):
    models = {plan: hierspec.load(folder, keep_learnt=False) for plan in ("plain", "auto")}
    calls = calls_from(PROMPTS, 4, 7, max_tokens=12)
    loops = {plan: ClosedLoop(model, plan, calls, clients=3) for plan, model in models.items()}
    for loop in loops.values():
        loop.clock = count().__next__
    in_turn(list(loops.values()))
    alone = [list(models["plain"].generate(text, plan="plain", sampling=sampling).tokens) for text, sampling in calls]
    for loop in loops.values():
        assert loop.texts == alone
        assert loop.seconds == (loop.clock() / 2)  # each step looks at it twice, and a second passes between
    assert {sampling.temperature for _, sampling in calls} == {0.0, 0.8}


def test_an_engine_is_stepped_only_after_the_others(folder):
    steps = []

    class Loop:
        def __init__(self, name, count):
            self.name, self.left = name, count

        @property
        def busy(self):
            return self.left > 0

        def step(self):
            self.left -= 1
            steps.append(self.name)

    in_turn([Loop("a", 3), Loop("b", 1), Loop("c", 2)])
    assert "".join(steps) == "abcaca"


def test_the_script_compares_and_finds_another_text(folder, tmp_path, capsys, monkeypatch):
    command = [str(folder), "--clients", "1,2", "--rounds", "2", "--calls", "3", "--max-tokens", "6"]
    assert steps_in_turn.main([*command, "--output", str(tmp_path / "turns.json")]) == 0
    document = json.loads((tmp_path / "turns.json").read_text())
    assert document["same_texts"]
    assert [(each["clients"], each["calls"]) for each in document["rounds"]] == [(1, 3), (2, 6)] * 2
    other = property(lambda loop: [[id(loop)]] * 6, lambda loop, value: None)
    monkeypatch.setattr(ClosedLoop, "texts", other, raising=False)
    monkeypatch.setattr(ClosedLoop, "step", lambda loop: (loop._todo.clear(), setattr(loop, "seconds", 1.0)))
    assert steps_in_turn.main(command) == 1


def test_unmeasured_rounds_are_not_in_the_document(folder, tmp_path):
    command = [str(folder), "--clients", "1", "--rounds", "1", "--unmeasured", "2", "--calls", "1", "--max-tokens", "2"]
    assert steps_in_turn.main([*command, "--output", str(tmp_path / "turns.json")]) == 0
    assert len(json.loads((tmp_path / "turns.json").read_text())["rounds"]) == 1


def test_sums_of_times_are_compared():
    rounds = [{"seconds": {"plain": 2.0, "plain again": 2.0, "auto": 1.0}}] * 2
    rounds.append({"seconds": {"plain": 4.0, "plain again": 4.0, "auto": 4.0}})
    row = steps_in_turn._summary(4, rounds)
    assert row["auto over plain"] == pytest.approx(8 / 6, abs=1e-4)
    assert row["plain again over plain"] == 1
    assert row["error of auto"] == pytest.approx(1 / 3, abs=1e-4)


@pytest.mark.parametrize("clients", ["0", "x", ""])
def test_clients_are_numbers(clients, capsys):
    assert steps_in_turn.main(["--clients", clients]) == 2
    assert "--clients must be numbers from 1 up" in capsys.readouterr().err


def test_rounds_that_only_prepare_are_not_negative(capsys):
    assert steps_in_turn.main(["--unmeasured", "-1"]) == 2
    assert "--unmeasured must be 0 or more, not -1." in capsys.readouterr().err
