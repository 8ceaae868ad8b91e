"""generate and its kin on tiny models: batches, several answers, streams, log-probabilities."""

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import hierspec
from hierspec import Chat, Failure, Generation, HierspecError, Plan, Proposal, Sampling, SomeFailed, TierPlan
from hierspec.core.errors import OutOfMemory
from hierspec.core.interfaces import Ask
from hierspec.core.stats import TierStats
from hierspec.generation import Piece
from hierspec.scorers.base import WholeHead
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.fakes import FakeStore
from hierspec.text.stream import StopStrings

PROMPTS = ["abab abab", "the dog ran", "abab abab abab", "12"]
EXITS = Plan(stores=("context",), merge=True, tiers=(TierPlan(exit_layer=3, gather=3, candidates=2),))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="module", params=["compiled", "torch"])
def model(request, folder):
    return hierspec.load(folder, backend=request.param, device="cpu")


@pytest.fixture(scope="module")
def compiled(folder):
    return hierspec.load(folder, backend="compiled", device="cpu")


# Log-probabilities


def expected_logprobs(model, answer, prompt):
    """From one pass over the whole text, with torch's own log-softmax. [tokens, vocabulary]"""
    request = model.request(prompt, "plain", Sampling(max_tokens=1))
    scorer, rest = model.scorer(model.config.layers), Proposal.chain(answer.tokens[:-1])
    with torch.inference_mode():
        logits = scorer.logits([Ask(scorer, request.prompt, rest, request, 1, False, TierStats(""))])
        rows = logits.double().log_softmax(dim=1)
    request.cancel()
    return rows.cpu()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_log_probabilities_are_the_models_own(model, temperature):
    sampling = Sampling(max_tokens=24, temperature=temperature, seed=5, repetition_penalty=1.2, top_k=9, logprobs=3)
    answer = model.generate(PROMPTS[0], plan=EXITS, sampling=sampling)
    assert len(answer.logprobs) == len(answer.tokens) == 24
    assert {*answer.sources} > {"target"}  # accepted drafts are among them
    for row, token, found in zip(
        expected_logprobs(model, answer, PROMPTS[0]), answer.tokens, answer.logprobs, strict=True
    ):
        assert found.token == token
        assert math.isclose(found.logprob, float(row[token]), abs_tol=1e-3)
        assert [number for number, _ in found.top] == row.topk(3).indices.tolist()
        assert all(math.isclose(value, float(row[number]), abs_tol=1e-3) for number, value in found.top)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_log_probabilities_have_the_same_bits_under_every_plan_and_in_every_batch(compiled, temperature):
    sampling = Sampling(max_tokens=30, temperature=temperature, seed=5, logprobs=2)
    alone = [compiled.generate(prompt, plan="plain", sampling=sampling).logprobs for prompt in PROMPTS]
    for plan in ("plain", "lookup", EXITS, Plan(tiers=(TierPlan(skip_layers=(1,), gather=4),))):
        compiled.forget()
        together = compiled.generate_many(PROMPTS, plan=plan, sampling=sampling)
        assert [answer.logprobs for answer in together] == alone
        stream = compiled.stream(PROMPTS[0], plan=plan, sampling=sampling)
        assert tuple(entry for step in stream for entry in step.logprobs) == alone[0]


def test_answers_keep_their_logits_when_a_head_writes_over_its_own(compiled):
    """A head's logits are good until its next call, and several calls may come before an answer is read."""

    class OneBuffer(WholeHead):
        def logits(self, asks, states):
            rows = super().logits(asks, states)
            buffer[: len(rows)] = rows
            return buffer[: len(rows)]

    buffer = torch.empty(4, compiled.config.vocabulary)
    scorer = replace(compiled.scorer(compiled.config.layers), head=OneBuffer(compiled.decoder))
    requests = [compiled.request(prompt, "plain", Sampling(max_tokens=1)) for prompt in PROMPTS[:2]]
    asks = [Ask(scorer, each.prompt, Proposal(), each, 1, False, TierStats(""), logits=True) for each in requests]
    [first], [second] = scorer.score(asks[:1]), scorer.score(asks[1:])
    assert not (first.logits == second.logits).any()
    assert (second.logits == buffer[:1].numpy()).all()
    for request in requests:
        request.cancel()


