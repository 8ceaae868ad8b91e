"""vLLM on a GPU with and without hierspec's proposer: tokens a second at batch 1 and 16, accepted tokens, equal texts.

The default model, and the default model at the cost of 8B (`hierspec.checkpoints.enlarged`), in bfloat16, greedily.
Each engine is a process of its own with a time limit. The record is written after every engine, so a run that is cut
off keeps what it has; engines come in the order of what they matter, and none begins that cannot end in `--seconds`.

With `--at-once`, several engines open side by side, which takes little longer than one: each compiles on one core.
Then one measures after the other, while those that are open sleep: they have memory of the GPU and no work on it.

Prompts come in two parts: the first is answered one at a time, the second 16 at a time. So no answer is in a store
before it is asked for. Plain decoding answers the first part in both ways, which counts its own differences.
docs/results/vllm-host.json is the same comparison on a CPU.

An engine's name: the model (8B or default), the method, and what differs from vLLM's usual: `full` records CUDA graphs
of steps of any width (cudagraph_mode FULL; usually only steps with all drafts at full length are one graph), `exact`
sets VLLM_BATCH_INVARIANT, `draft` adds the small draft model of the pack.

examples:
  PYTHONPATH=src python experiments/vllm_gpu.py --seconds 560 --output vllm-gpu.json
  PYTHONPATH=src python experiments/vllm_gpu.py --jobs default:plain,default:hierspec:full --seconds 200
  PYTHONPATH=src python experiments/vllm_gpu.py --at-once 8 --limit-16 48 --seconds 520 --keep logs
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

# vLLM's workers import this file, so nothing of hierspec is imported at the top.
from vllm_gpu_engine import BATCH, Job, run_here

JOBS = (
    *("8B:plain", "8B:hierspec", "8B:ngram", "8B:hierspec:full"),
    *("default:plain", "default:ngram", "default:hierspec:full", "default:hierspec", "default:ngram:full"),
    *("default:plain:exact", "default:hierspec:exact", "8B:plain:exact", "8B:hierspec:exact"),
    *("8B:suffix", "default:suffix", "default:hierspec:draft"),
)
_LEAST_SECONDS = 60.0  # that an engine needs to open and answer
_OPENING = 0.6  # of the time left, at most, until the engines that open side by side must be open
_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would compile for minutes
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HIERSPEC_LEARNT": "off",  # what earlier runs learnt would make a second run differ from the first
}


class _Engine:
    """An engine in a process of its own. Its folder is new, so it finds no stores of another."""

    def __init__(self, job: Job, asked: Mapping[str, Any], folder: Path) -> None:
        self.job = job
        kept = Path(asked["keep"]) / job.name.replace(":", "-") if asked.get("keep") else folder
        for each in (folder, kept):
            each.mkdir(parents=True, exist_ok=True)
        question, self._answer, self._log = folder / "asked.json", kept / "result.json", kept / "log"
        self._answer.unlink(missing_ok=True)
        question.write_text(json.dumps(asked), encoding="utf-8")
        environment = {**os.environ, **_ENVIRONMENT, "HIERSPEC_STORES": f"{folder}/stores"}
        environment["VLLM_BATCH_INVARIANT"] = "1" if job.exact else "0"
        command = [sys.executable, __file__, "--one", job.name, str(question), str(self._answer)]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def opens(self) -> bool:
        """It has neither opened nor ended."""
        return not self._answer.is_file() and self._process.poll() is None

    def measured(self, seconds: float) -> dict[str, Any]:
        """Its results, measured now if it has waited. Killed after `seconds`; what it has saved by then counts."""
        try:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError), self._process.stdin as line:
                line.write(b"measure\n")
            failed = "" if self._process.wait(seconds) == 0 else _reason(self._log)
        except subprocess.TimeoutExpired:
            failed = f"It took longer than {seconds:.0f} seconds."
        self.end()
        result = json.loads(self._answer.read_text(encoding="utf-8")) if self._answer.is_file() else {}
        return {**result, "failed": failed} if failed else result

    def end(self) -> None:
        """Kills it and what it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run_apart(job: Job, asked: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Runs the engine alone."""
    with tempfile.TemporaryDirectory() as temporary:
        began = time.perf_counter()
        engine = _Engine(job, asked, Path(temporary))
        try:
            result = engine.measured(seconds)
        finally:
            engine.end()
        return {**result, "seconds": round(time.perf_counter() - began, 1)}


def run_in_turn(
    jobs: Sequence[Job], asked: Mapping[str, Any], seconds: float, most: float
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Opens the engines side by side, in `most` seconds or what leaves time to measure; then one after the other."""
    began = time.perf_counter()
    opening = min(most, _OPENING * seconds)
    engines: list[_Engine] = []
    with tempfile.TemporaryDirectory() as temporary:
        try:
            for number, job in enumerate(jobs):
                engines.append(_Engine(job, {**asked, "waits": True}, Path(temporary) / str(number)))
            while any(engine.opens for engine in engines) and time.perf_counter() - began < opening:
                time.sleep(0.1)
            late = {engine for engine in engines if engine.opens}
            for engine in late:
                engine.end()
            opened = time.perf_counter() - began
            print(f"{len(engines) - len(late)} of {len(engines)} opened or ended in {opened:.1f} s", flush=True)
            for engine in engines:
                turn = time.perf_counter()
                left = max(seconds - (turn - began), 0.0)
                result = engine.measured(min(left, most))
                if engine in late:
                    result["failed"] = f"It did not open in {opened:.0f} seconds."
                yield engine.job, {**result, "measuring_seconds": round(time.perf_counter() - turn, 1)}
        finally:
            for engine in engines:
                engine.end()


def _reason(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    print("\n".join(lines[-25:]), flush=True)
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["it ended"])[-1][-300:]


def _run(
    jobs: Sequence[Job], asked: Mapping[str, Any], seconds: float, most: float
) -> Iterator[tuple[Job, dict[str, Any]]]:
    if len(jobs) > 1:
        yield from run_in_turn(jobs, asked, seconds, most)
    else:
        yield jobs[0], run_apart(jobs[0], asked, min(seconds, most))


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of each engine for the record."""
    return {name: _figures(Job(name), result, results) for name, result in results.items()}


def _figures(job: Job, result: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    figures = {key: value for key, value in result.items() if key != "runs"}
    runs = result.get("runs", {})
    reference = results.get(job.reference, {}).get("runs", {})
    batches = {}
    for batch, run in runs.items():
        tokens = sum(map(len, run["texts"]))
        row: dict[str, Any] = {"tokens_per_second": round(tokens / run["seconds"], 1), "prompts": len(run["texts"])}
        if job.method != "plain":
            row["accepted_a_step"] = round(run["accepted"] / max(run["steps"], 1), 3)
            row["drafted_a_step"] = round(run["drafted"] / max(run["steps"], 1), 3)
        other = reference.get("1" if batch == "1 again in 16" else batch)
        if other is not None and run is not other:
            row["equal_to_plain"] = _equal(run["texts"], other["texts"])
            if batch == "16" or batch == "1":
                speed = sum(map(len, other["texts"])) / other["seconds"]
                row["over_plain"] = round(tokens / run["seconds"] / speed, 3)
        batches[batch] = row
    return {**figures, "batches": batches}


def _equal(texts: Sequence[Any], others: Sequence[Any]) -> str:
    return f"{sum(one == other for one, other in zip(texts, others, strict=True))} of {len(texts)}"


def _asked(arguments: argparse.Namespace, models: set[str]) -> dict[str, Any]:
    """Folders, and prompts ordered by task."""
    import torch

    from hierspec.checkpoints.enlarged_folder import write_enlarged
    from hierspec.hosts.vllm_server import vllm_model
    from hierspec.prompts import own_prompts, read_prompts, spread

    prompts = own_prompts() if arguments.prompts is None else read_prompts(arguments.prompts)
    alone, together = arguments.limit, arguments.limit_16 or arguments.limit
    wanted = spread(prompts, alone + together)
    texts = [prompt.turns[0] for prompt in wanted]
    first = {number * len(texts) // alone for number in range(alone)}
    rest = [text for number, text in enumerate(texts) if number not in first]
    groups = -(-len(rest) // BATCH)  # each with prompts of all tasks
    chosen = {id(prompt) for prompt in wanted}
    warm_up = [prompt.turns[0] for prompt in prompts if id(prompt) not in chosen] or ["Hello"]
    folders = {"default": vllm_model(arguments.model, torch.bfloat16)} if "default" in models else {}
    if "8B" in models:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        folders["8B"] = str(write_enlarged(arguments.model, arguments.sizes, arguments.folder, device=device))
    return {
        "folders": folders,
        "alone": [texts[number] for number in sorted(first)],
        "together": [text for group in range(groups) for text in rest[group::groups]],
        "warm_up": warm_up,
        "max_tokens": arguments.max_tokens,
        "tokens": arguments.tokens,
        "plan": arguments.plan,
        "keep": None if arguments.keep is None else str(arguments.keep.resolve()),
    }


def _save(path: Path | None, document: Mapping[str, Any]) -> None:
    if path is not None:
        temporary = path.with_name(f"{path.name}.part")
        temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        temporary.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["--one"]:
        name, question, answer = given[1:]
        asked = json.loads(Path(question).read_text(encoding="utf-8"))
        run_here(Job(name), asked, lambda result: _save(Path(answer), result))
        if asked.get("waits"):  # the next engine's turn: closing this one would take seconds
            sys.stdout.flush()
            os._exit(0)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help="engines, in their order (default: all)")
    parser.add_argument("--seconds", type=float, default=560, help="of the whole run (default 560)")
    parser.add_argument("--most", type=float, default=180, help="seconds of one engine or of opening (default 180)")
    parser.add_argument("--at-once", type=int, default=1, help="engines opened side by side (default 1)")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each part (default 16)")
    parser.add_argument("--limit-16", type=int, help="prompts of the second part (default: as --limit)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=8, help="num_speculative_tokens (default 8)")
    parser.add_argument("--plan", default="hd+", help="hierspec's (default hd+)")
    parser.add_argument("--prompts", type=Path, help="JSON lines with task and turns (default: hierspec's own)")
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--sizes", default="8B", help="of the enlarged model (default 8B)")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "hierspec-enlarged")
    parser.add_argument("--output", type=Path, help="a file for the record, written after every engine")
    parser.add_argument("--keep", type=Path, help="a folder for the logs and answers of each engine")
    arguments = parser.parse_args(given)
    began = time.perf_counter()
    try:
        jobs = [Job(name) for name in arguments.jobs.split(",")]
    except ValueError as error:
        parser.error(str(error))
    if not arguments.seconds > 0:
        parser.error(f"--seconds must be more than 0, not {arguments.seconds:g}; one engine takes {_LEAST_SECONDS:g}.")
    if min(arguments.at_once, arguments.limit, arguments.limit_16 or 1) < 1:
        parser.error("--at-once, --limit and --limit-16 must be at least 1.")
    # Not earlier: an engine's process must not import hierspec here.
    from hierspec.core.errors import HierspecError
    from hierspec.hosts.vllm_options import vllm_version
    from hierspec.machine import machine

    try:
        asked = _asked(arguments, {job.model for job in jobs})
    except HierspecError as error:
        parser.error(str(error))
    record: dict[str, Any] = {
        "command": " ".join(["python", "experiments/vllm_gpu.py", *given]),
        "machine": machine(),
        "vllm": vllm_version(),
        "num_speculative_tokens": arguments.tokens,
        "max_tokens": arguments.max_tokens,
        "opened_at_once": arguments.at_once,
        "preparing_seconds": round(time.perf_counter() - began, 1),
        "left_out": [],
    }
    results: dict[str, Any] = {}
    for start in range(0, len(jobs), arguments.at_once):
        group = jobs[start : start + arguments.at_once]
        left = arguments.seconds - (time.perf_counter() - began)
        if left < _LEAST_SECONDS:
            record["left_out"] += [job.name for job in group]
            continue
        for job, result in _run(group, asked, left, arguments.most):
            results[job.name] = result
            figures = summary(results)
            print(job.name, json.dumps(figures[job.name]), flush=True)
            _save(arguments.output, {**record, "engines": figures})
    print(json.dumps({**record, "engines": summary(results)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
