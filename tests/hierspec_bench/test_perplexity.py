"""`bench perplexity`: the arithmetic on models that are known exactly, the command on tiny ones."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import hierspec
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.core.sampling import NO_TOKEN
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeScorer
from hierspec_bench.perplexity import Measured, Scores, Window, compare, figures, measure, score_text, windows
from hierspec_bench.readme import with_results

TEXT = "It was on a dreary night of November that I beheld the accomplishment of my toils.\r\n" * 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of sizes that every format of the compiled backend can have."""
    sizes = {"heads": 4, "hidden": 128, "intermediate": 192}
    return tiny_checkpoint(tmp_path_factory.mktemp("perplexity") / "tiny", "llama", seed=2, **sizes)


def random_ids(length, vocabulary=16):
    return np.random.default_rng(3).integers(0, vocabulary, length).tolist()


# Arithmetic


def test_the_perplexity_of_a_uniform_model_is_the_size_of_its_vocabulary():
    scorer = FakeScorer(vocabulary=16, logits=lambda text: np.zeros(16))
    scores = score_text(scorer, random_ids(300), list(windows(300, 1000, 64)))
    of_itself = figures(scores, scores)
    assert of_itself["perplexity"] == 16
    assert of_itself["perplexity_interval"] == [16, 16]
    assert (of_itself["ratio"], of_itself["same_best"]) == (1, 1)


def test_a_known_distribution_has_the_perplexity_that_it_should_have():
    probabilities = np.array([0.5, 0.25, 0.125, 0.125])
    scorer = FakeScorer(vocabulary=4, logits=lambda text: np.log(probabilities) + 7)  # logits have any offset
    ids = [0, 0, 0, 0, *(0, 1, 2, 3)]
    scores = score_text(scorer, ids, [Window(0, 4, 8)])
    assert scores.losses == pytest.approx(-np.log(probabilities))
    assert figures(scores, scores)["perplexity"] == pytest.approx(2 ** ((1 + 2 + 3 + 3) / 4), abs=1e-4)
    assert scores.best.tolist() == [0, 0, 0, 0]


def test_every_token_is_scored_after_the_tokens_of_its_window():
    seen: list[tuple[int, ...]] = []

    def logits(text):
        seen.append(tuple(text.tolist()))
        return np.arange(16.0) * (text[0] + len(text) % 3)

    ids, opening = random_ids(400), [5]
    scores = score_text(FakeScorer(vocabulary=16, logits=logits), ids, parts := list(windows(400, 333, 300)), opening)
    expected = []
    for part in parts:
        for position in range(part.first, part.end):
            before = (*opening, *ids[part.start : position])
            assert before in seen
            row = logits(np.array(before))
            expected.append(math.log(np.exp(row - row.max()).sum()) + row.max() - row[ids[position]])
    assert scores.losses == pytest.approx(np.array(expected))
    assert len(expected) == 250  # half a window is never scored


@pytest.mark.parametrize(
    ("length", "tokens", "window"), [(1000, 10_000, 64), (1000, 300, 64), (64, 1, 64), (77, 50, 9)]
)
def test_windows_score_every_token_once_with_half_a_window_before_it(length, tokens, window):
    parts = list(windows(length, tokens, window))
    scored = [position for part in parts for position in range(part.first, part.end)]
    begin = window - window // 2
    assert scored == list(range(begin, min(length, begin + tokens)))
    assert all(part.first - part.start == begin and part.end - part.start <= window for part in parts)


def test_formats_are_compared_on_the_same_tokens():
    rng = np.random.default_rng(0)
    losses, best = rng.exponential(3, 6400), rng.integers(0, 50, 6400)
    other = best.copy()
    other[:640] += 1
    told = figures(Scores(losses + 0.01, other), Scores(losses, best))
    assert told["ratio"] == pytest.approx(math.exp(0.01), abs=1e-4)
    assert told["ratio_interval"] == [told["ratio"]] * 2  # the same difference everywhere
    assert told["same_best"] == 0.9
    low, high = told["same_best_interval"]
    assert 0.8 < low < 0.9 < high < 1
    low, high = told["perplexity_interval"]
    assert low < told["perplexity"] < high


def test_logits_that_are_not_numbers_are_an_error_with_their_position():
    scorer = FakeScorer(vocabulary=16, logits=lambda text: np.zeros(16))

    class Broken(FakeScorer):
        def _answer(self, ask):
            answer = scorer._answer(ask)
            if len(ask.context) == 32 and ask.request.prompt[0] == 1:  # the second window
                answer.picks[7] = NO_TOKEN
            return answer

    broken = Broken(vocabulary=16)
    with pytest.raises(HierspecError, match="not numbers at token 71 of the text"):
        score_text(broken, [0] * 32 + [1] * 100, list(windows(132, 100, 64)))
    assert len(broken.released) == 2


# Models


def test_losses_are_those_of_transformers(folder):
    model = hierspec.load(folder, weights="float32")
    measured = measure(model, TEXT, tokens=200, window=256)
    ids = model.tokenizer.encode(TEXT)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    losses, best = [], []
    for part in windows(len(ids), 200, 256):
        text = torch.tensor([ids[part.start : part.end]])
        with torch.inference_mode():
            logits = theirs(text).logits[0, part.first - part.start - 1 : -1].double()
        losses += torch.nn.functional.cross_entropy(
            logits, text[0, part.first - part.start :], reduction="none"
        ).tolist()
        best += logits.argmax(-1).tolist()
    assert len(losses) == 200
    assert measured.scores.losses == pytest.approx(np.array(losses), abs=1e-3)
    assert np.mean(measured.scores.best == np.array(best)) > 0.98


