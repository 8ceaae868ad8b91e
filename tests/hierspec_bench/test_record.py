"""A run that can be stopped and resumed: what it keeps, what it learns again, and what its document says."""

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
import torch

import hierspec
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.prompts import BenchPrompt
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec_bench import runners
from hierspec_bench.cli.table import show
from hierspec_bench.document import document_of
from hierspec_bench.journal import Journal, journal_path
from hierspec_bench.peers import PeerAnswer
from hierspec_bench.provenance import file_hashes, prompt_set
from hierspec_bench.record import Record
from hierspec_bench.result import Result
from hierspec_bench.run import PLAIN, SideBySide

# Twice the same, so that a history that has learnt the first answers helps with the others.
PROMPTS = [BenchPrompt("one", ("abc abc",)), BenchPrompt("two", ("hello", "again"))] * 2
PLANS = {
    "history": Plan(stores=("context", "history"), budget=6, merge=True, adapt=True),
    "exit": Plan(stores=("history",), adapt=True, tiers=(TierPlan(exit_layer=2, gather=3, until="worth"),)),
    "residual": Plan(rule="residual", stores=("history",), tiers=(TierPlan(exit_layer=2, gather=2),)),
}
TIMED = ("seconds", "per_second", "speedup", "interval", "outliers", "time", "ms_per_pass")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("record") / "tiny", "llama"))


class FakePeer:
    """Writes what it is told, in a time that it is told."""

    name, about, samples = "fake", {"version": "1", "setting": {"threads": 2}}, False

    def __init__(self, first_seconds=0.5, learns=False):
        self.first_seconds, self.learns = first_seconds, learns
        self.prompts = []
        self.told = []  # in order: a forgetting, a prompt's length, a renewal

    def generate(self, prompt, sampling):
        self.prompts.append(list(prompt))
        self.told.append("asked")
        return PeerAnswer([5, 6, 7, 8], 2.0, self.first_seconds, 1)

    def forget(self):
        self.told.append("forget")

    def renew(self):
        self.told.append("renew")

    def close(self):
        pass


def bench(model, **changes) -> SideBySide:
    setting = {"samplings": [Sampling(max_tokens=12), Sampling(max_tokens=12, temperature=1.0)], "batches": (2,)}
    return SideBySide(model, PROMPTS, PLANS, **(setting | changes))


def untimed(found):
    """A document without what is never the same twice."""
    if isinstance(found, dict):
        return {name: untimed(value) for name, value in found.items() if not any(part in name for part in TIMED)}
    return [untimed(value) for value in found] if isinstance(found, list) else found


def stop_after(monkeypatch, calls):
    """Ctrl-C in the midst of the run: so many groups are answered by plans before."""
    run = runners.PlanRunner.run

    def counted(self, group):
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise KeyboardInterrupt
        return run(self, group)

    monkeypatch.setattr(runners.PlanRunner, "run", counted)


@pytest.fixture(scope="module")
def unbroken(model):
    torch.set_num_threads(1)
    run = bench(model, repeats=2)
    run.run()
    return json.loads(json.dumps(untimed(document_of(run, {}))))


def test_a_resumed_run_ends_as_an_unbroken_one(model, unbroken, tmp_path, monkeypatch):
    path = tmp_path / "result.partial.jsonl"
    first = bench(model, repeats=2)
    with monkeypatch.context() as patched:
        stop_after(patched, 21)  # of 8 plans and batches x 2 temperatures: inside the second group
        with pytest.raises(KeyboardInterrupt):
            first.run(journal=Journal(path, {"x": 1}))
    assert (first.done, first.total) == (2, 8)
    partial = document_of(first, {})
    assert (partial["complete"], partial["prompts_done"]) == (False, 2)
    assert set(partial) == set(unbroken)
    assert set(partial["plans"]["history"]) - {"law"} == {*partial["plans"][PLAIN]}
    with path.open("a") as file:
        file.write('{"finished": [0, 2, 0, "pl')  # torn by the power
    second = bench(model, repeats=2)
    with monkeypatch.context() as patched:
        stop_after(patched, 30)  # in the second repeat: stores of the first are gone
        with pytest.raises(KeyboardInterrupt):
            second.run(journal=Journal(path, {"x": 1}))
    third, journal = bench(model, repeats=2), Journal(path, {"x": 1})
    third.run(journal=journal)
    assert json.loads(json.dumps(untimed(document_of(third, {})))) == unbroken
    journal.close(finished=True)
    assert not path.exists()


