"""One engine of `vllm_gpu.py`, in the process that opens it."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# vLLM's workers import this file. Nothing of hierspec is imported at the top: the proposer imports it in a worker.
_PROPOSER = {"method": "custom_class", "model": "hierspec.hosts.vllm.Proposer"}
_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", **_LOOKUP},
    "ngram_gpu": {"method": "ngram_gpu", **_LOOKUP},  # keeps asynchronous scheduling
    "suffix": {"method": "suffix"},
    "hierspec": _PROPOSER,
}
MODELS, VARIANTS = ("8B", "default"), ("full", "exact", "draft")
BATCH = 16
CONTEXTS = (512, 2048)
_SHORT, _LONG = 8, 264  # tokens written: the difference in time is that of the additional tokens
_KV_CACHE = {"8B": 8 << 30, "default": 2 << 30}  # bytes: 16 requests of 4,096 tokens
_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16)  # requests per step that have a CUDA graph
_DRAFT_PLAN = Path(__file__).parents[1] / "examples" / "vllm_draft.toml"


class Job:
    """An engine by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model, self.method, *variants = name.split(":")
        if self.model not in MODELS or self.method not in METHODS or not set(variants) <= set(VARIANTS):
            raise ValueError(
                f"There is no engine {name}: {'|'.join(MODELS)}:{'|'.join(METHODS)}[:{'|'.join(VARIANTS)}]"
            )
        self.full, self.exact, self.draft = (variant in variants for variant in VARIANTS)

    @property
    def reference(self) -> str:
        """The engine whose texts it should reproduce."""
        return f"{self.model}:plain" + (":exact" if self.exact else "")

    def options(self, folder: str, tokens: int, plan: str) -> dict[str, Any]:
        """Options of vLLM's class LLM.

        Few CUDA graphs, a fixed size of the KV cache (no profiling) and no autotuning of unused kernels shorten
        opening; none of that changes a step's speed.
        """
        settings = METHODS[self.method]
        rows = 1 if settings is None else 1 + tokens  # graphs of drafting engines hold multiples of a whole draft
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": [rows * width for width in _WIDTHS]}
        if self.full:
            compilation["cudagraph_mode"] = "FULL"
        options: dict[str, Any] = {
            "model": folder,
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_seqs": BATCH,
            "kv_cache_memory_bytes": _KV_CACHE[self.model],
            "gpu_memory_utilization": 0.05,  # must be free at the start; other engines may have the rest
            "enable_prefix_caching": False,
            "disable_log_stats": False,
            "enable_flashinfer_autotune": False,
            "compilation_config": compilation,
        }
        if settings is not None:
            options["speculative_config"] = {**settings, "num_speculative_tokens": tokens}
        if settings is _PROPOSER:
            options["additional_config"] = {"hierspec": {"plan": str(_DRAFT_PLAN) if self.draft else plan}}
        return options


def answer_all(job: Job, asked: Mapping[str, Any], llm: Any, sampling: Callable[..., Any]) -> dict[str, Any]:
    """Answers both parts of the prompts through an open engine."""
    greedy = sampling(temperature=0, max_tokens=asked["max_tokens"])
    few = sampling(temperature=0, max_tokens=24)
    # The first work of each kind compiles kernels and records graphs.
    _answer(llm, asked["warm_up"][:1], few)
    _answer(llm, (asked["warm_up"] * BATCH)[:BATCH], few)
    _answer(llm, asked["warm_up"][:2], few)
    alone, together = asked["alone"], asked["together"]
    if job.exact:  # it takes three times as long
        alone, together = alone[:: max(len(alone) // 8, 1)][:8], together[:BATCH]
    runs = {"1": _measured(llm, [[prompt] for prompt in alone], greedy)}
    if job.method == "plain":
        runs["1 again in 16"] = _measured(llm, _groups(alone), greedy)
    runs["16"] = _measured(llm, _groups(together), greedy)
    return runs


def _groups(prompts: Sequence[str]) -> list[Sequence[str]]:
    return [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]


def _answer(llm: Any, prompts: Sequence[str], sampling: Any) -> list[list[int]]:
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return [list(answer.outputs[0].token_ids) for answer in llm.chat(chats, sampling, use_tqdm=False)]


def _measured(llm: Any, groups: Sequence[Sequence[str]], sampling: Any) -> dict[str, Any]:
    """Answers each group at once, one group after the other."""
    before, began = _counters(llm), time.perf_counter()
    texts = [tokens for group in groups for tokens in _answer(llm, group, sampling)]
    seconds = time.perf_counter() - began
    after = _counters(llm)
    counted = {name: after[name] - before[name] for name in before}
    return {"texts": texts, "seconds": round(seconds, 4), **counted}


def _counters(llm: Any) -> dict[str, int]:
    """vLLM's counters. A request's steps after its prompt are counted by the intervals between tokens."""
    values = {metric.name: getattr(metric, "value", getattr(metric, "count", 0)) for metric in llm.get_metrics()}
    return {
        "accepted": int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
        "drafted": int(values.get("vllm:spec_decode_num_draft_tokens", 0)),
        "steps": int(values["vllm:inter_token_latency_seconds"]),
    }


def token_times(
    llm: Any, sampling: Callable[..., Any], prompt: Callable[..., Any], vocabulary: int
) -> dict[str, float]:
    """Milliseconds per token by context length, at batch 1."""
    numbers = random.Random(0)

    def seconds(length: int, tokens: int) -> float:
        ids = [numbers.randrange(10, vocabulary) for _ in range(length)]
        exactly = sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([prompt(prompt_token_ids=ids)], exactly, use_tqdm=False)
        return time.perf_counter() - began

    times = {}
    for length in CONTEXTS:
        seconds(length, 16)
        short, long = (min(seconds(length, tokens) for _ in range(3)) for tokens in (_SHORT, _LONG))
        times[str(length)] = round(1e3 * (long - short) / (_LONG - _SHORT), 3)
    return times


def run_here(job: Job, asked: Mapping[str, Any], save: Callable[[Mapping[str, Any]], None]) -> None:
    """Opens one engine in this process, and saves the results after each part.

    If `asked` says that it waits, it measures when a line comes on standard input, and not at all when that ends.
    """
    began = time.perf_counter()
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]
    from vllm.inputs import TokensPrompt  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(**job.options(asked["folders"][job.model], asked["tokens"], asked["plan"]))
    result: dict[str, Any] = {"opening_seconds": round(time.perf_counter() - began, 1)}
    save(result)
    if asked.get("waits") and not sys.stdin.readline():
        return
    result["runs"] = answer_all(job, asked, llm, SamplingParams)
    save(result)
    if job.method == "plain" and not job.exact:
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        result["token_ms"] = token_times(llm, SamplingParams, TokensPrompt, vocabulary)
        save(result)
