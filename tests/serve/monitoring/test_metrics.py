"""What /metrics says is what happened: the sums of the counters of all answers, and nothing of their texts."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import hierspec
from hierspec import AsyncLanguageModel, Generation, Plan, TierPlan
from hierspec.core.errors import HierspecError
from hierspec.core.proposal import Proposal
from hierspec.core.stats import Stats, TierStats
from hierspec.serve.monitoring.metrics import Metrics, router
from hierspec.serve.monitoring.tier_counters import MOST_DEPTH, MOST_NAMES, OTHER, TierCounters
from hierspec.testing.checkpoints import tiny_checkpoint

NAME = "tiny"
DEEP = Plan(stores=("context",), merge=True, tiers=(TierPlan(exit_layer=3, gather=3), TierPlan(exit_layer=1, gather=2)))
PLANS = ["plain", "lookup", DEEP]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama"))


def samples(rendered: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """By the name of the sample and its labels, the model's name left out."""
    values = {}
    for family in text_string_to_metric_families(rendered.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith(("vllm:", "hierspec:")):
                assert labels.pop("model_name") == NAME, sample
            values[sample.name, frozenset(labels.items())] = sample.value
    return values


def value(values, name: str, **labels: str) -> float:
    return values[name, frozenset(labels.items())]


async def answers_of(model, metrics: Metrics, count: int = 9) -> list[Generation]:
    async with AsyncLanguageModel(model, observer=metrics) as shared:
        calls = [
            shared.generate("abcabc" * (1 + number % 3), plan=PLANS[number % 3], max_tokens=20, seed=number)
            for number in range(count)
        ]
        return list(await asyncio.gather(*calls))


def test_counters_are_the_sums_of_the_answers(model):
    metrics = Metrics(NAME, model)
    answers = asyncio.run(answers_of(model, metrics))
    values = samples(metrics.render())
    targets = [answer.stats.tiers[0] for answer in answers]
    assert value(values, "vllm:generation_tokens_total") == sum(len(answer.tokens) for answer in answers)
    assert value(values, "vllm:prompt_tokens_total") == sum(answer.prompt_tokens for answer in answers)
    assert value(values, "vllm:spec_decode_num_drafts_total") == sum(tier.drafts for tier in targets) > 0
    proposed = sum((tier.proposed for tier in targets), Counter[str]())
    assert value(values, "vllm:spec_decode_num_draft_tokens_total") == proposed.total() > 0
    accepted = sum((tier.accepted_at for tier in targets), Counter[int]())
    assert value(values, "vllm:spec_decode_num_accepted_tokens_total") == accepted.total() > 0
    for position, count in accepted.items():
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert value(values, name, position=str(position)) == count
    for reason, count in Counter(answer.ended for answer in answers).items():
        assert value(values, "vllm:request_success_total", finished_reason=reason) == count
    assert value(values, "vllm:request_generation_tokens_sum") == sum(len(answer.tokens) for answer in answers)
    assert value(values, "vllm:request_prompt_tokens_count") == len(answers)
    assert value(values, "vllm:time_to_first_token_seconds_count") == len(answers)
    assert value(values, "vllm:request_queue_time_seconds_count") == len(answers)
    assert value(values, "vllm:e2e_request_latency_seconds_count") == len(answers)
    steps = sum(tier.calls for tier in targets)
    assert value(values, "vllm:inter_token_latency_seconds_count") == steps - len(answers)


def test_every_tier_source_and_depth_is_counted(model):
    metrics = Metrics(NAME, model)
    answers = asyncio.run(answers_of(model, metrics))
    values = samples(metrics.render())
    tiers = [tier for answer in answers for tier in answer.stats.tiers]
    assert {tier.name for tier in tiers} == {"target", "exit 3", "exit 1"}
    for name in ("target", "exit 3", "exit 1"):
        of_it = [tier for tier in tiers if tier.name == name]
        assert value(values, "hierspec:tier_passes_total", tier=name) == sum(tier.calls for tier in of_it)
        assert value(values, "hierspec:tier_written_tokens_total", tier=name) == sum(tier.written for tier in of_it)
        seconds = value(values, "hierspec:tier_seconds_total", tier=name)
        assert seconds == pytest.approx(sum(tier.seconds for tier in of_it))
        for attribute, family in (("proposed", "drafted"), ("accepted", "accepted")):
            by_source = sum((getattr(tier, attribute) for tier in of_it), Counter[str]())
            by_depth = sum((getattr(tier, f"{attribute}_at") for tier in of_it), Counter[int]())
            for source, count in by_source.items():
                found = value(values, f"hierspec:tier_{family}_tokens_total", tier=name, source=source)
                assert found == count
            for depth, count in by_depth.items():
                found = value(values, f"hierspec:tier_{family}_tokens_by_depth_total", tier=name, depth=str(depth))
                assert found == count


def test_what_runs_is_seen_and_the_cache_is_empty_afterwards(model):
    metrics = Metrics(NAME, model)

    async def look() -> tuple[dict, dict]:
        async with AsyncLanguageModel(model, observer=metrics) as shared:
            stream = shared.stream("abc abc", plan="lookup", max_tokens=200, seed=1)
            async for _ in stream:
                during = samples(await asyncio.to_thread(metrics.render))
                break
            stream.cancel()
        return during, samples(metrics.render())

    during, after = asyncio.run(look())
    assert value(during, "vllm:num_requests_running") == 1
    assert 0 < value(during, "vllm:kv_cache_usage_perc") <= 1
    assert value(during, "vllm:spec_decode_num_draft_tokens_total") <= value(
        after, "vllm:spec_decode_num_draft_tokens_total"
    )
    assert value(after, "vllm:num_requests_running") == value(after, "vllm:num_requests_waiting") == 0
    assert value(after, "vllm:kv_cache_usage_perc") == 0
    assert value(after, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(after, "hierspec:memory_bytes", kind="weights") == model.memory()["weights"]


def test_prompts_that_were_computed_before_are_hits(model):
    model.forget()
    metrics = Metrics(NAME, model)

    async def twice() -> None:
        async with AsyncLanguageModel(model, observer=metrics) as shared:
            for _ in range(2):
                await shared.generate("a long beginning that both have", plan="plain", max_tokens=2, seed=1)

    asyncio.run(twice())
    values = samples(metrics.render())
    prompt = value(values, "vllm:prompt_tokens_total") / 2
    assert value(values, "vllm:prefix_cache_queries_total") == 2 * prompt
    assert prompt / 2 < value(values, "vllm:prefix_cache_hits_total") <= prompt


def test_a_request_that_is_refused_is_an_error(model):
    metrics = Metrics(NAME, model)

    async def refused() -> None:
        async with AsyncLanguageModel(model, observer=metrics) as shared:
            with pytest.raises(HierspecError):
                await shared.generate([10**6], max_tokens=2)

    asyncio.run(refused())
    values = samples(metrics.render())
    assert value(values, "vllm:request_success_total", finished_reason="error") == 1
    assert value(values, "vllm:num_requests_running") == value(values, "vllm:prompt_tokens_total") == 0


def test_nothing_of_a_text_or_its_owner_is_told(model):
    metrics = Metrics(NAME, model)

    async def secret() -> None:
        async with AsyncLanguageModel(model, observer=metrics) as shared:
            await shared.generate("xylophone", namespace="somebody", max_tokens=5)

    asyncio.run(secret())
    assert b"xylophone" not in metrics.render()
    assert b"somebody" not in metrics.render()


def test_label_sets_are_bounded_and_lose_no_count():
    counters = TierCounters()
    for number in range(3 * MOST_NAMES):
        tier = TierStats(f"tier {number}")
        chain = Proposal.chain(range(MOST_DEPTH + 9), f"source {number}")
        tier.count(chain, list(range(MOST_DEPTH + 5)), MOST_DEPTH + 6)
        counters.add(Stats([tier]))
    by_tier = counters.values["hierspec:tier_passes"]
    assert len({label for family in counters.values.values() for labels in family for label in labels}) < 130
    assert by_tier.total() == 3 * MOST_NAMES
    assert by_tier[OTHER,] > 0
    depths = counters.values["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert depths.total() == 3 * MOST_NAMES * (MOST_DEPTH + 5)
    assert set(depths) == {(str(depth),) for depth in range(MOST_DEPTH + 1)}


def test_the_route_is_what_prometheus_reads(model):
    app = FastAPI()
    app.include_router(router)
    app.state.metrics = Metrics(NAME, model)
    response = TestClient(app).get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert value(samples(response.content), "vllm:generation_tokens_total") == 0
    assert value(samples(response.content), "vllm:spec_decode_num_drafts_total") == 0
