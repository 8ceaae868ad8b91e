"""Is `auto` slower than plain decoding after long prompts, and when does the first token come?

Passages of several lengths are cut from text files and answered, each plainly and under the other plans, in turn and
back to back, prefill included. Nothing learnt by earlier runs is used, each format has stores of its own, and nothing
computed for one answer serves another. The texts must be the same. The last line is one JSON document.
It made docs/results/long-prompts.json.

example:
  python experiments/long_prompts.py moby_dick.txt sherlock.txt --sizes 3000,6000,8000 --weights auto,int8
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import hierspec
from hierspec.core.engine import Engine
from hierspec.language_model import LanguageModel
from hierspec.machine import machine

CHARACTERS = 12  # upper bound of characters per token, on average, to read enough of a file


def passages(model: LanguageModel, files: Sequence[Path], size: int, count: int, raw: bool) -> list[list[int]]:
    """`count` passages of `size` tokens, from the files in turn, spread over each: to be continued, or as messages."""
    result = []
    for number in range(count):
        text = files[number % len(files)].read_text(encoding="utf-8", errors="replace")
        share = (1 + number // len(files)) / (2 + (count - 1) // len(files))
        start = int(share * max(len(text) - CHARACTERS * size, 0))
        ids = model.encode(text[start : start + CHARACTERS * size], raw=True)[:size]
        if len(ids) < size:
            sys.exit(f"{files[number % len(files)]} has fewer than {size} tokens; give a longer text.")
        result.append(ids if raw else model.encode(model.tokenizer.decode(ids)))
    return result


def answer(model: LanguageModel, prompt: list[int], plan: str, max_tokens: int, temperature: float) -> dict[str, Any]:
    """The tokens of an answer, and when they arrived."""
    model.forget()
    sampling = hierspec.Sampling(max_tokens=max_tokens, temperature=temperature, seed=1)
    began, first = time.perf_counter(), 0.0
    request = model.request(prompt, plan, sampling)
    for _ in Engine(time.perf_counter).run([request]):
        first = first or time.perf_counter() - began
    seconds = time.perf_counter() - began
    if request.error is not None:
        raise request.error
    passes, tokens = request.stats.passes, len(request.output)
    figures = {
        "seconds": round(seconds, 3),
        "first_token": round(first, 3),
        "tokens": tokens,
        "passes": passes,
        "prefill_tokens_per_second": round(len(prompt) / first, 1),
        "decode_tokens_per_second": round((tokens - 1) / max(seconds - first, 1e-9), 2),
        "tiers": request.stats.to_json(),
    }
    return {"output": list(request.output), **figures}


def compare(weights: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """All passages in one format, under all plans in turn."""
    plans, results = arguments.plans.split(","), []
    with tempfile.TemporaryDirectory() as stores:
        model = hierspec.load(arguments.model, weights=weights, stores=stores, keep_learnt=False)
        apart = {plan: model.apart() for plan in plans}  # no plan may benefit from what another wrote
        for plan in plans:  # the first passes of a process pay for page faults, threads and opening stores
            answer(apart[plan], model.encode("Hello"), plan, 8, arguments.temperature)
        for size in map(int, arguments.sizes.split(",")):
            for number, prompt in enumerate(passages(model, arguments.texts, size, arguments.passages, arguments.raw)):
                answers: dict[str, dict[str, Any]] = {}
                for plan in plans if number % 2 else plans[::-1]:
                    answers[plan] = answer(apart[plan], prompt, plan, arguments.max_tokens, arguments.temperature)
                outputs = [each.pop("output") for each in answers.values()]
                same = all(output == outputs[0] for output in outputs)
                results.append({"weights": weights, "size": size, "same": same, "plans": answers})
                seconds = {plan: each["seconds"] for plan, each in answers.items()}
                print(json.dumps({"weights": weights, "size": size, "same": same, **seconds}), file=sys.stderr)
    return results


def ratios(results: Sequence[dict[str, Any]], plan: str) -> dict[str, float]:
    """Speed relative to plain decoding: prompts included, and after the first token."""

    def total(name: str, after_first: bool) -> float:
        every = (each["plans"][name] for each in results)
        return float(sum(one["seconds"] - after_first * one["first_token"] for one in every))

    return {
        "speedup": round(total("plain", False) / total(plan, False), 3),
        "decode_speedup": round(total("plain", True) / total(plan, True), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path, nargs="+", help="text files to cut passages from")
    parser.add_argument("--model", help="folder, GGUF file or hub name (the default model)")
    parser.add_argument("--sizes", default="3000,6000,8000", help="tokens of passages, separated by commas")
    parser.add_argument("--passages", type=int, default=1, help="of each size (1)")
    parser.add_argument("--plans", default="plain,auto", help="plain and others, separated by commas (plain,auto)")
    parser.add_argument("--weights", default="auto,int8", help="formats, separated by commas (auto,int8)")
    parser.add_argument("--raw", action="store_true", help="continue passages instead of answering them as messages")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--processor-time", action="store_true", help="one thread's, where others use the machine too")
    parser.add_argument("--output", type=Path, help="write the result to this JSON file too")
    arguments = parser.parse_args(argv)
    if missing := [str(text) for text in arguments.texts if not text.is_file()]:
        parser.error(f"there is no file {', '.join(missing)}: give text files to cut passages from")
    if "plain" not in arguments.plans.split(","):
        parser.error("--plans must name plain, which the others are compared with")
    os.environ["HIERSPEC_LEARNT"] = "off"
    clock = time.process_time if arguments.processor_time else time.perf_counter
    if arguments.processor_time:
        torch.set_num_threads(1)
    runs = []
    for weights in arguments.weights.split(","):
        with patch.object(time, "perf_counter", clock):  # also replaces the library's clock
            results = compare(weights, arguments)
        others = [plan for plan in arguments.plans.split(",") if plan != "plain"]
        summary = {
            "weights": weights,
            "over_plain": {plan: ratios(results, plan) for plan in others},
            "over_plain_by_size": {
                plan: {
                    str(size): ratios([each for each in results if each["size"] == size], plan)
                    for size in sorted({each["size"] for each in results})
                }
                for plan in others
            },
            "same_texts": sum(each["same"] for each in results),
            "texts": len(results),
        }
        print(json.dumps(summary), file=sys.stderr, flush=True)
        runs.append({**summary, "answers": results})
    command = "python experiments/long_prompts.py " + shlex.join(sys.argv[1:] if argv is None else argv)
    document = {"command": command, "machine": machine(), "max_tokens": arguments.max_tokens, "runs": runs}
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0 if all(run["same_texts"] == run["texts"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
