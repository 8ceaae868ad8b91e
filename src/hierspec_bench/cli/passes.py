"""Measure single forward passes: by width, context and part, against what the memory can give.

examples:
  hierspec bench passes --output passes.json
  hierspec bench passes --weights int8
  hierspec bench passes --baselines transformers
"""

from __future__ import annotations

import argparse

from hierspec.cli import options
from hierspec.cli.console import progress_bars
from hierspec.cli.report import Report
from hierspec.core.errors import HierspecError
from hierspec_bench.cli import common

_ENGINES = ("transformers", "transformers:lookup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    common.add_baselines(parser, "transformers: its passes too, in this process")
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    peers = options.names(arguments.peers)
    if wrong := [engine for engine in peers if engine not in _ENGINES] or peers[1:]:
        raise HierspecError(f"Passes of {wrong[0]!r} cannot be measured; choose one of {', '.join(_ENGINES)}.")
    model = options.load_model(arguments)
    from hierspec.machine import machine
    from hierspec_bench.passes import measure_passes
    from hierspec_bench.peers import open_peer
    from hierspec_bench.peers.files import float_folder

    device = str(model.decoder.backend.device)
    peer = open_peer(peers[0], float_folder(model), model.dtype, device, model.stop_ids) if peers else None
    with progress_bars() as progress:
        measured = measure_passes(model, peer, progress=progress)
    report = Report.of(arguments)
    for item in measured["prefill"]:
        report.line(f"prefill of {item['tokens']} tokens by {item['by']}: {item['tokens_per_second']} tokens/s")
    report.table(
        "",
        ("passes by", "context", "tokens", "ms", "layers ms", "head ms", "pick ms"),
        [
            (
                item.get("by", "hierspec"),
                *(str(item[key]) for key in ("context", "tokens", "ms")),
                *(str(item.get(key, "")) for key in ("layers_ms", "head_ms", "pick_ms")),
            )
            for item in measured["passes"]
        ],
    )
    report.line(f"reading the weights once takes {measured['reading_weights_once_ms']} ms")
    report.document({"machine": machine(), **common.about_model(model), **measured}, arguments.output)
    return 0
