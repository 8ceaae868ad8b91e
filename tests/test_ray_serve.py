"""examples/ray_serve.py with two replicas: one is killed under load, the database is stopped and started."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak" / "replicas.py"
spec = importlib.util.spec_from_file_location("replicas", SOAK)
replicas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(replicas)


@pytest.mark.skipif(bool(replicas.why_not()), reason=replicas.why_not() or "-")
def test_a_dead_replica_and_a_stopped_database_cost_no_request_and_no_flushed_history(tmp_path):
    from hierspec.testing.checkpoints import tiny_checkpoint

    result = replicas.run(str(tiny_checkpoint(tmp_path / "tiny", "llama")), "hd+", requests=90, users=8, clients=8)
    assert result["failures"] == []
    assert result["histories_lost"] == 0
    assert result["histories_flushed_before_a_failure"] > 0
    assert result["prompts_with_two_texts"] == 0
    assert result["users_at_one_replica_before_the_kill"] == 8


def test_without_ray_the_soak_says_so(tmp_path):
    without = "import sys, runpy; sys.modules['ray'] = None; sys.argv[1:] = []; " + f"runpy.run_path({str(SOAK)!r}, "
    script = tmp_path / "without_ray.py"
    script.write_text(
        "import importlib.util\nreal = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'ray' else real(name, *rest)\n"
        + without
        + "run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0
    assert "there is no ray here" in done.stdout
