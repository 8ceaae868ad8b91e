"""`hierspec bench --equality-tokens N`: does a plan write plain decoding's text, token by token, for long?"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hierspec.cli.console import command_line, hand_out, note, progress_bars
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file

if TYPE_CHECKING:
    from hierspec.language_model import LanguageModel
    from hierspec.prompts import BenchPrompt
    from hierspec_bench.equality import Equality


def run_equality(arguments: argparse.Namespace, model: LanguageModel, prompts: list[BenchPrompt]) -> int:
    """Compare until there are so many tokens; an interrupted run leaves what it has, and --output goes on from it."""
    from hierspec.machine import machine
    from hierspec_bench.equality import PLAIN_BATCH, Equality, compare_many

    if arguments.equality_tokens < 1:
        raise HierspecError(f"--equality-tokens must be at least 1, not {arguments.equality_tokens}.")
    names = [name for name in arguments.plans.split(",") if name]
    if len(names) != 1:
        raise HierspecError("--equality-tokens compares one plan with plain decoding; give --plans one name.")
    plan = model.plan(names[0])
    about: dict[str, Any] = {
        "machine": machine(), "model": model.name, "dtype": model.dtype, "weights": model.weights,
        "products": model.decoder.products, "plan": plan.to_toml(),
        "max_tokens": arguments.max_tokens,
        "plain": f"written in batches of {PLAIN_BATCH}; one answer of each batch also alone",
    }  # fmt: skip
    found = _earlier(arguments.output, about) or Equality()

    def document() -> dict[str, Any]:
        return {"command": command_line(), **about, **asdict(found), "seconds": round(found.seconds, 1)}

    def keep(_: Equality) -> None:
        if arguments.output is not None:
            with whole_file(arguments.output) as temporary:
                temporary.write_text(json.dumps(document(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    wanted, most = arguments.equality_tokens, about["max_tokens"]
    try:
        with progress_bars() as progress:
            compare_many(model, plan, prompts, wanted, most, found, keep, progress)
    except KeyboardInterrupt:
        note("Interrupted; what follows was compared until then.")
    if not arguments.json:
        note(f"{found.tokens:,} tokens of {found.answers} answers compared: {len(found.differences)} differences")
    hand_out(document(), arguments.output)
    return int(any(not one["tie"] for one in found.differences))


def _earlier(path: Path | None, about: dict[str, Any]) -> Equality | None:
    """What a run of the same model and plan left in the file, if there is one."""
    from hierspec_bench.equality import Equality

    if path is None or not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        same = all(found.get(key) == value for key, value in about.items())
    except (OSError, ValueError, AttributeError) as error:
        raise HierspecError(f"{path} cannot be gone on from ({error}); name another file.") from error
    if not same:
        raise HierspecError(f"{path} is of another model, plan or setting; name another file.")
    return Equality.from_json({key: value for key, value in found.items() if key not in {*about, "command"}})
