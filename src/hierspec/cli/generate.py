"""Stream a model's answer to a prompt.

The prompt comes from -p, from a file (-f) or from standard input. The text goes to standard output, remarks about it
to standard error. With --check the exit status is 1 where the text differs from plain decoding's.

examples:
  hierspec generate -p "Why is the sky blue?"
  hierspec generate -p "Why is the sky blue?" --colour --check
  hierspec generate ./my-model -f question.txt --plan hispec --temperature 0.8 --seed 7
  hierspec generate -p "Who wrote Faust?" --json-schema answer.schema.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli import options
from hierspec.cli.answering import Answering
from hierspec.cli.auto import plan_in_words
from hierspec.cli.console import ending, note, progress_bars
from hierspec.cli.files import InputFile
from hierspec.cli.grammar import add_grammar, chosen_grammar
from hierspec.cli.parser import is_text, text
from hierspec.cli.report import print_document
from hierspec.cli.status import DIFFERENT
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan
from hierspec.core.sampling import Sampling
from hierspec.core.text_files import read_text, shown_path, why
from hierspec.progress import Timings

if TYPE_CHECKING:
    from hierspec.generation import Generation
    from hierspec.language_model import LanguageModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("-p", "--prompt", type=text, metavar="TEXT", help="the prompt")
    prompt.add_argument("-f", "--file", type=InputFile, metavar="FILE", help="read the prompt from a file")
    parser.add_argument("--system", type=text, metavar="TEXT", help="a system message for the chat template")
    parser.add_argument("--raw", action="store_true", help="use the prompt as it is, without the chat template")
    options.add_colour(parser)
    parser.add_argument("--check", action="store_true", help="write it with plain decoding first and compare")
    options.add_json(parser, "print one JSON document instead of the text")
    parser.add_argument(
        "--verbose",
        action="store_true",
        help="show the plan, memory (what tiers will add before they load), dtype, and counters of every tier",
    )
    options.add_plan(parser)
    options.add_sampling(parser)
    add_grammar(parser)


@dataclass(frozen=True)
class _Question:
    """One prompt to one model, answered under several plans."""

    model: LanguageModel
    ids: list[int]
    sampling: Sampling
    arguments: argparse.Namespace
    timings: Timings

    def answer(self, plan: Plan, title: str, to_stderr: bool = False) -> Generation:
        """Streamed unless --json."""
        arguments, file = self.arguments, sys.stderr if to_stderr else sys.stdout
        self.model.forget()  # so that every answer pays for its own prefill
        stream = self.model.stream(self.ids, plan=plan, sampling=self.sampling)
        answering = Answering(file, arguments.colour, silent=arguments.json, most=self.sampling.max_tokens)
        if arguments.check and not arguments.json:
            note(f"\n--- {title}")
        try:
            answering.show(stream)
        except KeyboardInterrupt:
            stream.cancel()
            print(flush=True)
            note(f"Stopped after {len(stream.generation.tokens)} tokens.")
            raise
        if not to_stderr:
            answering.show_legend(stream.generation)
        return stream.generation


def run(arguments: argparse.Namespace) -> int:
    timings = Timings()
    prompt = _prompt(arguments)
    sampling = replace(options.chosen_sampling(arguments), grammar=chosen_grammar(arguments))
    model = options.load_model(arguments, timings=timings)
    plan = options.chosen_plan(model, arguments)
    ids = model.encode(_messages(arguments, prompt), arguments.raw)
    if arguments.verbose:
        from hierspec.planner.memory import added_weights, stated

        for line in plan_in_words(model, arguments.plan, plan):
            note(line)
        note(stated(added_weights(model, plan)))
    options.prepare(model, plan)
    if arguments.check:
        sampling = replace(sampling, seed=sampling.seed if sampling.seed is not None else 0)
        _warm_up(model, ids, plan, replace(sampling, max_tokens=min(8, sampling.max_tokens)))
    timings.add("measure")
    question = _Question(model, ids, sampling, arguments, timings)
    plain = question.answer(Plan(), "plain decoding", to_stderr=True) if arguments.check else None
    with model:
        if plain is not None:
            timings.add("plain")
        answer = question.answer(plan, f"plan {arguments.plan}")
        timings.add("answer")
    return _report(question, plan, answer, plain)


def _warm_up(model: LanguageModel, ids: list[int], plan: Plan, sampling: Sampling) -> None:
    """The first passes of a process pay for pages and threads, which is not what --check is to time."""
    apart = model.apart()  # with stores of its own: the timed run must not find its answer in a history
    with progress_bars() as progress:
        for number, warming in enumerate((Plan(), plan)):
            progress("Warming up", number, 2)
            apart.generate(ids, plan=warming, sampling=sampling)
            model.hierarchy(warming)  # opens its stores


def _prompt(arguments: argparse.Namespace) -> str:
    if arguments.system is not None and arguments.raw:
        raise HierspecError("--system needs the chat template; leave out --raw.")
    prompt = arguments.prompt if arguments.prompt is not None else _read_prompt(arguments)
    if not (prompt if arguments.raw else prompt.strip()):
        raise HierspecError('The prompt is empty; give one with -p "…", -f FILE, or on standard input.')
    if not is_text(prompt):
        raise HierspecError("The prompt is not UTF-8 text; give text.")
    return str(prompt)


def _read_prompt(arguments: argparse.Namespace) -> str:
    try:
        if arguments.file is not None:
            return read_text(arguments.file, _cannot_be_read(arguments.file))
        if sys.stdin.isatty():
            raise HierspecError('There is no prompt; give one with -p "…", -f FILE, or on standard input.')
        return sys.stdin.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else why(error)
        raise _cannot_be_read("standard input")(reason) from error


def _cannot_be_read(source: str | Path) -> Callable[[str], HierspecError]:
    name = shown_path(source)
    return lambda reason: HierspecError(f"The prompt cannot be read from {name} ({reason}); name a text file with -f.")


def _messages(arguments: argparse.Namespace, prompt: str) -> str | list[dict[str, str]]:
    if arguments.system is None:
        return prompt
    return [{"role": "system", "content": arguments.system}, {"role": "user", "content": prompt}]


def _report(question: _Question, plan: Plan, answer: Generation, plain: Generation | None) -> int:
    """The line at the end, or the JSON document."""
    from hierspec.equality import first_difference

    model, arguments = question.model, question.arguments
    line = f"{len(answer.tokens)} tokens, {answer.tokens_per_second:.1f} tokens/s, "
    line += f"{answer.stats.tokens_per_pass:.2f} tokens per target pass"
    if answer.synthetic:
        line += " (SYNTHETIC acceptance: the text is the model's, the speed is not)"
    document = _document(question, answer)
    status = 0
    if plain is not None:
        difference = first_difference(model, question.ids, plain.tokens, answer.tokens, question.sampling, answer.seed)
        speedup = answer.tokens_per_second / plain.tokens_per_second
        verdict = "identical to plain" if difference is None else f"not identical to plain: {difference}"
        line += f"; plain {plain.tokens_per_second:.1f} tokens/s; speed-up {speedup:.2f}x; {verdict}"
        document |= {
            "plain_tokens_per_second": plain.tokens_per_second,
            "speedup": speedup,
            "identical": difference is None,
            "difference": None if difference is None else str(difference),
        }
        status = 0 if difference is None or difference.is_tie or plan.rule != "coupled" else DIFFERENT
    if arguments.json:
        print_document(document)
        return status
    if cut := ending(answer, question.sampling.max_tokens):
        note(cut)
    note(line)
    if arguments.verbose:
        parts = [f"{name} {size / 1e6:,.0f} MB" for name, size in model.memory().items()]
        note("memory: " + ", ".join(parts))
        steps = (f"{step} {seconds:.1f} s" for step, seconds in question.timings.seconds.items())
        note("time: " + ", ".join(steps))
        note(f"dtype: {model.dtype_choice}; products: {model.decoder.products}")
        for tier in answer.stats.to_json():
            note(json.dumps(tier))
    return status


def _document(question: _Question, answer: Generation) -> dict[str, Any]:
    model = question.model
    return {
        "model": model.name,
        "plan": question.arguments.plan,
        "dtype": model.dtype,
        "products": model.decoder.products,
        "dtype_seconds": dict(model.dtype_choice.seconds),
        "text": answer.text,
        "tokens": list(answer.tokens),
        "sources": list(answer.sources),
        "ended": answer.ended,
        "seed": answer.seed,
        "prompt_tokens": answer.prompt_tokens,
        "seconds": answer.seconds,
        "tokens_per_second": answer.tokens_per_second,
        "decode_tokens_per_second": answer.decode_tokens_per_second,
        "tokens_per_pass": answer.stats.tokens_per_pass,
        "tiers": answer.stats.to_json(),
        "memory": model.memory(),
        "synthetic": answer.synthetic,
        "timings": {step: round(seconds, 3) for step, seconds in question.timings.seconds.items()},
    }
