"""Engines that answer in turn, with a script in place of vLLM."""

import os

import pytest
import vllm_host

_ENGINE = """
import json, sys
name = sys.argv[sys.argv.index("--one") + 1]
print("a line of vLLM's own", flush=True)
print('ANSWER "ready"', flush=True)
for number, line in enumerate(sys.stdin):
    if name == "ngram" and number == 1:
        sys.exit("ValueError: no more")
    with open(sys.argv[1], "a") as turns:
        turns.write(name + " " + json.loads(line) + "\\n")
    answer = {"tokens": [1, 2, 3], "seconds": 0.5, "accepted": 2, "drafted": 4, "steps": 1}
    print("ANSWER " + json.dumps(answer), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="processes cannot be stopped on this system")
def test_all_engines_answer_a_prompt_before_the_next_one_comes(tmp_path, monkeypatch):
    script, turns = tmp_path / "engine.py", tmp_path / "turns"
    script.write_text(_ENGINE)
    monkeypatch.setattr(vllm_host, "__file__", str(script))
    asked = {"model": "none", "prompts": [("qa", "first"), ("rag", "second"), ("qa", "third")]}
    results = vllm_host.run_in_turn(["plain", "ngram", "suffix"], asked, [str(turns)])
    # Another one begins each time. One that ended answers no more, and the others go on.
    assert turns.read_text().split("\n")[:-1] == [
        *("plain first", "ngram first", "suffix first"),
        *("suffix second", "plain second"),
        *("suffix third", "plain third"),
    ]
    assert results["ngram"] == {"failed": "ValueError: no more"}
    report = vllm_host.by_task(results["suffix"], results["plain"])
    assert report["equal_to_plain"] == "3 of 3"
    assert report["qa"] == {"tokens_per_second": 6.0, "accepted_a_step": 2.0, "drafted_a_step": 4.0}