def test_a_beginning_of_text_token_stands_before_every_window(folder, monkeypatch):
    model = hierspec.load(folder, weights="float32")
    plain = measure(model, TEXT, tokens=64, window=64)
    encode = model.tokenizer.encode
    bos = [model.tokenizer.bos_id]
    monkeypatch.setattr(
        model.tokenizer, "encode", lambda text, begin=True: (bos if begin else []) + encode(text, begin=False)
    )
    begun = measure(model, TEXT, tokens=64, window=64)
    assert begun.text_tokens == plain.text_tokens
    assert len(begun.scores.losses) == 64
    ids = [*bos, *encode(TEXT)[:63]]
    expected = score_text(model.scorer(model.config.layers), ids, [Window(0, 33, 64)])
    assert (begun.scores.losses[:31] == expected.losses).all()


def test_the_first_format_is_the_reference_where_float32_is_left_out():
    about = {"products": "", "backend": "compiled", "weight_megabytes": 1.0}
    scores = Scores(np.ones(100), np.zeros(100))
    formats = [Measured(name, about, 500, 64, scores) for name in ("int8", "int4")]
    assert compare(formats)["reference"] == "int8"
    assert compare([*formats, Measured("float32", about, 500, 64, scores)])["reference"] == "float32"


def test_the_usual_window_fits_the_model_and_a_larger_one_is_refused(folder):
    model = hierspec.load(folder, device="cpu")
    context = model.config.context
    assert context < 1024
    assert measure(model, TEXT, tokens=64).window == context
    with pytest.raises(HierspecError, match=f"A window of {context + 1:,} tokens is more than the model's context"):
        measure(model, TEXT, tokens=64, window=context + 1)


# The command


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8", newline="")
    return str(path)


def test_the_command_measures_all_formats_that_run_here(folder, text, tmp_path, capsys):
    output = tmp_path / "perplexity.json"
    command = ["bench", "perplexity", str(folder), "--text", text, "--tokens", "100", "--window", "64"]
    assert main([*command, "--output", str(output)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(output.read_text())
    assert [item["weights"] for item in document["formats"]] == ["float32", "bfloat16", "int8", "int4"]
    assert [item["backend"] for item in document["formats"]] == ["compiled"] * 4
    assert (document["tokens"], document["window"], document["reference"]) == (100, 64, "float32")
    assert (document["text"], document["model"]) == ("book.txt", "tiny")
    assert document["text_tokens"] == len(TEXT.replace("\r\n", "\n"))
    assert "command" in document
    by_weights = {item["weights"]: item for item in document["formats"]}
    assert by_weights["float32"]["same_best"] == 1
    assert 1 > by_weights["int8"]["same_best"] > by_weights["int4"]["same_best"] > 0.2
    page = with_results("<!-- results: perplexity.json -->\n<!-- end of results -->\n", tmp_path)
    assert f"| `int8` | {by_weights['int8']['weight_megabytes']:.0f} | {by_weights['int8']['perplexity']:.2f} (" in page
    output.write_text('{"formats": [{}], "tokens": 1, "window": 1}')
    with pytest.raises(HierspecError, match="hierspec bench perplexity --output FILE wrote"):
        with_results("<!-- results: perplexity.json -->\n<!-- end of results -->\n", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--weights float32,int5", "There are no weights 'int5'; give some of float32, bfloat16, int8, int4, file."),
        ("--weights int8,int8", "--weights names one twice: 'int8,int8'; give some of"),
        ("--weights ,", "--weights names none: ','; give some of"),
        ("--weights float32,file", "--weights file cannot be measured here: MODEL is no GGUF file; leave it out."),
        (
            "--weights int8 --backend torch",
            "--weights int8 cannot be measured here: it needs the compiled backend (the torch backend was asked for); ",
        ),
        (
            "--weights float16 --backend compiled",
            "--weights float16 cannot be measured here: it needs the compiled backend (its weights must be float32 or ",
        ),
        ("--tokens 0", "--tokens must be at least 1, not 0."),
        ("--window 3", "--window must be at least 4, not 3."),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(
    arguments, sentence, folder, text, capsys, monkeypatch
):
    monkeypatch.setattr("hierspec.language_model.load", None)
    assert main(["bench", "perplexity", str(folder), "--text", text, *arguments.split()]) == 2
    assert f"hierspec: {sentence.replace('MODEL', str(folder))}" in capsys.readouterr().err


def test_formats_that_a_model_cannot_have_are_refused_by_name_and_else_left_out(tmp_path, text, capsys):
    folder = str(tiny_checkpoint(tmp_path / "odd", "llama"))  # 96 is no multiple of the groups of 8-bit weights
    command = ["bench", "perplexity", folder, "--text", text, "--tokens", "8", "--window", "16"]
    assert main([*command, "--weights", "float32,int8"]) == 2
    assert "it needs the compiled backend (its sizes are not multiples of 64); leave it out." in capsys.readouterr().err
    assert main(command) == 0
    assert [item["weights"] for item in json.loads(capsys.readouterr().out)["formats"]] == ["float32", "bfloat16"]


def test_a_text_that_is_too_short_missing_or_no_text_is_one_sentence(folder, tmp_path, capsys):
    path = tmp_path / "short.txt"
    command = ["bench", "perplexity", str(folder), "--weights", "float32", "--text", str(path)]
    assert main(command) == 2
    assert "there is no such file" in capsys.readouterr().err
    path.write_text("Call me Ishmael.")
    assert main(command) == 2
    assert "The text has 16 tokens, fewer than a window of 512: give a longer text" in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe\x00")
    assert main(command) == 2
    assert "it is not UTF-8 text; give a file of plain text." in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(command[:-2])
    assert "--text is missing" in capsys.readouterr().err
