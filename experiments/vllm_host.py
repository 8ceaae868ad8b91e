"""vLLM with and without hierspec's proposer: tokens a second and accepted tokens a step, by task.

docs/results/vllm-host.json was made by it. Each engine is a process of its own in vLLM's environment. They take turns:
each prompt is answered by all of them before the next one comes, greedily, while the others are stopped, so a machine
that becomes slower does so for all. Every text is compared with that of plain vLLM.

examples:
  make vllm-suffix
  .venv-vllm/bin/python experiments/vllm_host.py --limit 24 --output docs/results/vllm-host.json
  .venv-vllm/bin/python experiments/vllm_host.py --engines plain,hierspec --limit 4 --max-tokens 32
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

# vLLM's workers import this file. Their search for kernels in loaded modules fails on numba, so nothing of hierspec is
# imported at the top: in a worker the proposer imports it afterwards.
_PROPOSER = {"method": "custom_class", "model": "hierspec.hosts.vllm.Proposer"}
ENGINES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix"},
    "hierspec": _PROPOSER,
    "hierspec-draft": _PROPOSER,
}
_LINE = "ANSWER "  # prefix of an engine's messages to this process; its other lines are vLLM's


_DRAFT_PLAN = Path(__file__).parents[1] / "examples" / "vllm_draft.toml"


def answer_as_asked(engine: str, arguments: argparse.Namespace) -> None:
    """In its own process: opens one engine, and answers a prompt for each line of standard input."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]

    settings = ENGINES[engine]
    plan = str(arguments.draft_plan) if engine == "hierspec-draft" else arguments.plan
    speculative = None if settings is None else {**settings, "num_speculative_tokens": arguments.tokens}
    llm = LLM(
        arguments.model,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        max_num_seqs=4,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculative,
        additional_config={"hierspec": {"plan": plan}} if settings == _PROPOSER else {},
    )
    sampling = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    print(_LINE + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        before, began = _counters(llm), time.perf_counter()
        output = llm.chat([{"role": "user", "content": json.loads(line)}], sampling, use_tqdm=False)[0].outputs[0]
        seconds = time.perf_counter() - began
        after = _counters(llm)
        counted = {key: after[key] - before[key] for key in before}
        answer = {"tokens": list(output.token_ids), "seconds": round(seconds, 4), **counted}
        print(_LINE + json.dumps(answer), flush=True)


def _counters(llm: Any) -> dict[str, int]:
    """vLLM's counters.

    Accepted tokens beyond the end of an answer are counted too, so tokens do not give the number of steps: steps after
    the prompt are counted by the intervals between tokens.
    """
    values = {metric.name: getattr(metric, "value", getattr(metric, "count", 0)) for metric in llm.get_metrics()}
    return {
        "accepted": int(values.get("vllm:spec_decode_num_accepted_tokens", 0)),
        "drafted": int(values.get("vllm:spec_decode_num_draft_tokens", 0)),
        "steps": int(values["vllm:inter_token_latency_seconds"]),
    }


def _asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The model's folder, and tasks with their prompts."""
    from hierspec.hosts.vllm_server import vllm_model
    from hierspec.prompts import BenchPrompt, own_prompts, read_prompts, spread

    families: dict[str, list[BenchPrompt]] = {}
    for prompt in own_prompts() if arguments.prompts is None else read_prompts(arguments.prompts):
        families.setdefault(prompt.task, []).append(prompt)
    left = [prompt for family in families.values() for prompt in family[arguments.skip :]]
    chosen = [(prompt.task, prompt.turns[0]) for prompt in spread(left, arguments.limit)]
    return {"model": vllm_model(arguments.model), "prompts": chosen}


def summary(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Tokens per second, and accepted and drafted tokens per step after the prompt."""
    tokens = sum(len(answer["tokens"]) for answer in answers)
    accepted, drafted, steps = (sum(answer[key] for answer in answers) for key in ("accepted", "drafted", "steps"))
    return {
        "tokens_per_second": round(tokens / sum(answer["seconds"] for answer in answers), 2),
        "accepted_a_step": round(accepted / max(steps, 1), 3),
        "drafted_a_step": round(drafted / max(steps, 1), 3),
    }


def by_task(result: dict[str, Any], plain: dict[str, Any] | None) -> dict[str, Any]:
    answers = result["answers"]
    tasks = sorted({answer["task"] for answer in answers})
    report = {"all": summary(answers)}
    report |= {task: summary([answer for answer in answers if answer["task"] == task]) for task in tasks}
    if plain is None:
        return report
    same = sum(one["tokens"] == other["tokens"] for one, other in zip(answers, plain["answers"], strict=True))
    return {**report, "equal_to_plain": f"{same} of {len(answers)}"}


class Engine:
    """An engine in its own process, so that it does not slow down the others."""

    def __init__(self, name: str, model: str, argv: Sequence[str], folder: Path) -> None:
        self._log = folder / f"{name}.log"
        # What earlier runs learnt would make a second run differ from the first.
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HIERSPEC_LEARNT": "off", **os.environ}
        command = [sys.executable, __file__, *argv, "--one", name, "--model", model]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.answers: list[dict[str, Any]] = []
        self.failed = ""  # why it no longer answers
        self._hear()
        self._signal(signal.SIGSTOP)

    def answer(self, task: str, prompt: str) -> None:
        if self.failed:
            return
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(prompt) + "\n")
            self._process.stdin.flush()
        if (answer := self._hear()) is not None:
            self.answers.append({"task": task, **answer})
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_LINE):
                return json.loads(line.removeprefix(_LINE))
        lines = [line for line in self._log.read_text(encoding="utf-8").splitlines() if "Error" in line]
        self.failed = (lines or ["it ended"])[-1].strip()
        return None

    def _signal(self, number: int) -> None:
        """Signals all of its processes: vLLM has workers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def run_in_turn(names: Sequence[str], asked: dict[str, Any], argv: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sends each prompt through all engines; the first engine rotates."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = {}
        for name in names:
            engines[name] = Engine(name, asked["model"], argv, folder)
            stack.callback(engines[name].close)
            print(name, engines[name].failed or "is ready", file=sys.stderr, flush=True)
        for number, (task, prompt) in enumerate(asked["prompts"]):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                engines[name].answer(task, prompt)
            print(f"{number + 1} of {len(asked['prompts'])} prompts", file=sys.stderr, flush=True)
    return {
        name: {"failed": engine.failed} if engine.failed else {"answers": engine.answers}
        for name, engine in engines.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSON lines with task and turns (default: hierspec's own)")
    parser.add_argument("--limit", type=int, default=24, help="prompts (default 24)")
    parser.add_argument("--skip", type=int, default=0, help="prompts of each task that are left out before (default 0)")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=8, help="num_speculative_tokens (default 8)")
    parser.add_argument("--plan", default="hd+", help="hierspec's (default hd+)")
    parser.add_argument("--draft-plan", type=Path, default=_DRAFT_PLAN, help="hierspec-draft's, a TOML file")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--one", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path)
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(given)
    if arguments.one:
        answer_as_asked(arguments.one, arguments)
        return 0
    from hierspec.hosts.vllm_options import vllm_version
    from hierspec.machine import machine

    names = arguments.engines.split(",")
    for name in names:
        if name not in ENGINES:
            parser.error(f"--engines: {name} is none of {', '.join(ENGINES)}")
    results = run_in_turn(names, _asked(arguments), given)
    plain = results.get("plain")
    if plain is not None and "failed" in plain:
        plain = None
    record = {
        "command": " ".join(["python", "experiments/vllm_host.py", *given]),
        "machine": machine(),
        "vllm": vllm_version(),
        "python": platform.python_version(),
        "num_speculative_tokens": arguments.tokens,
        "max_tokens": arguments.max_tokens,
        "prompts": arguments.limit,
        "skipped": arguments.skip,
        "threads": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto"),
        "engines": {
            name: {"failed": result["failed"]} if "failed" in result else by_task(result, plain)
            for name, result in results.items()
        },
    }
    document = json.dumps(record, indent=1) + "\n"
    if arguments.output:
        arguments.output.write_text(document, encoding="utf-8")
    print(document, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
