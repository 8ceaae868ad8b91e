"""The script's own logic, with an engine that is made up."""

import json
import sys
from types import SimpleNamespace

import pytest
import vllm_gpu
from vllm_gpu_engine import Job, answer_all, token_times


class Engine:
    """Writes one token less for each word of a prompt; counts as vLLM does."""

    def __init__(self):
        self.steps, self.batches = 0, []

    def chat(self, chats, sampling, use_tqdm):
        self.batches.append(len(chats))
        texts = [[7] * (sampling["max_tokens"] - len(chat[0]["content"].split())) for chat in chats]
        self.steps += sum(len(text) - 1 for text in texts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=text)]) for text in texts]

    def generate(self, prompts, sampling, use_tqdm):
        self.batches.append(len(prompts[0]["prompt_token_ids"]))

    def get_metrics(self):
        accepted = SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=self.steps // 2)
        return [accepted, SimpleNamespace(name="vllm:inter_token_latency_seconds", count=self.steps)]


ASKED = {"alone": ["a b"] * 20, "together": ["c"] * 20, "warm_up": ["d", "e"], "max_tokens": 40}


def test_one_at_a_time_and_sixteen_at_a_time():
    engine = Engine()
    runs = answer_all(Job("8B:plain"), ASKED, engine, dict)
    assert engine.batches == [1, 16, 2, *[1] * 20, 16, 4, 16, 4]
    assert [len(runs[part]["texts"]) for part in ("1", "1 again in 16", "16")] == [20, 20, 20]
    assert runs["1"]["steps"] == 20 * 37
    exact = answer_all(Job("8B:hierspec:exact"), ASKED, Engine(), dict)
    assert [len(run["texts"]) for run in exact.values()] == [8, 16]


def test_token_times_are_those_of_the_tokens_between():
    engine = Engine()
    assert set(token_times(engine, dict, dict, 100)) == {"512", "2048"}
    assert engine.batches == [512] * 7 + [2048] * 7


def test_options_by_the_name_of_an_engine():
    assert "speculative_config" not in Job("8B:plain").options("f", 8, "hd+")
    ours = Job("default:hierspec:full").options("f", 8, "hd+")
    assert ours["compilation_config"]["cudagraph_mode"] == "FULL"
    assert ours["compilation_config"]["cudagraph_capture_sizes"][0] == 9
    assert ours["additional_config"] == {"hierspec": {"plan": "hd+"}}
    assert (
        Job("default:hierspec:draft").options("f", 8, "hd+")["additional_config"]["hierspec"]["plan"].endswith(".toml")
    )
    assert Job("8B:hierspec:exact").reference == "8B:plain:exact"
    for name in vllm_gpu.JOBS:
        Job(name)
    with pytest.raises(ValueError, match="no engine"):
        Job("8B:other")


def run(texts, seconds, steps=10, accepted=0):
    return {"texts": texts, "seconds": seconds, "steps": steps, "accepted": accepted, "drafted": accepted}


def test_figures_are_against_plain_at_the_same_batch():
    plain = {"runs": {"1": run([[1, 2], [3]], 3), "1 again in 16": run([[1, 2], [4]], 1), "16": run([[5], [6]], 1)}}
    ours = {"runs": {"1": run([[1, 2], [3]], 1, 10, 5), "16": run([[5], [7]], 1)}}
    figures = vllm_gpu.summary({"8B:plain": plain, "8B:hierspec": ours, "default:hierspec": ours})
    assert figures["8B:plain"]["batches"]["1 again in 16"]["equal_to_plain"] == "1 of 2"
    assert "equal_to_plain" not in figures["8B:plain"]["batches"]["16"]
    alone = figures["8B:hierspec"]["batches"]["1"]
    assert (alone["over_plain"], alone["equal_to_plain"], alone["accepted_a_step"]) == (3.0, "2 of 2", 0.5)
    assert figures["8B:hierspec"]["batches"]["16"]["equal_to_plain"] == "1 of 2"
    assert "over_plain" not in figures["default:hierspec"]["batches"]["1"]


