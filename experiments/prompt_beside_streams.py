"""How long does a long prompt wait for its first token while other clients stream, and how much does it slow them down?

A server streams answers to some clients. Into these streams come prompts of about 1,000 tokens, one after another, each
with a text of its own, so that the prefix cache does not help. The same prompts are also sent to the idle server, in
turn with the busy one. Reported: the time to the first token beside the streams over the time alone, and the longest
gap of any stream while a prompt was being read over the streams' median gap. The last line is one JSON document.
It made docs/results/prompt-beside-streams.json.

example:
  python experiments/prompt_beside_streams.py --streams 8 --words 950 --repeats 8
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from dataclasses import dataclass, field
from typing import Any

from hierspec.cli import options
from hierspec.cli.console import progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.errors import HierspecError
from hierspec.machine import machine
from hierspec_bench.cli import common
from hierspec_bench.serving.client import Address, Reply
from hierspec_bench.serving.process import our_server

_WORDS = (
    "the a of to and in that it was his her with as for had you not be on at by which have or from this him but all"
)
_TOPICS = ("a lighthouse", "a river", "two brothers", "an old clock", "the first snow", "a lost letter", "a garden")
_STREAM_TOKENS = 400
_SETTLED_SECONDS = 2.0  # of streaming before a prompt comes, and after its first token


@dataclass
class Measured:
    """What was seen under one plan."""

    alone: list[float] = field(default_factory=list)  # seconds to the first token, by prompt
    beside: list[float] = field(default_factory=list)
    usual_gaps: list[float] = field(default_factory=list)  # of streams while no long prompt was there
    gaps_meanwhile: list[list[float]] = field(default_factory=list)  # by prompt: gaps that overlap its prefill
    prompt_tokens: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        usual = statistics.median(self.usual_gaps)
        longest = [max(gaps, default=0.0) for gaps in self.gaps_meanwhile]
        ratios = [beside / alone for beside, alone in zip(self.beside, self.alone, strict=True)]
        return {
            "prompt_tokens": self.prompt_tokens,
            "first_alone_ms": [round(1e3 * seconds, 1) for seconds in self.alone],
            "first_beside_ms": [round(1e3 * seconds, 1) for seconds in self.beside],
            "first_over_alone": round(statistics.median(ratios), 3),
            "first_over_alone_largest": round(max(ratios), 3),
            "usual_gap_ms": round(1e3 * usual, 2),
            "median_gap_meanwhile_over_usual": round(
                statistics.median(gap for gaps in self.gaps_meanwhile for gap in gaps) / usual, 2
            ),
            "longest_gap_over_usual": round(statistics.median(longest) / usual, 2),
            "longest_gap_over_usual_largest": round(max(longest) / usual, 2),
        }


def a_prompt(rng: random.Random, words: int) -> str:
    text = " ".join(rng.choices(_WORDS.split(), k=words))
    return f"Number {rng.randrange(10**6)}. {text}\nWhat is this about?"


def body(prompt: str, plan: str, max_tokens: int, seed: int) -> dict[str, Any]:
    """A sampled answer: it is as long as it may be more often than a greedy one."""
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "plan": plan}


async def measure(address: Address, plan: str, streams: int, prompts: list[str], rng: random.Random) -> Measured:
    measured = Measured()
    for number, prompt in enumerate(prompts):
        reply = await address.chat(body(f"Alone. {prompt}", plan, 2, number))
        measured.alone.append(_first(reply))
        measured.prompt_tokens.append(reply.prompt_tokens)
        replies: list[Reply] = []
        running = [asyncio.create_task(_stream(address, plan, rng.randrange(10**6), replies)) for _ in range(streams)]
        await asyncio.sleep(_SETTLED_SECONDS)
        reply = await address.chat(body(prompt, plan, 2, number))
        measured.beside.append(_first(reply))
        await asyncio.sleep(_SETTLED_SECONDS)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        _add_gaps(measured, replies, reply.began, reply.pieces[0])
    return measured


async def _stream(address: Address, plan: str, seed: int, replies: list[Reply]) -> None:
    """Ask for one answer after another."""
    while True:
        reply = Reply()
        replies.append(reply)
        topic = _TOPICS[seed % len(_TOPICS)]
        await address.chat(body(f"Write a long story about {topic}.", plan, _STREAM_TOKENS, seed), reply=reply)
        if reply.error:
            raise HierspecError(f"A stream failed: {reply.error}")
        seed += 1


def _first(reply: Reply) -> float:
    if reply.error or not reply.pieces:
        raise HierspecError(f"The server did not answer a long prompt: {reply.error or 'the answer is empty'}")
    return reply.first_seconds


def _add_gaps(measured: Measured, replies: list[Reply], began: float, first: float) -> None:
    """Gaps that overlap the time from the prompt's arrival to its first token, and the others."""
    meanwhile = []
    for reply in replies:
        for earlier, later in zip(reply.pieces, reply.pieces[1:], strict=False):
            if later <= began or earlier >= first:
                measured.usual_gaps.append(later - earlier)
            else:
                meanwhile.append(later - earlier)
    measured.gaps_meanwhile.append(meanwhile)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_source(parser)
    parser.add_argument("--streams", type=int, default=8, metavar="N", help="clients that stream (default 8)")
    parser.add_argument("--words", type=int, default=950, metavar="N", help="of a long prompt (default 950)")
    parser.add_argument("--repeats", type=int, default=8, metavar="N", help="long prompts for each plan (default 8)")
    parser.add_argument("--plans", default="plain,auto", help="separated by commas (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the prompts (default 0)")
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    options.at_least_one(arguments, "streams", "words", "repeats")
    plans = options.names(arguments.plans)
    if not plans:
        raise HierspecError("--plans names no plan; give one, such as plain,auto.")
    rng = random.Random(arguments.seed)
    results: dict[str, Any] = {}
    with progress_bars() as progress:
        progress("Starting the server", 0, 0)
        with our_server([str(arguments.model)] if arguments.model else []) as server:
            asyncio.run(server.address.chat(body("Hello!", "plain", 32, 0)))  # whatever happens only once
            for number, plan in enumerate(plans):
                progress(f"Measuring {plan}", number, len(plans))
                prompts = [a_prompt(rng, arguments.words) for _ in range(arguments.repeats)]
                measured = asyncio.run(measure(server.address, plan, arguments.streams, prompts, rng))
                results[plan] = measured.figures()
    record = {"command": command_line(), "machine": machine(), "streams": arguments.streams, "by_plan": results}
    hand_out(record, arguments.output)
    return 0


def main(arguments: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, arguments)


if __name__ == "__main__":
    sys.exit(main())
