"""Random command lines, made from the parsers themselves: each ends with a known status, and no traceback.

Everything runs in this process, on a tiny model. Where a command would start minutes of work it is stopped: what comes
before is what a user's mistake meets.

example:
  python tests/soak/command_lines.py --seed 1 --count 2000 --output command_lines.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import hierspec
from hierspec.cli.completion import command_words
from hierspec.cli.completion_scripts import Command
from hierspec.cli.main import extra_parsers, main, make_parser
from hierspec.core.errors import HierspecError
from hierspec.testing.checkpoints import tiny_checkpoint

STATUSES = (0, 1, 2, 130, 141)
LONG_WORK = (  # by the command that starts it
    "hierspec.planner.choose.choose",
    "hierspec.train.material.gather_material",
    "hierspec.train.examine.examine",
    "hierspec.train.skip.calibration",
    "hierspec.fill_history.fill_history",
    "hierspec.stores.corpus_build.build_corpus",
    "hierspec_bench.run.SideBySide.run",
    "hierspec_bench.passes.measure_passes",
    "hierspec_bench.gpu.bench.GpuBench.run",
    "hierspec_bench.peers.install",
    "hierspec_bench.peers.open_peers",
    "hierspec_bench.peers.open_peer",
    "hierspec.prompt_sets._fetch",
    "hierspec.serve.listening.serve",
    "hierspec_bench.serving.process.our_server",
    "hierspec_bench.serving.others.start_other",
    "hierspec_bench.serving.load.LoadTest.run",
)


class Reached(HierspecError):
    """A command came as far as its work."""


def values(folder: Path) -> list[str]:
    """What an argument may be: sensible, wrong, and hostile."""
    files = {
        "text.txt": b"abc abc abc\n",
        "bytes.bin": b"\xff\xfe\x00\x80" * 9,
        "empty": b"",
        "plan.toml": b'stores = ["context"]\n[[tier]]\nexit_layer = 2\n',
        "deep.toml": b"a = " + b"[" * 3000,
        "wrong.toml": b'[[tier]]\nexit_layer = 99\ngather = "x"\n',
        "prompts.jsonl": b'{"task": "a", "turns": ["abc"]}\n',
        "deep.jsonl": b'{"turns": ' + b"[" * 100_000 + b"\n",
        "record.json": b'{"plans": {}}',
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    names = ["tiny", *files, "folder", "missing", "missing/deeper.toml", ".", "/", "text.txt/below", "/dev/null", "~"]
    texts = ["", " ", "abc", "é€😀", "\udcff", "a\0b", "\n", "\x1b[2J", "-", "--", "[bold]", "%s", "{}", "$(id)"]
    numbers = ["0", "1", "2", "-1", "3.5", "nan", "inf", "1e999", "9" * 30, "9" * 5000, "0,1", "1,x", "4G", "1T", "30d"]
    words = ["auto", "plain", "hd+", "auto,plain", "context", "context,nothing", "int8", "cpu", "all"]
    return [*names, *texts, *numbers, *words, "x" * 300, "y/" * 3000]


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[None]:
    """A tiny model instead of any other, no long work, and nothing of the user's within reach."""
    model = hierspec.load(tiny_checkpoint(folder / "tiny", "llama"))

    def load(*arguments: object, **options: object) -> hierspec.LanguageModel:
        return model

    def reached(*arguments: object, **options: object) -> Any:
        raise Reached("as far as its work")

    def home(*arguments: object) -> Any:
        return model.tokenizer, model.config.vocabulary, model.assembler.stores.home

    from hierspec import cache

    before = Path.cwd()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"HIERSPEC_CACHE": str(folder / "cache")}))
        stack.enter_context(mock.patch("hierspec.language_model.load", load))
        stack.enter_context(mock.patch("hierspec.assembly.vocabulary.open_home", home))
        stack.enter_context(mock.patch("torch.set_num_threads", return_value=None))
        # Compiled code is not in the cache folder, and takes a minute to make again.
        kept = mock.patch("hierspec.cli.cache.prune", lambda *a, **k: cache.prune(*a, **{**k, "dry_run": True}))
        stack.enter_context(kept)
        for name in LONG_WORK:
            stack.enter_context(mock.patch(name, reached))
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def random_arguments(commands: list[Command], pool: list[str], random: random.Random) -> list[str]:
    """Mostly of the right form, so that the mistakes are met that come after parsing."""
    command = random.choice(commands)
    arguments = command.path.split()
    if random.random() < 0.6:
        arguments.append("tiny")
    for option in random.sample(command.options, min(len(command.options), random.randrange(6))):
        if option.names[0] == "-h":
            continue
        arguments.append(random.choice(option.names))
        if option.takes_value != (random.random() < 0.03):
            arguments.append(random.choice([*option.words, *pool] if option.words else pool))
    if command.path in ("generate", "chat") and "--max-tokens" not in arguments:
        arguments += ["--max-tokens", "3"]
    if command.path == "generate" and random.random() < 0.5:
        arguments += ["-p", random.choice(pool)]
    for _ in range(random.randrange(3) // 2):
        arguments.insert(random.randrange(len(arguments) + 1), random.choice(pool))
    return arguments


def outcome(arguments: list[str], message: bytes) -> tuple[object, str]:
    """The status of a command line, and what it wrote to standard error; a traceback in its place where it has one."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    incoming = io.TextIOWrapper(io.BytesIO(message), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), mock.patch.object(sys, "stdin", incoming):
        try:
            status: object = main(arguments)
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            return "traceback", traceback.format_exc()
    return status, err.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]


def complaint(status: object, err: str) -> str:
    """What is wrong with an outcome, if anything."""
    if status not in STATUSES:
        return f"status {status}"
    if "Traceback" in err:
        return "a traceback"
    if status == 2 and not (err.splitlines() or [""])[-1].startswith("hierspec: "):
        return "no sentence"
    if "an error of the system" in err or "A file or standard output" in err:
        return "a sentence that says nothing"
    return ""


def run(seed: int, count: int, report: Any = print) -> dict[str, Any]:
    began, chance = time.perf_counter(), random.Random(seed)
    statuses: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pool = values(folder)
        commands = list(command_words("", make_parser(), extra_parsers()))
        messages = [b"", b"abc\n", b"\xff\n", b"/help\n/plan nope\n/save x.json\nabc\\\nabc\n", b"a\0b\n"]
        with prepared(folder):
            for number in range(count):
                arguments = random_arguments(commands, pool, chance)
                status, err = outcome(arguments, chance.choice(messages))
                statuses[str(status)] += 1
                if wrong := complaint(status, err):
                    failures.append({"arguments": arguments, "wrong": wrong, "stderr": err[-2000:]})
                    report(f"{wrong}: hierspec {shlex.join(arguments)[:300]!r}\n{err[-2000:]}")
                if (number + 1) % 500 == 0:
                    report(f"{number + 1} of {count}, {len(failures)} failures")
    seconds = round(time.perf_counter() - began, 1)
    return {"seed": seed, "count": count, "statuses": dict(statuses), "failures": failures, "seconds": seconds}


def soak(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args(arguments)
    print(f"seed {chosen.seed}", flush=True)
    record = {"command": shlex.join(["python", "tests/soak/command_lines.py", *sys.argv[1:]])}
    record |= run(chosen.seed, chosen.count, lambda text: print(text, flush=True))
    if chosen.output is not None:
        chosen.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({**record, "failures": len(record["failures"])}))
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(soak())
