"""What does a forward pass cost on this GPU, and does a token have the same bits in every pass?

Random weights in the shapes of the default model, a 1B and an 8B one, also in 8 bits; nothing is downloaded. The same
measurement as in `hierspec bench gpu`, of more shapes and formats and without anything else. It stops before its time
is up, prints a short table, and then one JSON document. docs/results/base-cuda-bfloat16-greedy.json is what the torch
backend took on such a GPU.

example:
  PYTHONPATH=src python experiments/gpu_passes.py --seconds 280 --output passes.json
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hierspec.cli.report import Report, command_line
from hierspec.machine import machine
from hierspec_bench.gpu.roofline import roofline
from hierspec_bench.gpu.shape_passes import CONTEXTS, measure_shape
from hierspec_bench.gpu.table import show
from hierspec_bench.gpu.timing import Deadline


def measured(cases: Sequence[str], seconds: float) -> dict[str, Any]:
    deadline, device = Deadline(seconds), torch.device("cuda")
    document: dict[str, Any] = {"machine": machine(), "command": command_line(), "roofline": roofline(device)}
    document |= {"passes": [], "runs": [], "batches": [], "engines": [], "parts": []}
    for case in cases:
        shape, _, format = case.partition(":")
        part: dict[str, Any] = {"part": case}
        try:
            document["passes"] += measure_shape(shape, device, format or "bfloat16", CONTEXTS, deadline)
            part["complete"] = not deadline.over
        except Exception as error:  # a failing shape must not stop the others
            part["error"] = f"{type(error).__name__}: {error}"[:500]
        document["parts"].append(part)
        gc.collect()
        torch.cuda.empty_cache()
    return document


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cases = "default,8B,1B,8B:int8,default:int8"
    parser.add_argument("--cases", default=cases, help="shapes, each with :int8 for 8-bit weights (default: all)")
    parser.add_argument("--seconds", type=float, default=280, help="after which nothing new is begun")
    parser.add_argument("--output", type=Path, help="a file for the JSON document")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA GPU here.")
    document = measured(arguments.cases.split(","), arguments.seconds)
    report = Report()
    report.document(document, arguments.output)
    show(document, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
