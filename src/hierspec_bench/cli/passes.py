"""Measure single forward passes: by width, context and part, against what the memory can give.

examples:
  hierspec bench passes --output passes.json
  hierspec bench passes --weights int8
  hierspec bench passes --baselines transformers
"""

from __future__ import annotations

import argparse

from hierspec.cli import options
from hierspec.cli.console import hand_out, note, progress_bars
from hierspec_bench.cli import common


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    common.add_baselines(parser, "transformers: its passes too, in this process")
    common.add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    model = options.load_model(arguments)
    from hierspec.machine import machine
    from hierspec_bench.passes import measure_passes
    from hierspec_bench.peers import open_peer

    peers, device = common.names(arguments.peers), str(model.decoder.backend.device)
    peer = open_peer(peers[0], model.folder, model.dtype, device, model.stop_ids) if peers else None
    with progress_bars() as progress:
        measured = measure_passes(model, peer, progress=progress)
    if not arguments.json:
        for item in measured["prefill"]:
            note(f"prefill of {item['tokens']} tokens by {item['by']}: {item['tokens_per_second']} tokens/s")
        for item in measured["passes"]:
            by = item.get("by", "hierspec")
            parts = (
                f"layers {item['layers_ms']}, head {item['head_ms']}, pick {item['pick_ms']}" if "ratio" in item else ""
            )
            note(f"context {item['context']}, {item['tokens']} tokens, {by}: {item['ms']} ms {parts}")
        note(f"reading the weights once takes {measured['reading_weights_once_ms']} ms")
    hand_out({"machine": machine(), **common.about_model(model), **measured}, arguments.output)
    return 0
