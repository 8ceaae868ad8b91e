"""Drafts of vLLM's own methods and of ours over the same texts, without vLLM's steps: accepted tokens a step, by task.

docs/results/vllm-drafts.json was made by it, in one thread. Texts are greedy answers of the default model, made once
(`--texts` keeps them). Each method is called as vLLM calls it, one request after another; the text stands for the
target. Steps take made-up times (`--step`, `--row`, in milliseconds), by which ours decides how much to draft. Run it
in vLLM's environment; `suffix` needs arctic-inference.

example:
  .venv-vllm/bin/python experiments/vllm_drafts.py --prompts spec_bench_dev.jsonl --limit 48 --texts texts.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

Propose = Callable[[str, np.ndarray, Sequence[int]], list[int]]  # from a request's name, text and sampled tokens
_CONTEXT = 4096


@dataclass
class Clock:
    """CPU time of this process, because others may run, plus the simulated steps of the target."""

    steps: float = 0.0

    def __call__(self) -> float:
        return self.steps + time.process_time()


def ngram(most: int) -> Propose:
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer  # type: ignore[import-not-found,unused-ignore]

    settings = SimpleNamespace(prompt_lookup_min=2, prompt_lookup_max=5, num_speculative_tokens=most)
    proposer = NgramProposer(
        SimpleNamespace(
            speculative_config=settings,
            model_config=SimpleNamespace(max_model_len=_CONTEXT),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )

    def propose(name: str, text: np.ndarray, sampled: Sequence[int]) -> list[int]:
        drafts: list[list[int]] = proposer.propose(most, [list(sampled)], np.array([len(text)], np.int32), text[None])
        return drafts[0]

    return propose


def suffix(most: int) -> Propose:
    """Suffix decoding with vLLM's default settings."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found,unused-ignore]

    depth = 24
    cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=10000)

    def propose(name: str, text: np.ndarray, sampled: Sequence[int]) -> list[int]:
        if name not in cache.active_requests:
            for other in list(cache.active_requests):
                cache.stop_request(other)
            cache.start_request(name, text[: len(text) - len(sampled)])
        cache.add_active_response(name, list(sampled))
        draft = cache.speculate(name, text[-depth:], max_spec_tokens=most, max_spec_factor=1.0, min_token_prob=0.1)
        return list(draft.token_ids)

    return propose


def ours(plan: str, most: int, clock: Clock) -> Propose:
    from hierspec.checkpoints.load import model_folder
    from hierspec.hosts.opening import HostModel, open_guest
    from hierspec.hosts.vllm import Proposer
    from hierspec.hosts.vllm_options import GuestOptions
    from hierspec.hosts.vllm_server import vllm_model

    folder = model_folder(vllm_model(None))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    options = GuestOptions(plan=plan, stores=tempfile.mkdtemp())
    model = HostModel(folder.name, folder, str(folder), config["num_hidden_layers"], config["vocab_size"], _CONTEXT)
    proposer = Proposer.over(open_guest(model, options, most, clock), _CONTEXT)

    def propose(name: str, text: np.ndarray, sampled: Sequence[int]) -> list[int]:
        return proposer.propose([list(sampled)], np.array([len(text)], np.int32), text[None])[0]

    return propose


def replay(texts: Sequence[dict[str, Any]], propose: Propose, clock: Clock, step: float, row: float) -> dict[str, Any]:
    """Counts by task, and microseconds per call."""
    counts: dict[str, dict[str, float]] = {}
    calls, spent = 0, 0.0
    for number, item in enumerate(texts):
        text = np.array(item["prompt"] + item["tokens"], np.int32)
        length, draft = len(item["prompt"]), list[int]()
        of_task = counts.setdefault(item["task"], {"steps": 0, "tokens": 0, "drafted": 0, "accepted": 0, "seconds": 0})
        while length < len(text):
            right = 0
            while right < len(draft) and length + right + 1 < len(text) and draft[right] == text[length + right]:
                right += 1
            clock.steps += step + row * len(draft)
            began = time.process_time()
            if length > len(item["prompt"]):
                of_task["steps"] += 1
                of_task["drafted"] += len(draft)
                of_task["accepted"] += right
                of_task["tokens"] += right + 1
                of_task["seconds"] += step + row * len(draft)
            sampled = [int(token) for token in text[length : length + right + 1]]
            length += right + 1
            if length < len(text):
                draft = propose(str(number), text[:length], sampled)
                calls += 1
                spent += time.process_time() - began
                of_task["seconds"] += time.process_time() - began
    everything = {key: sum(task[key] for task in counts.values()) for key in next(iter(counts.values()))}
    return {
        "microseconds_a_call": round(1e6 * spent / calls, 1),
        **{task: _rates(each) for task, each in {"all": everything, **counts}.items()},
    }


def _rates(counts: dict[str, float]) -> dict[str, float]:
    return {
        "accepted_a_step": round(counts["accepted"] / counts["steps"], 3),
        "drafted_a_step": round(counts["drafted"] / counts["steps"], 3),
        "tokens_per_second": round(counts["tokens"] / counts["seconds"], 2),
    }


def write_texts(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Greedy answers of the default model with the file's own weights, to prompts of each task in turn."""
    import hierspec
    from hierspec.prompts import own_prompts, read_prompts

    families: dict[str, list[Any]] = {}
    for prompt in own_prompts() if arguments.prompts is None else read_prompts(arguments.prompts):
        families.setdefault(prompt.task, []).append(prompt)
    in_turn = [prompt for each in zip(*families.values(), strict=False) for prompt in each]
    first, texts = arguments.skip * len(families), []
    with hierspec.load(weights="file") as model:
        for prompt in in_turn[first : first + arguments.limit]:
            ids = model.encode([{"role": "user", "content": prompt.turns[0]}])
            answer = model.generate(ids, plan="plain", max_tokens=arguments.max_tokens)
            texts.append({"task": prompt.task, "prompt": ids, "tokens": [int(token) for token in answer.tokens]})
    return texts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSON lines with task and turns (default: hierspec's own)")
    parser.add_argument("--limit", type=int, default=36, help="prompts (default 36)")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each task that are left out before (default 0)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--texts", type=Path, help="JSON lines with task, prompt and tokens: read, or written first")
    parser.add_argument("--methods", default="ngram,suffix,hd+", help="ngram, suffix, and plans of ours")
    parser.add_argument("--tokens", type=int, default=8, help="num_speculative_tokens (default 8)")
    parser.add_argument("--step", type=float, default=100.0, help="milliseconds of a step of one row (default 100)")
    parser.add_argument("--row", type=float, default=6.0, help="and of each further row (default 6)")
    parser.add_argument("--output", type=Path)
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    if arguments.texts is not None and arguments.texts.is_file():
        texts = [json.loads(line) for line in arguments.texts.read_text(encoding="utf-8").splitlines()]
    else:
        texts = write_texts(arguments)
        if arguments.texts is not None:
            arguments.texts.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    results = {}
    for method in arguments.methods.split(","):
        clock = Clock()
        made = {"ngram": ngram, "suffix": suffix}.get(method)
        propose = ours(method, arguments.tokens, clock) if made is None else made(arguments.tokens)
        results[method] = replay(texts, propose, clock, arguments.step / 1e3, arguments.row / 1e3)
        print(method, json.dumps(results[method]), flush=True)
    record = {
        "command": " ".join(["python", "experiments/vllm_drafts.py", *given]),
        "texts": len(texts),
        "num_speculative_tokens": arguments.tokens,
        "step_ms": arguments.step,
        "row_ms": arguments.row,
        "methods": results,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
