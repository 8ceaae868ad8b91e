"""Chat completions through OpenAI's own client, compared with the Python API."""

import asyncio
import json
from itertools import accumulate

import httpx
import openai
import pytest

from hierspec.core.sampling import Sampling
from hierspec.options import several_samplings

MESSAGES = [{"role": "user", "content": "Why is the sky blue? The sky is blue, the sky is blue"}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_an_answer_is_that_of_the_python_api(server, client):
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=24, temperature=0.8, seed=7)
    alone = server.language_model.generate(MESSAGES, max_tokens=24, temperature=0.8, seed=7, plan="plain")
    assert reply.choices[0].message.content == alone.text
    assert reply.choices[0].finish_reason == alone.ended
    assert reply.usage.prompt_tokens == alone.prompt_tokens
    assert reply.usage.completion_tokens == len(alone.tokens)


def test_a_stream_is_the_same_text_in_pieces(server, client):
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=24, seed=3, stream=True, stream_options={"include_usage": True}
        )
    )
    alone = server.language_model.generate(MESSAGES, max_tokens=24, temperature=1.0, seed=3, plan="plain")
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == alone.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == alone.ended
    assert chunks[-1].usage.completion_tokens == len(alone.tokens)


def test_many_clients_at_once_get_what_each_would_get_alone(server):
    """Seeds, temperatures, plans, penalties and lengths mixed, half of them streamed."""
    calls = [
        {
            "messages": [{"role": "user", "content": f"Count to {number}. " * (1 + number % 3)}],
            "max_tokens": 10 + number,
            "temperature": (0, 0.7, 1.0, 1.5)[number % 4],
            "seed": number,
            "frequency_penalty": 0.5 * (number % 2),
            "logit_bias": {"40": 2} if number % 3 else {},
        }
        for number in range(12)
    ]

    async def ask(client, number, call):
        extra = {"plan": ("auto", "lookup", "plain")[number % 3]}
        reply = await client.chat.completions.create(model="tiny", **call, extra_body=extra, stream=bool(number % 2))
        if not number % 2:
            return reply.choices[0].message.content
        return "".join([chunk.choices[0].delta.content or "" async for chunk in reply])

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*[ask(client, number, call) for number, call in enumerate(calls)])

    served = asyncio.run(ask_all())
    for text, call in zip(served, calls, strict=True):
        bias = {int(token): value for token, value in call.pop("logit_bias").items()}
        alone = server.language_model.generate(call.pop("messages"), plan="plain", **call, logit_bias=bias or None)
        assert text == alone.text


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_have_seeds_of_their_own(server, client, stream):
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8, n=3, seed=1, stream=stream)
    texts = ["", "", ""]
    if stream:
        for chunk in reply:
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    else:
        texts = [choice.message.content for choice in reply.choices]
    samplings = several_samplings(Sampling(max_tokens=8, temperature=1.0, seed=1), 3)
    model = server.language_model
    assert texts == [model.generate(MESSAGES, sampling=each, plan="plain").text for each in samplings]


@pytest.mark.parametrize("plan", ["plain", "lookup", "auto"])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_the_models_own_for_accepted_drafts_too(server, client, plan, stream):
    options = {"max_tokens": 60, "temperature": 0, "extra_body": {"plan": plan}}
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, **options, logprobs=True, top_logprobs=2, stream=stream
    )
    if stream:
        content = [each for chunk in reply if chunk.choices[0].logprobs for each in chunk.choices[0].logprobs.content]
    else:
        content = reply.choices[0].logprobs.content
    alone = server.language_model.generate(MESSAGES, max_tokens=60, logprobs=2, plan="plain")
    assert [each.logprob for each in content] == [each.logprob for each in alone.logprobs]
    assert [[top.logprob for top in each.top_logprobs] for each in content] == [
        [logprob for _, logprob in each.top] for each in alone.logprobs
    ]
    pieces = [server.language_model.tokenizer.piece(token, special=True) for token in alone.tokens]
    assert [bytes(each.bytes) for each in content] == pieces


def test_a_stop_string_ends_it(server, client):
    alone = server.language_model.generate(MESSAGES, max_tokens=40, plan="plain").text
    stop = alone[5:7]
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=40, temperature=0, stop=[stop])
    assert reply.choices[0].message.content == alone[: alone.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_max_completion_tokens_counts_and_the_context_ends_an_answer(server, client):
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=3, temperature=0)
    assert reply.usage.completion_tokens <= 3
    reply = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, logit_bias={"2": -100})
    assert reply.usage.total_tokens <= server.language_model.config.context


