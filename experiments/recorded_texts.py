"""Do recorded texts come out again? Answers the prompts of bench records once more and compares the texts.

Each record's prompts are answered with its model, weights, temperature and seeds, under every plan named that it has.
A record of another kind of processor may differ where rounding does. Made docs/results/house-texts.json.

example:
  python experiments/recorded_texts.py docs/results/peers-own.json docs/results/auto-sampled.json --output again.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hierspec
from hierspec.cli.console import progress_bars
from hierspec.cli.main import run_script
from hierspec.cli.report import command_line, hand_out
from hierspec.core.errors import HierspecError

_MODELS = {"SmolLM2-135M-Instruct": None, "SmolLM2-135M-Instruct-ee": "default-ee"}


def compare(record: dict[str, Any], model: hierspec.LanguageModel, plans: Sequence[str], limit: int) -> dict[str, Any]:
    """How many of a record's first `limit` texts are reproduced, by plan, and the prompts that are not."""
    counts: dict[str, Any] = {}
    for plan in plans:
        same, different = 0, []
        for text in record["texts"][:limit]:
            if plan not in text["answers"]:
                continue
            recorded = "".join(piece[0] for piece in text["answers"][plan])
            sampling = hierspec.Sampling(
                max_tokens=record["max_tokens"],
                temperature=record["temperature"],
                seed=record["seed"] + text["prompt"],
            )
            written = model.generate(text["asked"], plan=plan, sampling=sampling).text
            if written == recorded:
                same += 1
            else:
                different.append(text["prompt"])
        if same or different:
            counts[plan] = {"texts": same + len(different), "identical": same, "different_prompts": different}
    return counts


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if record["texts"]:
            return record
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "it is not a bench record with texts"
        raise HierspecError(f"{path} cannot be used ({reason}); name a record of `hierspec bench run`.") from error
    raise HierspecError(f"{path} has no texts; name a record of `hierspec bench run`.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument(
        "--plans", default="plain,auto,hd+,draft,lookup,layerskip+,hispec+", help="those that are there"
    )
    parser.add_argument("--limit", type=int, default=1000, help="texts of a record")
    parser.add_argument("--output", type=Path)


def run(arguments: argparse.Namespace) -> int:
    result: dict[str, Any] = {"command": command_line(), "records": {}}
    models: dict[tuple[str, str], hierspec.LanguageModel] = {}
    with progress_bars() as progress:
        for number, path in enumerate(arguments.records):
            progress("Writing recorded texts again", number, len(arguments.records))
            record = _read(path)
            # For a record with weights "auto", use its dtype: weights in a file's own format have their own name.
            key = record["model"], record["dtype"] if record["weights"] == "auto" else record["weights"]
            if key not in models:
                models[key] = hierspec.load(_MODELS.get(key[0], key[0]), weights=key[1])
            result["records"][path.name] = compare(record, models[key], arguments.plans.split(","), arguments.limit)
    hand_out(result, arguments.output)
    return 0


def main(command: list[str] | None = None) -> int:
    return run_script(__doc__, add_arguments, run, command)


if __name__ == "__main__":
    sys.exit(main())
