"""Answers one JSON line for each JSON line: run by the Python of an engine's environment, which has no hierspec.

    python serve.py with_openvino

The module named has a class Worker with open(model, setting) and generate(request). Libraries print what they like, so
answers go to a copy of standard output, and file descriptor 1 leads to standard error.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

_TELL_WHEN_PARENT_DIES = 1  # PR_SET_PDEATHSIG


def end_with(parent: int) -> None:
    """Ends this process when its parent dies, even while it loads a model."""
    if sys.platform == "linux":  # a thread could not run while a library holds the GIL
        ctypes.CDLL(None).prctl(_TELL_WHEN_PARENT_DIES, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(2)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    if parent := os.environ.pop("HIERSPEC_PARENT", ""):
        end_with(int(parent))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path.insert(0, str(Path(__file__).parent))
    worker = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "close":
            break
        try:
            if worker is None:
                worker = importlib.import_module(sys.argv[1]).Worker()
            if request["do"] == "open":
                answer = worker.open(request["model"], request["setting"])
            else:
                answer = worker.generate(request)
        except BaseException as error:  # libraries raise all kinds, even some that are not derived from Exception
            lines = str(error).strip().splitlines() or [type(error).__name__]
            answer = {"error": f"{type(error).__name__}: {lines[-1]}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    os._exit(0)  # some libraries hang while their threads shut down


if __name__ == "__main__":
    main()