def test_what_is_not_learnt_again_would_be_missed(model, tmp_path, monkeypatch):
    """The test above can fail: without playing answers back, a resumed history guesses less."""
    path = tmp_path / "result.partial.jsonl"

    def small() -> SideBySide:
        return SideBySide(model, PROMPTS, {"history": PLANS["history"]}, [Sampling(max_tokens=12)])

    whole = small().run()[0]["history"]
    with monkeypatch.context() as patched:
        stop_after(patched, 4)
        with pytest.raises(KeyboardInterrupt):
            small().run(journal=Journal(path, {"x": 1}))
    monkeypatch.setattr(runners.PlanRunner, "learn_from", lambda *arguments: None)
    forgetful = small().run(journal=Journal(path, {"x": 1}))[0]["history"]
    assert [one.tokens for one in forgetful] == [one.tokens for one in whole]
    assert sum(one.stats.passes for one in forgetful) > sum(one.stats.passes for one in whole)


def test_another_setting_is_not_gone_on_with(tmp_path):
    path = journal_path(tmp_path / "a.json")
    assert path.name == "a.partial.jsonl"
    Journal(path, {"plans": ["a"], "prompts": 1}).write({"finished": 1})
    assert Journal(path, {"prompts": 1, "plans": ["a"]}).entries == [{"finished": 1}]
    with pytest.raises(HierspecError, match=r"another setting \(plans\).*--restart"):
        Journal(path, {"plans": ["b"], "prompts": 1})
    assert Journal(path, {"plans": ["b"], "prompts": 1}, restart=True).entries == []
    path.write_text('{"journal": "other"}\n')
    with pytest.raises(HierspecError, match="not what a stopped bench leaves"):
        Journal(path, {})
    path.write_text("not ours\nat all\n")
    with pytest.raises(HierspecError, match="damaged"):
        Journal(path, {})
    assert path.read_text() == "not ours\nat all\n"  # nothing of somebody else's file is cut off


def test_repeats_begin_with_fresh_stores(unbroken):
    for part in (unbroken, *unbroken["other_temperatures"]):
        for name, figures in part["plans"].items():
            rows = figures["by_prompt"]
            assert [(row["repeat"], row["prompt"]) for row in rows] == [(r, p) for r in (0, 1) for p in range(4)]
            assert figures["prompts"] == 4
            if part["temperature"] == 0:  # where seeds decide nothing, a repeat is the same again
                assert [row["passes"] for row in rows[:4]] == [row["passes"] for row in rows[4:]], name
    passes = [row["passes"] for row in unbroken["plans"]["history"]["by_prompt"]]
    assert sum(passes[2:4]) < sum(passes[:2])  # it did learn from the first round


def test_the_document_counts_turns_and_differences(model, unbroken):
    assert unbroken["plans"][PLAIN]["turns"] == 2 * (2 + 4)
    hot = unbroken["other_temperatures"][0]["plans"]
    assert hot["history"]["law"]["method"].startswith("the same texts")
    assert hot["history"]["identical"] + hot["history"]["ties"] == 4
    residual = hot["residual"]
    assert not residual["promises_text"]
    assert 0 < residual["law"]["p"] <= 1
    first = residual["first_differences"][0]
    assert first["tokens"][0] != first["tokens"][1]
    assert first["gap"] > 0
    assert len(residual["first_differences"]) == len(residual["differences"])
    assert [(text["prompt"], text["task"]) for text in unbroken["texts"]] == [*enumerate(["one", "two"] * 2)]
    text = unbroken["texts"][1]
    assert text["asked"] == "hello"
    assert set(text["answers"]) == {*unbroken["plans"]}
    assert len({"".join(piece for piece, _, _ in pieces) for pieces in text["answers"].values()}) == 1
    assert len({sum(count for _, _, count in pieces) for pieces in text["answers"].values()}) == 1
    assert all(a[1] != b[1] for pieces in text["answers"].values() for a, b in pairwise(pieces))  # runs, not tokens