def test_log_probabilities_change_no_text_and_end_with_it(compiled):
    for plan in ("plain", EXITS):
        without = compiled.generate("abc", plan=plan, max_tokens=30)
        assert without.logprobs == ()
        assert compiled.generate("abc", plan=plan, max_tokens=30, logprobs=1).tokens == without.tokens
        stop = without.text[7:9]
        stopped = compiled.generate("abc", plan=plan, max_tokens=30, logprobs=0, stop=stop)
        assert [entry.token for entry in stopped.logprobs] == list(stopped.tokens)


# Several answers to one prompt


def test_several_answers_are_those_of_their_seeds_and_the_first_is_the_usual_one(compiled):
    answers = compiled.generate("abc", n=3, max_tokens=16, temperature=1.0, seed=11)
    assert answers[0].seed == 11
    assert len({answer.tokens for answer in answers}) == 3
    for answer in answers:
        again = compiled.generate("abc", max_tokens=16, temperature=1.0, seed=answer.seed)
        assert again.tokens == answer.tokens
    assert compiled.generate("abc", n=1, max_tokens=4, seed=1)[0].seed == 1
    with pytest.raises(HierspecError, match="n must be"):
        compiled.generate("abc", n=0)


@pytest.mark.parametrize("plan", ["plain", EXITS])
def test_a_prompt_is_computed_once_for_all_its_answers(model, plan):
    prompt = [5, 6, 7, 8] * 60

    def rows(**options) -> float:
        model.forget()
        before = model.decoder.layer_rows
        model.generate(prompt, plan=plan, max_tokens=1, temperature=1.0, seed=0, **options)
        return (model.decoder.layer_rows - before) / model.config.layers

    once = rows()
    assert once >= len(prompt)
    assert rows(n=4) < once + 20


# Batches


def test_a_batch_has_one_plan_sampling_and_namespace_for_all_or_for_each(compiled):
    samplings = [Sampling(max_tokens=4 + 3 * number, temperature=1.0, seed=number) for number in range(4)]
    plans = ["plain", "lookup", EXITS, "plain"]
    answers = compiled.generate_many(PROMPTS, plan=plans, sampling=samplings, namespace=["a", "b", "a", "c"])
    for prompt, sampling, answer in zip(PROMPTS, samplings, answers, strict=True):
        assert answer.tokens == compiled.generate(prompt, plan="plain", sampling=sampling).tokens
    changed = compiled.generate_many(PROMPTS, sampling=samplings, max_tokens=2)
    assert [len(answer.tokens) for answer in changed] == [2] * 4
    assert compiled.generate_many([]) == []
    assert len(compiled.generate_many((prompt for prompt in PROMPTS), max_tokens=1)) == 4


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda m: m.generate_many("abc"), "given as a list; for a single one call generate"),
        (lambda m: m.generate_many({"input_ids": [1]}), "given as a list"),
        (lambda m: m.generate_many(None), "given as a list"),
        (lambda m: m.stream_many("abc"), "given as a list"),
        (lambda m: m.generate_many(["a"], errors="ignore"), 'errors must be "raise" or "return"'),
        (lambda m: m.generate_many(["a", "b"], plan=["plain"]), "plan must be one for all prompts or one for each"),
        (lambda m: m.generate_many(["a"], sampling="greedy"), "sampling must be a Sampling"),
        (lambda m: m.generate(["a", "b"]), "call generate_many"),
        (lambda m: m.generate("x", plan=None), "plan must be a Plan, the name of one, or a TOML file"),
        (lambda m: m.generate("x", plan="p" * 300), "There is no plan or plan file"),
        (lambda m: m.generate("x", plan="p\0"), "There is no plan or plan file"),
        (lambda m: m.generate("x", namespace=None), "namespace must be a text"),
        (lambda m: Chat(m).ask(None), "What a user says is a text"),
        (lambda m: m.generate([2**70]), "outside the model's vocabulary"),
        (lambda m: m.generate([-1]), "outside the model's vocabulary"),
        (lambda m: m.generate("x", enable_thinkin=True), "did you mean 'enable_thinking'"),
    ],
)
def test_wrong_calls_are_told(compiled, call, told):
    with pytest.raises(HierspecError, match=told) as error:
        call(compiled)
    assert not isinstance(error.value, SomeFailed)


