"""`hierspec bench --store-times` and `--store-soak`: stores alone, with no model."""

from __future__ import annotations

import argparse

from hierspec.cli.console import command_line, hand_out, note, progress_bars
from hierspec.core.errors import HierspecError
from hierspec.paths import whole_file


def store_times(arguments: argparse.Namespace) -> int:
    if arguments.largest is not None and arguments.largest < 100:
        raise HierspecError(f"--largest must be at least 100 tokens, not {arguments.largest}.")
    from hierspec.machine import machine
    from hierspec_bench.stores import CONTEXTS, CORPORA, HISTORIES, chart, measure_stores, no_larger

    contexts, histories, corpora = (no_larger(sizes, arguments.largest) for sizes in (CONTEXTS, HISTORIES, CORPORA))
    with progress_bars() as progress:
        measured = measure_stores(progress, contexts, histories, corpora)
    if not arguments.json:
        for name in ("context", "history", "corpus"):
            for row in measured[name]:
                learnt = f", learning a token {row['learn_us']['median']}" if "learn_us" in row else ""
                guess = row["propose_us"]
                note(f"{name} of {row['tokens']:,}: a guess {guess['median']} us (99%: {guess['p99']}){learnt}")
    if arguments.output is not None:
        with whole_file(arguments.output.with_suffix(".svg")) as temporary:
            temporary.write_text(chart(measured).svg(), encoding="utf-8")
    hand_out({"machine": machine(), "command": command_line(), **measured}, arguments.output)
    return 0


def store_soak(arguments: argparse.Namespace) -> int:
    from hierspec.machine import machine
    from hierspec_bench.soak import kill_while_writing, soak

    with progress_bars() as progress:
        soaked, killed = soak(progress=progress), kill_while_writing(progress=progress)
    if not arguments.json:
        for found in soaked:
            note(
                f"{found['requests']:,} requests, {found['history']}: at most {found['most_bytes']:,} bytes of memory "
                f"and {found['most_file_bytes']:,} on disk, the limit is {found['limit']:,} each"
            )
        note(f"{killed['kills']} kills: {killed['lost']} batches lost, {killed['corrupted']} files damaged")
    hand_out({"machine": machine(), "command": command_line(), "soak": soaked, "kills": killed}, arguments.output)
    harm = killed["lost"] + killed["corrupted"] + killed["over_limit"]
    return 0 if harm == 0 and all(found["within_limit"] for found in soaked) else 1