def test_the_parts_of_a_plans_time_add_up(model):
    run = bench(model, batches=(), samplings=[Sampling(max_tokens=12)])
    run.run()
    result = document_of(run, {"bandwidth": {"weights_bytes": 10**6}})
    for figures in result["plans"].values():
        assert sum(figures["time"].values()) == pytest.approx(figures["seconds"], abs=2e-3)
        assert figures["prefill_seconds"] + figures["decode_seconds"] == pytest.approx(figures["seconds"], abs=2e-3)
        later = sum(row["passes"] - row["turns"] for row in figures["by_prompt"])
        assert figures["gigabytes_per_second"] == pytest.approx(later * 1e-3 / figures["decode_seconds"], rel=0.1)
    assert result["plans"]["exit"]["time"]["drafting"] > 0
    assert result["plans"][PLAIN]["time"]["drafting"] == 0


def test_peers_are_told_the_whole_conversation_and_their_first_step_counts(model):
    peer = FakePeer()
    run = bench(model, peers=[peer], batches=())
    run.run()
    result = document_of(run, {}, {"other": "It is not installed."})
    figures = result["peers"]["fake"]
    assert figures["about"] == peer.about
    assert (figures["seconds"], figures["prefill_seconds"], figures["decode_seconds"]) == (12.0, 3.0, 9.0)
    assert figures["decode_tokens_per_second"] == round((24 - 6) / 9.0, 2)
    assert "time" not in figures
    assert result["absent_peers"] == {"other": "It is not installed."}
    assert result["other_temperatures"][0]["peers"] == {}  # it is not known to sample
    first, second = peer.prompts[2:4]  # after the warm-up and the first prompt
    assert second[: len(first) + 4] == [*first, 5, 6, 7, 8]
    silent = FakePeer(first_seconds=None)
    run = bench(model, peers=[silent], batches=(), samplings=[Sampling(max_tokens=4)])
    run.run()
    assert "prefill_seconds" not in document_of(run, {})["peers"]["fake"]


def test_peers_forget_before_each_prompt_and_learners_start_each_repeat_afresh(model, tmp_path):
    def run(peer, repeats):
        return SideBySide(model, PROMPTS[:2], {}, [Sampling(max_tokens=4)], [peer], repeats=repeats)

    for learns in (False, True):
        peer = FakePeer(learns=learns)
        run(peer, 2).run()
        repeat = ["forget", "asked", "forget", "asked", "asked"]  # the second prompt has two turns
        assert peer.told == ["asked", *repeat, *(["renew"] if learns else []), *repeat]  # warmed up at first

    class Tired(FakePeer):
        def generate(self, prompt, sampling):
            if len(self.prompts) == 2:
                raise KeyboardInterrupt
            return super().generate(prompt, sampling)

    for learns, untimed_again in ((False, []), (True, ["forget", "asked"])):
        path = tmp_path / f"{learns}.partial.jsonl"
        with pytest.raises(KeyboardInterrupt):
            run(Tired(), 1).run(journal=Journal(path, {}))
        resumed = FakePeer(learns=learns)
        run(resumed, 1).run(journal=Journal(path, {}))
        assert resumed.told == ["asked", *untimed_again, "forget", "asked", "asked"]


def test_the_terminal_tells_the_ratio_to_the_fastest_other_engine(model, capsys):
    slow, fast = FakePeer(), FakePeer()
    slow.name, slow.generate = "slow", lambda prompt, sampling: PeerAnswer([5, 6, 7, 8], 9.0)
    run = bench(model, peers=[slow, fast], batches=(2,), samplings=[Sampling(max_tokens=4)])
    run.run()
    result = document_of(run, {})
    show(Record.of(result))
    said = " ".join(capsys.readouterr().err.split())
    best = max(("history", "exit", "residual"), key=lambda name: result["plans"][name]["tokens_per_second"])
    ratio = result["plans"][best]["tokens_per_second"] / 2.0
    assert f"{best} writes {ratio:.2f}x (" in said
    assert "the tokens/s of fake, the fastest other engine." in said