def breaking(prompt_length: int) -> FakeStore:
    """A store that is broken for one request: its drafts are no tokens after so many have been written."""

    def draft(context, budget):
        return Proposal.chain([9_999 if len(context) > prompt_length + 4 and context[0] == 77 else 5])

    return FakeStore("breaking", draft)


def test_what_finished_is_kept_beside_what_failed(compiled):
    compiled.add_store(breaking(3))
    prompts = [[5, 6, 7], [77, 6, 7], None, [8, 9, 10], [1] * 600]
    plan = Plan(stores=("breaking",))
    results = compiled.generate_many(prompts, plan=plan, max_tokens=12, errors="return")
    assert [type(result) for result in results] == [Generation, Failure, Failure, Generation, Failure]
    for index in (0, 3):
        assert results[index].tokens == compiled.generate(prompts[index], plan="plain", max_tokens=12).tokens
    assert "'breaking' drafted a token id outside" in str(results[1].error)
    assert 4 <= len(results[1].partial.tokens) < 12  # what it had written before
    whole = compiled.generate(prompts[1], plan="plain", max_tokens=12).tokens
    assert results[1].partial.tokens == whole[: len(results[1].partial.tokens)]
    assert results[2].partial is None
    assert "not None" in repr(results[2])
    with pytest.raises(
        SomeFailed, match=r"3 of 5 answers failed, the first of them number 1: The store 'breaking'"
    ) as raised:
        compiled.generate_many(prompts, plan=plan, max_tokens=12)
    assert [type(result) for result in raised.value.results] == [type(result) for result in results]
    assert raised.value.results[3].tokens == results[3].tokens
    with pytest.raises(HierspecError, match="'breaking' drafted") as single:
        compiled.generate(prompts[1], plan=plan, max_tokens=12)
    assert not isinstance(single.value, SomeFailed)


def test_answers_to_one_prompt_are_kept_beside_one_that_failed(compiled):
    class BreaksForTheSecond(FakeStore):
        def begin(self, prompt, namespace=""):
            self.begun.append(FakeStore(self.name, lambda context, budget: Proposal.chain([tokens[0]])))
            tokens = [9_999 if len(self.begun) == 2 else 5]
            return self.begun[-1]

    compiled.add_store(BreaksForTheSecond("second", lambda context, budget: Proposal()))
    with pytest.raises(SomeFailed) as raised:
        compiled.generate("abc", n=3, plan=Plan(stores=("second",)), temperature=1.0, seed=4, max_tokens=6)
    expected = compiled.generate("abc", n=3, plan="plain", temperature=1.0, seed=4, max_tokens=6)
    assert isinstance(raised.value.results[1], Failure)
    assert [raised.value.results[index].tokens for index in (0, 2)] == [expected[0].tokens, expected[2].tokens]


def test_want_of_memory_for_a_text_fails_that_answer_alone_in_one_sentence(compiled, monkeypatch):
    add, prompts = StopStrings.add, ["abab abab", "the dog ran"]

    def refused(stops, text):
        if stops._stops:
            raise MemoryError
        return add(stops, text)

    alone = compiled.generate(prompts[1], plan="plain", max_tokens=9)
    monkeypatch.setattr(StopStrings, "add", refused)
    samplings = [Sampling(max_tokens=9, stop=("broken",)), Sampling(max_tokens=9)]
    failure, other = compiled.generate_many(prompts, plan="lookup", sampling=samplings, errors="return")
    assert str(failure.error).startswith("There is not enough memory left for this request;")
    assert other.tokens == alone.tokens
    with pytest.raises(OutOfMemory, match="There is not enough memory left"):
        list(compiled.stream(prompts[0], sampling=samplings[0]))


