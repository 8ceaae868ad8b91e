"""Text completions through OpenAI's own client, compared with the Python API."""

import math

import openai
import pytest

from hierspec.core.sampling import Sampling
from hierspec.options import several_samplings

PROMPT = "The sky is blue, the sky is blue, the sky"


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_raw_prompt_is_continued_as_by_the_python_api(server, client):
    reply = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
    alone = server.language_model.generate(PROMPT, raw=True, max_tokens=20, plan="plain")
    assert reply.choices[0].text == alone.text
    assert reply.usage.prompt_tokens == alone.prompt_tokens


def test_sixteen_tokens_where_nothing_is_said(client):
    assert client.completions.create(model="tiny", prompt=PROMPT, temperature=0).usage.completion_tokens <= 16


def test_several_prompts_and_answers_come_in_order(server, client):
    prompts = [PROMPT, "Something else"]
    reply = client.completions.create(model="tiny", prompt=prompts, n=2, seed=5, max_tokens=8)
    samplings = several_samplings(Sampling(max_tokens=8, temperature=1.0, seed=5), 2)
    model = server.language_model
    alone = [
        model.generate(prompt, raw=True, sampling=each, plan="plain").text for prompt in prompts for each in samplings
    ]
    assert [choice.text for choice in reply.choices] == alone
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]


def test_token_ids_are_prompts_too(server, client):
    ids = server.language_model.encode(PROMPT, raw=True)
    as_text = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=8, seed=1)
    as_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=8, seed=1)
    as_several = client.completions.create(model="tiny", prompt=[ids, ids], max_tokens=8, seed=1)
    assert as_ids.choices[0].text == as_text.choices[0].text
    assert [choice.text for choice in as_several.choices] == [as_text.choices[0].text] * 2


@pytest.mark.parametrize("plan", ["plain", "auto", "lookup"])
def test_echo_gives_log_probabilities_of_the_prompt_that_writing_it_would_have_given(server, client, plan):
    """A text that the model wrote, given back as a prompt: each token has the bits it had when it was written."""
    model = server.language_model
    written = model.generate(PROMPT, raw=True, max_tokens=150, logprobs=3, plan="plain", stop_ids=())
    ids = [*model.encode(PROMPT, raw=True), *written.tokens]
    reply = client.completions.create(
        model="tiny", prompt=ids, max_tokens=1, echo=True, logprobs=3, temperature=0, extra_body={"plan": plan}
    )
    logprobs = reply.choices[0].logprobs
    assert len(logprobs.tokens) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None
    begin = len(ids) - len(written.tokens)
    assert logprobs.token_logprobs[begin:-1] == [each.logprob for each in written.logprobs]
    assert all(len(top) in (3, 4) for top in logprobs.top_logprobs[1:])
    assert reply.choices[0].text.startswith(PROMPT)


def test_max_tokens_0_with_echo_only_scores(client):
    reply = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1)
    assert reply.choices[0].text == PROMPT
    assert reply.usage.completion_tokens == 0
    assert len(reply.choices[0].logprobs.tokens) == reply.usage.prompt_tokens
    assert reply.choices[0].logprobs.text_offset == list(range(len(PROMPT)))  # a token is a byte
    assert all(math.isfinite(each) for each in reply.choices[0].logprobs.token_logprobs[1:])


def test_a_stream_says_the_same_as_a_whole_reply(client):
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 12, "seed": 2, "logprobs": 2, "echo": True}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [each for one in told for each in getattr(one, name)] == getattr(whole.choices[0].logprobs, name)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"suffix": "end"}, "leave suffix out"),
        ({"best_of": 4}, "best_of is not supported"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"prompt": []}, "There is no prompt"),
        ({"prompt": ""}, "The prompt is empty"),
        ({"prompt": [100_000]}, "outside the model's vocabulary"),
        ({"prompt": "x" * 600}, "has 600 tokens, more than the 511"),
        ({"n": 1000}, "at most 128 answers"),
        ({"logit_bias": {"999": 1}}, "logit_bias names a token id outside"),
    ],
)
def test_what_cannot_be_done_is_refused_with_a_sentence(client, options, sentence):
    with pytest.raises(openai.BadRequestError, match=sentence):
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, **options})
