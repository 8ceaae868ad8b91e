"""The default model behind a server: many clients at once, each gets what plain decoding writes alone."""

import asyncio

import openai
import pytest
from serving import running

from hierspec.serve.settings import Settings

pytestmark = pytest.mark.model

CALLS = [
    ("Write a haiku about rivers.", {"temperature": 0.0, "seed": 1}),
    ("Repeat after me: one two three one two three one two three.", {"temperature": 0.0, "seed": 2}),
    ("Name three colours.", {"temperature": 0.8, "seed": 3}),
    ("def add(a, b):", {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.5}),
]


def test_clients_at_once_get_plain_decodings_text_and_log_probabilities(default_model):
    async def ask(client, prompt, options):
        reply = await client.chat.completions.create(
            model="default", messages=[{"role": "user", "content": prompt}], max_tokens=24, logprobs=True, **options
        )
        return reply.choices[0]

    async def ask_all(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*[ask(client, prompt, options) for prompt, options in CALLS])

    with running(default_model, Settings(model_name="default")) as server:
        served = asyncio.run(ask_all(server.url))
    for choice, (prompt, options) in zip(served, CALLS, strict=True):
        alone = default_model.generate(prompt, max_tokens=24, plan="plain", logprobs=0, **options)
        assert choice.message.content == alone.text
        assert [each.logprob for each in choice.logprobs.content] == [each.logprob for each in alone.logprobs]
