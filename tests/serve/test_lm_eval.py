"""lm_eval, as its users run it, against /v1/completions: its figures are those of our Python API.

lm_eval and what it needs take half a gigabyte, so it is no part of the test extra: it runs where its command is found.
"""

import json
import os
import shutil
import subprocess

import pytest
from serving import running

import hierspec
from hierspec.testing.checkpoints import tiny_checkpoint

LM_EVAL = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
QUESTIONS = [
    {"question": "The sky is", "choices": [" blue", " made of stone", " a number"], "answer": 0},
    {"question": "Two and two are", "choices": [" seven", " four"], "answer": 1},
    {"question": "Bread is", "choices": [" drunk", " eaten", " read aloud"], "answer": 1},
]
TASK = """\
task: three_questions
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
"""


def score(model, question, choice):
    """The choice's log-probability after the question, as the Python API computes it."""
    start = len(model.encode(question, raw=True))
    return sum(each.logprob for each in model.score(model.encode(question + choice, raw=True))[start - 1 :])


@pytest.mark.skipif(LM_EVAL is None, reason="the command lm_eval is not installed (or name it in $LM_EVAL)")
def test_lm_eval_finds_what_the_python_api_computes(tmp_path):
    assert LM_EVAL is not None
    folder = tiny_checkpoint(tmp_path / "model", "llama")
    with running(hierspec.load(folder)) as server:
        figures, samples = run(LM_EVAL, server, folder, tmp_path)
        scores = [[score(server.language_model, each["question"], c) for c in each["choices"]] for each in QUESTIONS]
    for sample, ours in zip(samples, scores, strict=True):
        assert [float(answer[0][0]) for answer in sample["resps"]] == ours
    right = [max(ours) == ours[question["answer"]] for ours, question in zip(scores, QUESTIONS, strict=True)]
    assert figures["acc,none"] == pytest.approx(sum(right) / len(right))


def run(lm_eval, server, folder, tmp_path):
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS), encoding="utf-8")
    (tmp_path / "three_questions.yaml").write_text(TASK.format(data=data), encoding="utf-8")
    arguments = {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(folder),
        "num_concurrent": "2",
    }
    given = ",".join(f"{name}={value}" for name, value in arguments.items())
    command = [lm_eval, "run", "--model", "local-completions", "--model_args", given, "--tasks", "three_questions"]
    command += ["--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), "--log_samples"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    ran = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    [results] = (tmp_path / "out").rglob("results_*.json")
    [logged] = (tmp_path / "out").rglob("samples_*.jsonl")
    samples = [json.loads(line) for line in logged.read_text(encoding="utf-8").splitlines()]
    figures = json.loads(results.read_text(encoding="utf-8"))["results"]["three_questions"]
    return figures, sorted(samples, key=lambda sample: sample["doc_id"])