# Streams of several


def test_streams_of_several_hand_out_every_text_as_passes_finish(compiled):
    stream = compiled.stream_many([*PROMPTS, None], max_tokens=12, plan="lookup")
    texts, order = [""] * 5, []
    for index, step in stream:
        texts[index] += step.text
        order.append(index)
    expected = compiled.generate_many(PROMPTS, max_tokens=12, plan="plain")
    assert texts == [*(answer.text for answer in expected), ""]
    assert sorted(order) != order  # interleaved, not one after the other
    assert [type(result) for result in stream.results] == [Generation] * 4 + [Failure]
    assert list(stream) == []


def test_leaving_a_stream_of_several_cancels_what_still_runs(model):
    stream = model.stream_many(PROMPTS, sampling=[Sampling(max_tokens=1), *[Sampling(max_tokens=50)] * 3])
    stream.cancel(2)
    for number, _ in enumerate(stream):
        if number == 5:
            break
    assert [result.ended for result in stream.results] == ["length", "cancelled", "cancelled", "cancelled"]
    assert stream.results[2].tokens == ()
    assert "ended by cancelled" in repr(stream)


# What people see


def test_reprs_are_short_and_say_what_matters(model):
    stream = model.stream("abc", max_tokens=60)
    assert "running" in repr(stream)
    for _ in stream:
        pass
    chat = Chat(model)
    assert repr(chat) == "Chat('tiny', 0 messages)"
    assert repr(model).startswith("LanguageModel('tiny', 4 layers, ")
    assert "ended by length" in repr(stream)
    assert "60 tokens, ended by length" in repr(stream.generation)
    assert all(len(repr(each)) < 130 for each in (model, stream, stream.generation, chat, EXITS))
    assert eval(repr(EXITS)) == EXITS
    assert repr(Plan()) == "Plan()"


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.text, self.tags = "", []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_a_notebook_shows_the_text_coloured_by_source_and_nothing_runs(compiled):
    answer = compiled.generate("abc", max_tokens=4, plan="plain")
    pieces = (Piece("<script>alert(1)</script>\n", "target"), Piece(" & more", 'a "store"<b>'), Piece("!", "other"))
    shown = replace(answer, pieces=pieces, sources=("target", "target", 'a "store"<b>', "other"))._repr_html_()
    reader = Reader()
    reader.feed(shown)
    assert reader.text.startswith("<script>alert(1)</script>\n & more!drafted by: ")
    assert reader.text.endswith('target 50%, a "store"<b> 25%, other 25%')
    assert {tag for tag, _ in reader.tags} == {"div", "span"}
    colours = {attributes["style"] for tag, attributes in reader.tags if tag == "span" and "style" in attributes}
    assert len(colours) == 2  # the target's own text has none
    assert "color:" not in shown.replace("background", "")  # text keeps the page's own colour, light or dark


# Progress


def test_progress_is_a_bar_in_a_terminal_and_lines_elsewhere(folder, capsys, monkeypatch):
    hierspec.load(folder, backend="torch", device="cpu", progress=True)
    said = capsys.readouterr().err
    assert "Loading weights …\n" in said
    assert "\r" not in said
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    hierspec.load(folder, backend="torch", device="cpu", progress=True)
    bar = capsys.readouterr().err
    assert f"Loading weights [{'#' * 30}] 100%" in bar
    assert bar.endswith("\r")  # the line is left empty
    hierspec.load(folder, backend="torch", device="cpu", progress=False)
    calls = []
    hierspec.load(folder, backend="torch", device="cpu", progress=lambda *call: calls.append(call))
    assert calls
    assert capsys.readouterr().err == ""
