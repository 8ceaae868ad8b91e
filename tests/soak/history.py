"""A history under random use, failures, kills and other processes: nothing saved is lost, and its limit holds.

The rules are those of tests/stores/test_history_kept.py; this runs more of them.

  python tests/soak/history.py --seed 1 --count 200 --output history.json
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

sys.path.insert(0, str(Path(__file__).parents[1] / "stores"))
from test_history_kept import KeptHistory

STEPS = 40  # of each history


def main(command: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--count", type=int, default=200, help="histories (default 200)")
    parser.add_argument("--output", type=Path, metavar="FILE.json")
    arguments = parser.parse_args(command)
    print(f"seed {arguments.seed}: {arguments.count} histories of {STEPS} steps", flush=True)
    began, failures = time.perf_counter(), []
    for number in range(0, arguments.count, 20):
        count = min(20, arguments.count - number)
        machine = seed(arguments.seed + number)(type("Machine", (KeptHistory,), {}))
        options = settings(
            max_examples=count,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(machine, settings=options)
        except Exception:  # the next ones are still of interest
            failures.append({"seed": arguments.seed + number, "error": traceback.format_exc()})
            print(failures[-1]["error"], flush=True)
        print(f"{number + count} of {arguments.count}, {len(failures)} failed", flush=True)
    record = {
        "command": "python tests/soak/history.py " + " ".join(sys.argv[1:]),
        "seed": arguments.seed,
        "histories": arguments.count,
        "steps": STEPS,
        "failures": failures,
        "seconds": round(time.perf_counter() - began, 1),
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
