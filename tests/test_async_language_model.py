"""A model for programs with an event loop: many tasks at once, each text as alone, and every way to stop."""

import asyncio
import threading

import pytest

import hierspec
from hierspec import AsyncLanguageModel, HierspecError
from hierspec.testing.checkpoints import tiny_checkpoint

ENDLESS = {"max_tokens": 450, "logit_bias": {0: -1e9, 1: -1e9, 2: -1e9}}  # no id that ends a text
WAIT = 60.0  # seconds after which a test fails rather than hangs


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


class Ends:
    """An observer that keeps how jobs ended, in order, and lets a task wait for the next one."""

    def __init__(self):
        self.loop, self.results = asyncio.get_running_loop(), asyncio.Queue()

    def on_submit(self, job): ...

    def on_first(self, job): ...

    def on_step(self, job, step): ...

    def on_end(self, job, result):
        self.loop.call_soon_threadsafe(self.results.put_nowait, result)

    async def next(self):
        return await asyncio.wait_for(self.results.get(), WAIT)


def test_many_tasks_at_once_get_what_plain_writes_alone(loaded):
    options = [{"max_tokens": 5 + 5 * n, "temperature": 0.5 * (n % 3), "seed": n} for n in range(16)]
    plain = [loaded.generate(f"text {n}", plan="plain", **each) for n, each in enumerate(options)]

    async def main():
        async with AsyncLanguageModel(loaded) as model:
            calls = [model.generate(f"text {n}", **each) for n, each in enumerate(options)]
            return await asyncio.gather(*calls)

    assert [answer.tokens for answer in asyncio.run(main())] == [answer.tokens for answer in plain]


def test_a_stream_holds_the_answer_and_is_read_once(loaded):
    plain = loaded.generate("abc", plan="plain", max_tokens=20)

    async def main():
        async with AsyncLanguageModel(loaded) as model:
            stream = model.stream("abc", max_tokens=20)
            with pytest.raises(HierspecError, match="read the stream first"):
                _ = stream.generation
            text = "".join([step.text async for step in stream])
            with pytest.raises(HierspecError, match="read before"):
                [step async for step in stream]
            return text, stream.generation

    text, answer = asyncio.run(main())
    assert (text, answer.text, answer.tokens) == (plain.text, plain.text, plain.tokens)


def test_several_answers_to_one_prompt(loaded):
    expected = loaded.generate("abc", n=3, plan="plain", max_tokens=10, temperature=1.0, seed=5)

    async def main():
        async with AsyncLanguageModel(loaded) as model:
            return await model.generate_n("abc", 3, max_tokens=10, temperature=1.0, seed=5)

    assert [each.tokens for each in asyncio.run(main())] == [each.tokens for each in expected]


def test_every_way_to_stop_cancels_the_request(loaded):
    async def main():
        ends = Ends()
        async with AsyncLanguageModel(loaded, ends) as model:
            task = asyncio.create_task(model.generate("abc", **ENDLESS))
            while not model.worker.running:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            by_task = await ends.next()

            async for _ in model.stream("abd", **ENDLESS):
                break
            by_leaving = await ends.next()

            stream = model.stream("abe", **ENDLESS)
            async for _ in stream:
                stream.cancel()
            return by_task, by_leaving, await ends.next(), stream.generation

    results = asyncio.run(main())
    assert [result.ended for result in results] == ["cancelled"] * 4
    assert results[2] == results[3]


def test_a_failing_request_fails_alone(loaded):
    async def main():
        async with AsyncLanguageModel(loaded) as model:
            calls = [model.generate(prompt, raw=True, max_tokens=20) for prompt in ("abc", [10**6], "abd")]
            return await asyncio.gather(*calls, return_exceptions=True)

    good, bad, other = asyncio.run(main())
    assert isinstance(bad, HierspecError)
    assert good.tokens == loaded.generate("abc", raw=True, plan="plain", max_tokens=20).tokens
    assert other.tokens == loaded.generate("abd", raw=True, plan="plain", max_tokens=20).tokens


def test_closing_finishes_answers_and_refuses_new_ones(loaded):
    async def main():
        model = AsyncLanguageModel(loaded)
        task = asyncio.create_task(model.generate("abc", max_tokens=30))
        while not model.worker.running:
            await asyncio.sleep(0)
        await model.close()
        with pytest.raises(HierspecError, match="takes no more prompts"):
            await model.generate("abc")
        return await task

    assert asyncio.run(main()).tokens == loaded.generate("abc", plan="plain", max_tokens=30).tokens


def test_leaving_the_model_by_an_error_cancels_what_runs(loaded):
    async def main():
        async def fail():
            async with AsyncLanguageModel(loaded) as model:
                begun.append(asyncio.create_task(model.generate("abc", **ENDLESS)))
                while not model.worker.running:
                    await asyncio.sleep(0)
                raise ValueError("enough")

        begun = []
        with pytest.raises(ValueError, match="enough"):
            await fail()
        return await begun[0]

    assert asyncio.run(main()).ended == "cancelled"


def test_an_event_loop_that_died_does_not_hurt_others(loaded):
    model = AsyncLanguageModel(loaded)

    async def begin_and_vanish():
        stream = model.stream("abc", **ENDLESS)
        await anext(stream.__aiter__())
        asyncio.get_running_loop().stop()

    def die():
        loop = asyncio.new_event_loop()
        task = loop.create_task(begin_and_vanish())
        loop.run_forever()
        loop.close()
        del task  # nobody waits for it

    thread = threading.Thread(target=die)
    thread.start()
    thread.join(WAIT)
    expected = loaded.generate("abd", plan="plain", max_tokens=20).tokens

    async def other():
        answer = await model.generate("abd", max_tokens=20)
        await model.close()
        return answer.tokens

    assert asyncio.run(other()) == expected
    assert not model.worker.running


def test_other_threads_generate_meanwhile(loaded):
    expected = loaded.generate("other", plan="plain", max_tokens=20).tokens

    async def main():
        async with AsyncLanguageModel(loaded) as model:
            streamed = asyncio.create_task(model.generate("abc", max_tokens=100))
            beside = await asyncio.to_thread(loaded.generate, "other", max_tokens=20)
            return beside.tokens, (await streamed).tokens

    assert asyncio.run(main()) == (expected, loaded.generate("abc", plan="plain", max_tokens=100).tokens)
