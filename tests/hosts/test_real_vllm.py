"""hierspec inside a real vLLM, where one is installed (`make vllm-test`): the default model, offline and served."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
pytest.importorskip("vllm", reason="vLLM is not installed here; make vllm-test runs these")

from hierspec.hosts.vllm_server import PROPOSER, vllm_model

QUESTIONS = [
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog near the river bank.",
    "Write a list of the numbers from one to twenty in words.",
    "What is the capital of France? Answer in one sentence.",
]
_WAIT = 600  # seconds for a server to start: a busy machine is slow
SPECULATIVE = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 6}
_OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    llm = LLM(asked["model"], dtype="float32", max_model_len=1024, enforce_eager=True, max_num_seqs=4,
              disable_log_stats=False, **asked["options"])
    chats = [[{"role": "user", "content": question}] for question in asked["questions"]]
    texts = []
    for sampling in asked["samplings"]:
        texts.append([list(answer.outputs[0].token_ids)
                      for answer in llm.chat(chats, SamplingParams(max_tokens=48, **sampling), use_tqdm=False)])
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    print("ANSWERS", json.dumps([texts, {k: v for k, v in metrics.items() if "spec_decode" in k}]))
"""


@pytest.fixture(scope="module")
def model() -> str:
    return vllm_model(None)


GREEDY = {"temperature": 0}


def offline(tmp_path, model, environment=(), samplings=(GREEDY, GREEDY), **options):
    """All questions as one batch, once for each sampling: the second time with what was learnt."""
    script = tmp_path / "offline.py"
    script.write_text(_OFFLINE)
    asked = json.dumps({"model": model, "options": options, "questions": QUESTIONS, "samplings": samplings})
    done = subprocess.run(
        [sys.executable, script, asked],
        capture_output=True,
        text=True,
        timeout=_WAIT,
        env={**os.environ, **dict(environment)},
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS")]
    return (json.loads(answers[0].removeprefix("ANSWERS")) if answers else None), done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    answers, log = offline(tmp_path_factory.mktemp("plain"), model)
    assert answers, log[-3000:]
    return answers[0]


def test_greedy_texts_are_those_without_speculation(model, plain, tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text('stores = ["context", "history"]\nmerge = true\n')
    answers, log = offline(
        tmp_path, model, speculative_config=SPECULATIVE, additional_config={"hierspec": {"plan": str(plan)}}
    )
    assert answers, log[-3000:]
    texts, metrics = answers
    assert texts == plain
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 60  # the second time all of it is in the history


def test_the_plan_that_adapts_writes_the_same(model, plain, tmp_path):
    answers, log = offline(tmp_path, model, {"HIERSPEC_PLAN": "hd+"}, speculative_config=SPECULATIVE)
    assert answers, log[-3000:]
    assert answers[0] == plain


def test_a_draft_model_beside_the_stores_writes_the_same_and_is_accepted(model, plain, tmp_path):
    plan = {
        "hierspec": {"plan": str(Path(__file__).parents[2] / "examples" / "vllm_draft.toml"), "stores": str(tmp_path)}
    }
    answers, log = offline(tmp_path, model, speculative_config=SPECULATIVE, additional_config=plan)
    assert answers, log[-3000:]
    texts, metrics = answers
    assert texts == plain
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 20


def test_sampling_follows_its_settings(model, plain, tmp_path):
    """Where one token is left to choose from, or temperatures are next to nothing, the text is the greedy one; vLLM by
    itself fails or samples at the temperature that its memory happens to hold."""
    plan = tmp_path / "plan.toml"
    plan.write_text('stores = ["context", "history"]\nmerge = true\n')
    samplings = [
        {"temperature": 0.9, "top_k": 1},
        {"temperature": 0.01, "seed": 1},
        {"temperature": 0.9, "top_p": 0.001, "seed": 2},
        {"temperature": 2.0, "seed": 3},
        {"temperature": 2.0, "seed": 4},
    ]
    additional = {"hierspec": {"plan": str(plan)}}
    answers, log = offline(tmp_path, model, (), samplings, speculative_config=SPECULATIVE, additional_config=additional)
    assert answers, log[-3000:]
    (one_left, cold, few_left, hot, hot_again), metrics = answers
    assert one_left == cold == few_left == plain[0]
    assert all(text not in (greedy, other) for text, other, greedy in zip(hot, hot_again, plain[0], strict=True))
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 60


def test_what_cannot_run_there_is_refused_at_start_up(model, tmp_path):
    answers, log = offline(tmp_path, model, {"HIERSPEC_PLAN": "hispec"}, speculative_config=SPECULATIVE)
    assert answers is None
    assert "Tier 1 is an exit of the target" in log


def test_three_tensor_parallel_ranks_write_what_they_write_without_drafts(model, tmp_path):
    """The default model's 9 heads can be divided by three. Sums over ranks have another order: compared among them."""
    ranks = {"VLLM_CPU_OMP_THREADS_BIND": "0|1|1" if (os.cpu_count() or 1) < 3 else "0|1|2"}
    texts = []
    for options in ({}, {"speculative_config": SPECULATIVE}):
        answers, log = offline(tmp_path, model, ranks, tensor_parallel_size=3, **options)
        assert answers, log[-3000:]
        texts.append(answers[0])
    assert texts[0] == texts[1]


def test_the_server_answers_as_without_speculation_and_counts_what_was_accepted(model, plain, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hierspec", "serve", model, "--engine", "vllm", "--port", str(port)]
    command += ["--plan", "hd+", "--dtype", "float32", "--served-name", "tested", "--speculative-tokens", "6"]
    command += ["--vllm-option=--max-model-len=1024", "--vllm-option=--enforce-eager", "--vllm-option=--max-num-seqs=4"]
    log = tmp_path / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", server, log)
        question = {"role": "user", "content": QUESTIONS[0]}
        body = {"model": "tested", "messages": [question], "temperature": 0, "max_tokens": 48, "return_token_ids": True}
        for _ in range(2):
            answer = json.loads(_get(f"http://127.0.0.1:{port}/v1/chat/completions", body))
            assert answer["choices"][0]["token_ids"] == plain[0][0]
        metrics = _get(f"http://127.0.0.1:{port}/metrics").decode()
        accepted = [
            line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")
        ]
        assert float(accepted[0].split()[-1]) > 10
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(timeout=60)


def _get(address: str, body: object = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_WAIT) as answer:
        return bytes(answer.read())


def _wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(_WAIT):
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            _get(address)
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail(f"the server did not start: {log.read_text()[-3000:]}")