def test_an_engine_that_fails_or_hangs_leaves_what_it_had(tmp_path, monkeypatch):
    script = tmp_path / "engine.py"
    script.write_text(
        "import pathlib, sys, time\n"
        "pathlib.Path(sys.argv[4]).write_text('{\"opening_seconds\": 1}')\n"
        "if 'ngram' in sys.argv[2]: raise RuntimeError('no room')\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(vllm_gpu, "__file__", str(script))
    failed = vllm_gpu.run_apart(Job("8B:ngram"), {}, 60)
    assert failed["failed"] == "RuntimeError: no room"
    assert failed["opening_seconds"] == 1
    hung = vllm_gpu.run_apart(Job("8B:plain"), {}, 5)
    assert "longer than 5 seconds" in hung["failed"]


def test_the_record_is_there_after_every_engine(tmp_path, monkeypatch, capsys):
    record, seen = tmp_path / "record.json", []

    def run_apart(job, asked, seconds):
        seen.append(record.is_file() and list(json.loads(record.read_text())["engines"]))
        return {"runs": {"1": run([[1]], 1)}}

    monkeypatch.setattr(vllm_gpu, "run_apart", run_apart)
    monkeypatch.setattr(vllm_gpu, "_asked", lambda arguments, models: {})
    assert vllm_gpu.main(["--jobs", "8B:plain,8B:ngram", "--output", str(record)]) == 0
    assert seen == [False, ["8B:plain"]]
    assert vllm_gpu.main(["--jobs", "8B:plain", "--seconds", "1"]) == 0
    assert '"left_out": [\n  "8B:plain"' in capsys.readouterr().out


def test_a_wrong_name_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["vllm_gpu.py"])
    with pytest.raises(SystemExit):
        vllm_gpu.main(["--jobs", "70B:plain"])
    assert "There is no engine 70B:plain" in capsys.readouterr().err


def made_up_engine(folder, monkeypatch):
    """Instead of an engine's process: one that opens, waits for its turn and says when it measures."""
    script, turns = folder / "engine.py", folder / "turns"
    script.write_text(
        "import pathlib, sys, time\n"
        "name, answer = sys.argv[2], pathlib.Path(sys.argv[4])\n"
        f"turns = open({str(turns)!r}, 'a', buffering=1)\n"
        "if 'suffix' in name: time.sleep(600)\n"
        "if 'ngram' in name: raise RuntimeError('no room')\n"
        "turns.write('open\\n')\n"
        "answer.write_text('{\"opening_seconds\": 1}')\n"
        "assert sys.stdin.readline()\n"
        "turns.write(name + ' begins\\n')\n"
        "turns.write(name + ' ends\\n')\n"
        'answer.write_text(\'{"opening_seconds": 1, "runs": {}}\')\n'
    )
    monkeypatch.setattr(vllm_gpu, "__file__", str(script))
    return turns


def test_engines_that_open_side_by_side_measure_one_after_the_other(tmp_path, monkeypatch):
    turns = made_up_engine(tmp_path, monkeypatch)
    names = ["8B:plain", "8B:ngram", "8B:hierspec"]
    results = {job.name: result for job, result in vllm_gpu.run_in_turn([*map(Job, names)], {}, 600, 600)}
    assert list(results) == names
    assert [results[name].get("failed") for name in names] == [None, "RuntimeError: no room", None]
    lines = turns.read_text().splitlines()
    assert lines == ["open", "open", *(f"{name} {what}" for name in names[::2] for what in ("begins", "ends"))]


def test_an_engine_that_does_not_open_is_ended(tmp_path, monkeypatch):
    made_up_engine(tmp_path, monkeypatch)
    [(_, result)] = vllm_gpu.run_in_turn([Job("8B:suffix")], {}, 60, 0.1)
    assert result["failed"] == "It did not open in 0 seconds."
