"""Prometheus metrics of a server: vLLM's names if they mean the same, `hierspec:` for others.

Labels hold the model's name, tiers, sources, depths and how requests ended: never a text, a key or a namespace, and
only a bounded number of values. Counters of speculation are sums of `Generation.stats`, running requests included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from hierspec.generation import Failure, Generation, TextStep
from hierspec.language_model import LanguageModel
from hierspec.serve.monitoring.tier_counters import TierCounters
from hierspec.worker import Job

router = APIRouter()

# How a request ended, in hierspec's term and in vLLM's.
FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
# Upper bounds of histogram buckets: seconds between steps, seconds of whole requests, and tokens.
_SOON = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60)
_LATER = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


@router.get("/metrics", response_class=Response, summary="Counters, as Prometheus reads them")
def metrics(request: Request) -> Response:  # not async: it waits for the running pass
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


class Metrics(Collector):
    """Observes a worker (`AsyncLanguageModel(model, observer=Metrics(name, model))`) and renders its metrics.

    The worker's thread counts; any thread may render. Each instance has its own registry, because a process may have
    several.
    """

    def __init__(self, model_name: str, model: LanguageModel) -> None:
        self.model_name, self.model = model_name, model
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()  # lock order: the model's turn before this lock
        self._jobs: set[Job] = set()  # unfinished jobs
        self._ended = TierCounters()
        counter, histogram = self._counter, self._histogram
        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that began to write.")
        self._generation_tokens = counter("vllm:generation_tokens", "Tokens written.")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the KV cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens that were computed already.")
        self._first = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _LATER)
        between = "Between two steps of a request; a step may bring several tokens."
        self._between = histogram("vllm:inter_token_latency_seconds", between, _SOON)
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _LATER)
        self._queued = histogram("vllm:request_queue_time_seconds", "From arrival until it runs.", _LATER)
        self._prompt_lengths = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_lengths = histogram("vllm:request_generation_tokens", "Tokens written for a request.", _TOKENS)
        labels = ("model_name", "finished_reason")
        ends = Counter("vllm:request_success", "Requests, by how they ended.", labels, registry=self.registry)
        self._ends = {reason: ends.labels(model_name, reason) for reason in FINISHED.values()}
        ProcessCollector(registry=self.registry)
        self.registry.register(self)

    def _counter(self, name: str, document: str) -> Counter:
        return Counter(name, document, ("model_name",), registry=self.registry).labels(self.model_name)

    def _histogram(self, name: str, document: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, document, ("model_name",), buckets=buckets, registry=self.registry)
        return made.labels(self.model_name)

    # Called by the worker, in its thread

    def on_submit(self, job: Job) -> None:
        with self._lock:
            self._jobs.add(job)

    def on_first(self, job: Job) -> None:
        assert job.writer is not None
        request = job.writer.request
        prompt = len(request.prompt)
        self._prompt_tokens.inc(prompt)
        self._queries.inc(prompt)
        self._hits.inc(min(request.stats.tiers[0].known or 0, prompt))
        self._first.observe(time.perf_counter() - job.submitted)
        self._queued.observe(max(job.began - job.submitted, 0))

    def on_step(self, job: Job, step: TextStep) -> None:
        assert job.writer is not None
        self._generation_tokens.inc(len(step.tokens))
        if len(job.writer.seconds) > 1:
            self._between.observe(step.seconds)

    def on_end(self, job: Job, result: Generation | Failure) -> None:
        with self._lock:
            self._jobs.discard(job)
            if job.writer is not None:
                self._ended.add(job.writer.request.stats)
        self._ends[FINISHED["error" if isinstance(result, Failure) else result.ended]].inc()
        if isinstance(result, Generation):
            self._whole.observe(time.perf_counter() - job.submitted)
            self._prompt_lengths.observe(result.prompt_tokens)
            self._answer_lengths.observe(len(result.tokens))

    # Called in any thread

    def render(self) -> bytes:
        """The metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Metrics that are not counted by event but read now, between two passes."""
        with self.model.turn(), self._lock:
            total = self._ended.copy()
            begun = [job.writer.request for job in self._jobs if job.writer is not None and job.began]
            for request in begun:
                total.add(request.stats)
            waiting = len(self._jobs) - len(begun)
            share = self.model.assembler.catalogue.pool.share_of_running()
            memory = self.model.memory()
        yield self._gauge("vllm:num_requests_running", "Requests that are being answered.", len(begun))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait until there is room.", waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of the KV cache that running requests hold, 1: all.", share
        )
        held = GaugeMetricFamily("hierspec:memory_bytes", "Memory, by what it is for.", labels=("model_name", "kind"))
        for kind, size in memory.items():
            held.add_metric([self.model_name, kind], size)
        yield held
        yield from total.families(self.model_name)

    def describe(self) -> Iterator[Metric]:
        return iter(())  # called at registration, when there is nothing to describe

    def _gauge(self, name: str, document: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, document, labels=("model_name",))
        gauge.add_metric([self.model_name], value)
        return gauge