def test_every_size_of_batch_is_filled(model, monkeypatch):
    sizes = []
    together = runners.PlanRunner._together
    monkeypatch.setattr(
        runners.PlanRunner,
        "_together",
        lambda own, group: sizes.append((own.size, len(group))) or together(own, group),
    )
    prompts = [BenchPrompt("one", (f"abc {number}",)) for number in range(6)]
    SideBySide(model, prompts, {}, [Sampling(max_tokens=2)], batches=(2, 3)).run()
    assert set(sizes) == {(1, 1), (2, 2), (3, 3)}


def test_an_engine_that_fails_does_not_take_the_run_with_it(model, tmp_path):
    class Fragile(FakePeer):
        def generate(self, prompt, sampling):
            if len(self.prompts) == 4:
                raise HierspecError("It ran out of memory.")
            return super().generate(prompt, sampling)

    def small(peer):
        return SideBySide(model, PROMPTS, {"history": PLANS["history"]}, [Sampling(max_tokens=4)], [peer, sound])

    sound = FakePeer()
    sound.name = "sound"
    path = tmp_path / "result.partial.jsonl"
    run = small(Fragile())
    run.run(journal=Journal(path, {}))
    result = document_of(run, {})
    assert result["complete"]
    assert (list(result["peers"]), list(result["absent_peers"])) == (["sound"], ["fake"])
    said = "It failed at prompt 2: It ran out of memory. Until then, on 2 prompts, it wrote 2.0 tokens/s."
    assert result["absent_peers"]["fake"] == said
    again = small(FakePeer())  # repaired: it goes on where it broke down
    again.run(journal=Journal(path, {}))
    mended = document_of(again, {})["peers"]["fake"]
    assert (mended["prompts"], len(again.peers[0].prompts)) == (4, 1 + 3)
    assert len(mended["first_differences"]) == 4


def test_later_turns_read_only_what_is_new(model):
    """Rows of the decoder over a chat of two turns: every token once, not the first turn twice."""
    own = runners.PlanRunner(model.apart(), Plan(), 1, False)
    before = model.decoder.layer_rows
    given = runners.PromptToAnswer(0, 0, BenchPrompt("a", ("hello " * 20, "again")), Sampling(max_tokens=8, seed=0))
    [told] = own.run([given])["outcomes"]
    rows = (model.decoder.layer_rows - before) / model.config.layers
    whole = len(told["asked"][1]) + len(told["tokens"][1])
    assert len(told["asked"][0]) > 40
    assert whole - 2 <= rows <= whole + 1


def test_order_rotates(model, monkeypatch):
    order = []
    run = runners.PlanRunner.run
    monkeypatch.setattr(
        runners.PlanRunner,
        "run",
        lambda self, group: (order.append((group[0].index, self.plan.rule)), run(self, group))[1],
    )
    bench(model, batches=(), samplings=[Sampling(max_tokens=2)]).run()
    turns = [[rule for place, rule in order if place == prompt].index("residual") for prompt in range(4)]
    assert turns == [3, 2, 1, 0]


def test_outliers_are_shown_and_still_count():
    from hierspec_bench.estimates import outliers, speedup

    calm = [Result("a", place, tokens=[[1] * 10], seconds=1.0 + place / 100) for place in range(9)]
    slow = Result("b", 9, tokens=[[1] * 10], seconds=4.0)
    assert outliers(calm) == []
    [found] = outliers([*calm, slow])
    assert (found["prompt"], found["task"], found["tokens_per_second"]) == (9, "b", 2.5)
    assert found["usual"] == pytest.approx(9.6, abs=0.2)
    assert speedup([*calm, slow], [*calm, calm[0]]) < 0.8


def test_hashes_of_files_are_kept_and_follow_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.json"
    path.write_text("one")
    [first] = file_hashes([path]).values()
    reads = []
    monkeypatch.setattr("hashlib.file_digest", lambda *arguments: reads.append(1))
    assert file_hashes([path]) == {path: first}
    assert not reads
    monkeypatch.undo()
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    path.write_text("other")
    assert file_hashes([path])[path] != first


