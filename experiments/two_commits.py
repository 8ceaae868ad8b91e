"""Is one checkout slower than another? Both answer the same prompts in turn, in two processes, one at a time.

Each pair of answers is timed back to back, the order changing from pair to pair, so that a slow minute hits both. The
texts should be the same; where a change of numbers lets them differ, the ratio of tokens per second still counts. With
--widths, passes over so many tokens are timed in turn too. The last line is one JSON document. It made
docs/results/house-speed.json, docs/results/two-commits-vnni.json and docs/results/two-commits-sharing-vnni.json.

example:
  git worktree add ../before COMMIT
  python experiments/two_commits.py ../before . --output docs/results/house-speed.json
  python experiments/two_commits.py ../before . --limit 8 --plans plain --widths 1,8,64 --contexts 128,4096
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_ROUNDS = 9

WORKER = """
import json, sys, time
import hierspec
import numpy as np
settings = json.loads(sys.stdin.readline())
model = hierspec.load(**settings)
print(json.dumps({"ready": hierspec.__file__}), flush=True)
models, timers = {}, {}
text = np.random.default_rng(0).integers(0, model.config.vocabulary, model.config.context).astype(np.int32)
for line in sys.stdin:
    ask = json.loads(line)
    if "width" in ask:
        context, tokens = ask["context"], text[ask["context"] : ask["context"] + ask["width"]]
        if len(tokens) < ask["width"]:
            sys.exit(f"{context} tokens and {ask['width']} more do not fit the model's context of {len(text)}.")
        if context not in timers:
            from hierspec.scorers.timing import PassTimer  # old checkouts lack it
            timers[context] = PassTimer(model.scorer(model.config.layers), text[:context])
        seconds = [sum(timers[context].run(tokens)) for _ in range(6)][1:]
        print(json.dumps({"seconds": sorted(seconds)[2]}), flush=True)
        continue
    own = models.setdefault(ask["plan"], model.apart())
    model.forget()
    began = time.perf_counter()
    answer = own.generate(ask["prompt"], plan=ask["plan"], max_tokens=ask["max_tokens"])
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "first_seconds": answer.first_seconds, "tokens": answer.tokens}), flush=True)
"""


class Checkout:
    """A process with the code of one checkout and a loaded model."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        loaded = Path(self.ask(settings)["ready"])
        if folder.resolve() not in loaded.resolve().parents:
            sys.exit(f"{folder} has no package hierspec in src: {loaded} was loaded instead.")

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            sys.exit("A process ended before it answered; its error is above.")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(before: Checkout, after: Checkout, prompts: list[str], plan: str, max_tokens: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"before": [], "after": []}
    firsts: dict[str, list[float]] = {"before": [], "after": []}
    written = {"before": 0, "after": 0}
    same = 0
    for number, prompt in enumerate([prompts[0], *prompts]):  # the first prompt twice: once to warm up
        pair = [("before", before), ("after", after)]
        texts = []
        for name, checkout in pair if number % 2 else pair[::-1]:
            answer = checkout.ask({"prompt": prompt, "plan": plan, "max_tokens": max_tokens})
            texts.append(answer["tokens"])
            if number:
                times[name].append(answer["seconds"])
                firsts[name].append(answer["first_seconds"])
                written[name] += len(answer["tokens"])
        same += number > 0 and texts[0] == texts[1]
    return {
        "prompts": len(prompts),
        "identical": same,
        "speed_ratio": round(written["after"] / sum(times["after"]) / (written["before"] / sum(times["before"])), 4),
        "median_ratio": round(_ratio(times), 4),
        "prefill_ratio": round(sum(firsts["before"]) / sum(firsts["after"]), 4),
        "tokens": written,
        "seconds": {name: round(sum(seconds), 3) for name, seconds in times.items()},
    }


def compare_passes(before: Checkout, after: Checkout, widths: list[int], contexts: list[int]) -> list[dict[str, Any]]:
    """Median milliseconds of passes, both checkouts in turn."""
    found = []
    for context in contexts:
        for width in widths:
            times: dict[str, list[float]] = {"before": [], "after": []}
            for number in range(_ROUNDS):
                pair = [("before", before), ("after", after)]
                for name, checkout in pair if number % 2 else pair[::-1]:
                    times[name].append(checkout.ask({"context": context, "width": width})["seconds"])
            row = {"context": context, "tokens": width, "ratio": round(_ratio(times), 3)}
            found.append(row | {name: round(1e3 * statistics.median(its), 2) for name, its in times.items()})
    return found


def _ratio(times: dict[str, list[float]]) -> float:
    """The median ratio of neighbours in time."""
    return statistics.median(old / new for old, new in zip(times["before"], times["after"], strict=True))


def _counts(listed: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in listed.split(",")]
    if not all(counts):
        raise argparse.ArgumentTypeError(f"{listed!r} is not a list of numbers from 1 up, such as 1,8,64")
    return counts


def main(command: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument(
        "--prompts", type=Path, default=Path(__file__).parent.parent / "src/hierspec/data/prompts.jsonl"
    )
    parser.add_argument("--limit", type=int, default=24, help="prompts, spread over the file")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--plans", default="plain,lookup,draft,auto")
    parser.add_argument("--weights", default="auto,int8")
    parser.add_argument(
        "--widths", type=_counts, default=[], help="tokens of passes to time, such as 1,8,64 (default: none)"
    )
    parser.add_argument("--contexts", type=_counts, default=[128, 1024], help="tokens before them")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(command)
    for folder in (arguments.before, arguments.after):
        if not (folder / ".git").exists() or not (folder / "src" / "hierspec").is_dir():
            sys.exit(f"{folder} is not a checkout of hierspec; make one with: git worktree add {folder} COMMIT")
    lines = [line for line in arguments.prompts.read_text(encoding="utf-8").split("\n") if line.strip()]
    step = max(len(lines) / arguments.limit, 1.0)
    chosen = [json.loads(lines[int(number * step)]) for number in range(min(arguments.limit, len(lines)))]
    prompts = [prompt["turns"][0] for prompt in chosen]
    result: dict[str, Any] = {
        "command": "python experiments/two_commits.py " + " ".join(sys.argv[1:]),
        "commits": {
            name: subprocess.check_output(["git", "-C", folder, "rev-parse", "HEAD"], text=True).strip()
            for name, folder in (("before", arguments.before), ("after", arguments.after))
        },
        "processor": _processor(),
        "load_average": os.getloadavg()[0],
        "max_tokens": arguments.max_tokens,
        "weights": {},
    }
    for weights in arguments.weights.split(","):
        pair = [Checkout(folder, {"weights": weights}) for folder in (arguments.before, arguments.after)]
        for plan in arguments.plans.split(","):
            began = time.perf_counter()
            figures = compare(pair[0], pair[1], prompts, plan, arguments.max_tokens)
            result["weights"].setdefault(weights, {})[plan] = figures
            print(f"{weights:5} {plan:8} {figures['speed_ratio']:.3f} x {figures['identical']}/{figures['prompts']} "
                  f"identical, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
        if arguments.widths:
            passes = compare_passes(pair[0], pair[1], arguments.widths, arguments.contexts)
            result["weights"].setdefault(weights, {})["passes"] = passes
        for checkout in pair:
            checkout.close()
    document = json.dumps(result)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(document)


def _processor() -> str:
    import hierspec.machine

    return str(hierspec.machine.machine()["processor"])


if __name__ == "__main__":
    main()