def test_parts_of_text_and_newer_roles_reach_the_template(server, client):
    parts = [{"type": "text", "text": "Why is"}, {"type": "text", "text": "the sky blue?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    reply = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is\nthe sky blue?"}]
    assert reply.choices[0].message.content == server.language_model.generate(plain, max_tokens=8, plan="plain").text


def test_images_are_refused(client):
    parts = [{"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}]
    with pytest.raises(openai.BadRequestError, match="Only parts of text"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": parts}])


def test_the_last_message_can_be_continued(server, client):
    messages = [*MESSAGES, {"role": "assistant", "content": "Because"}]
    reply = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body={"continue_final_message": True}
    )
    alone = server.language_model.generate(messages, max_tokens=8, plan="plain", continue_final_message=True)
    assert reply.choices[0].message.content == alone.text


def test_timings_count_drafts_as_the_request_did(server, client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    reply = client.chat.completions.create(**options, extra_body={"plan": "lookup", "timings": True})
    timings = reply.model_extra["timings"]
    assert timings["predicted_n"] == reply.usage.completion_tokens
    assert timings["prompt_n"] == reply.usage.prompt_tokens
    assert 0 < timings["draft_n_accepted"] <= timings["draft_n"]
    assert timings["predicted_per_second"] > 0
    plain = client.chat.completions.create(**options, extra_body={"plan": "plain", "timings": True})
    assert plain.model_extra["timings"]["draft_n"] == 0


def test_timings_and_token_ids_come_with_every_chunk_where_asked_for(server, client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 0}
    extra = {"plan": "lookup", "timings_per_token": True, "return_token_ids": True}
    alone = server.language_model.generate(MESSAGES, max_tokens=60, plan="plain")
    whole = client.chat.completions.create(**options, extra_body=extra)
    assert whole.choices[0].model_extra["token_ids"] == list(alone.tokens)
    assert whole.model_extra["prompt_token_ids"] == server.language_model.encode(MESSAGES)
    assert whole.model_extra["timings"]["predicted_n"] == len(alone.tokens)
    chunks = list(client.chat.completions.create(**options, stream=True, extra_body=extra))
    written = [chunk for chunk in chunks if "token_ids" in chunk.choices[0].model_extra]
    ids = [chunk.choices[0].model_extra["token_ids"] for chunk in written]
    assert [token for some in ids for token in some] == list(alone.tokens)
    assert len(ids) > 2
    assert [chunk.model_extra["timings"]["predicted_n"] for chunk in written] == list(accumulate(map(len, ids)))
    for unasked in client.chat.completions.create(**options, stream=True):
        assert "timings" not in unasked.model_extra
        assert "token_ids" not in unasked.choices[0].model_extra


def test_tokens_of_a_prompt_that_were_computed_before_are_counted(server, client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    server.language_model.forget()
    first, again = [client.chat.completions.create(**options, extra_body={"plan": "plain"}) for _ in range(2)]
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert first.usage.prompt_tokens - 1 <= again.usage.prompt_tokens_details.cached_tokens <= again.usage.prompt_tokens
    assert again.choices[0].message.content == first.choices[0].message.content
    longer = [{"role": "user", "content": MESSAGES[0]["content"] + " and other things"}]
    partly = client.chat.completions.create(**{**options, "messages": longer}, extra_body={"plan": "plain"}).usage
    assert 0 < partly.prompt_tokens_details.cached_tokens < first.usage.prompt_tokens


def test_details_of_every_pass_add_up_to_the_text(client):
    options = {"model": "tiny", "messages": MESSAGES, "max_tokens": 60, "temperature": 0, "stream": True}
    chunks = list(client.chat.completions.create(**options, extra_body={"plan": "lookup", "details": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    passes = [chunk.model_extra["hierspec"] for chunk in chunks if "hierspec" in chunk.model_extra]
    assert "".join(piece["text"] for each in passes for piece in each["pieces"]) == text
    assert any(piece["depth"] for each in passes for piece in each["pieces"])


def test_events_are_those_of_the_protocol(server):
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body) as reply:
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = [line for line in reply.iter_lines() if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event[6:])["object"] == "chat.completion.chunk" for event in events[:-1])


def test_a_wrong_model_name_is_a_404(client):
    with pytest.raises(openai.NotFoundError, match="There is no model of that name"):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_models_are_listed_and_found(server, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