def test_a_prompt_set_is_known_by_what_it_says():
    one = prompt_set("own", PROMPTS)
    assert (one["count"], one["turns"]) == (4, 6)
    assert prompt_set("own", PROMPTS[:3])["sha256"] != one["sha256"]


def test_results_come_back_from_json(model):
    run = bench(model, batches=(), samplings=[Sampling(max_tokens=6)])
    [found] = run.run()
    for result in found["exit"]:
        again = Result.from_json(json.loads(json.dumps(result.to_json())))
        again.difference = result.difference
        assert again == result
        assert again.stats.tiers[1].proposed_at == result.stats.tiers[1].proposed_at


def test_a_stopped_command_leaves_a_document_and_goes_on(model, tmp_path, capsys):
    """SIGTERM in the midst of it, then the same command to the end, then a command with another setting."""
    prompts, output = tmp_path / "p.jsonl", tmp_path / "result.json"
    prompts.write_text("".join(json.dumps({"task": "a", "turns": [f"abc {n}"]}) + "\n" for n in range(100)))
    command = ["bench", "run", str(model.folder), "--prompts", str(prompts), "--plans", "lookup", "--max-tokens", "8"]
    command += ["--output", str(output)]
    ours = [sys.executable, "-m", "hierspec", *command]
    process = subprocess.Popen(ours, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    journal = journal_path(output)
    while not (journal.exists() and len(journal.read_bytes().splitlines()) > 8):
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate()
    assert process.returncode == 130, err
    partial = json.loads(out.splitlines()[-1])
    assert partial == json.loads(output.read_text())
    assert not partial["complete"]
    assert 0 < partial["prompts_done"] < 100
    assert partial["plans"]["lookup"]["prompts"] == partial["prompts_done"]
    assert "resumes from here" in err
    assert main([*command, "--limit", "5"]) == 2  # other prompts
    assert main([*command, "--threads", str(partial["threads"] + 1)]) == 2
    assert "another setting (machine)" in capsys.readouterr().err
    measured = partial["plans"]["lookup"]["by_prompt"]
    rerun = subprocess.run(ours, check=False, capture_output=True, text=True)
    assert rerun.returncode == 0, rerun.stderr
    whole = json.loads(output.read_text())
    assert whole["complete"]
    assert whole["plans"]["lookup"]["by_prompt"][: len(measured)] == measured  # to the very seconds
    assert not journal.exists()
    assert main([*command, "--limit", "5", "--restart"]) == 0
    found = json.loads(output.read_text())
    assert found["complete"]
    assert found["affinity"]
    assert found["files"]["model.safetensors"]
    assert found["bandwidth"]["gigabytes_per_second"] > 0
    assert not journal.exists()


def test_several_temperatures_and_mistakes_are_told(model, tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"turns": ["abc"]}\n')
    command = ["bench", "run", str(model.folder), "--prompts", str(prompts), "--plans", "lookup", "--max-tokens", "4"]
    assert main([*command, "--temperature", "0,0.8", "--repeats", "2"]) == 0
    out, err = capsys.readouterr()
    assert "temperature 0.8" in err
    found = json.loads(out)
    assert [part["temperature"] for part in found["other_temperatures"]] == [0.8]
    assert found["repeats"] == 2
    for extra, told in (
        (["--temperature", "0,x"], "numbers"),
        (["--temperature", "1,1.0"], "twice"),
        (["--repeats", "0"], "--repeats must be at least 1"),
    ):
        assert main([*command, *extra]) == 2
        assert told in capsys.readouterr().err


def test_seeds_differ_by_prompt_and_agree_between_plans(model):
    run = bench(model, batches=(), samplings=[Sampling(max_tokens=12, temperature=1.0, seed=5)])
    [found] = run.run()
    plain = [result.tokens for result in found[PLAIN]]
    assert plain[0] != plain[2]  # the same prompt under another seed
    assert [result.tokens for result in found["history"]] == plain
    assert np.mean([one.difference is None for one in found["residual"]]) < 1
