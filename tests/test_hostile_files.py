"""A few cases of the soak of hostile files; `tests/soak/hostile_files.py` runs thousands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parent / "soak" / "hostile_files.py"


def test_a_hostile_file_is_answered_with_a_text_or_a_sentence(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, str(SOAK), "--seed", "7", "--count", "150", "--workers", "1", "--output", str(record)]
    done = subprocess.run(command, capture_output=True, text=True)
    written = json.loads(record.read_text())
    assert written["failures"] == []
    assert sum(written["outcomes"].values()) == written["count"] == 150
    assert done.returncode == 0
