"""Other engines: a worker may crash, hang or print, and the run goes on with a sentence about it."""

import json
import os
import queue
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hierspec
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec_bench import peers
from hierspec_bench.peers import ENVIRONMENTS, KINDS, chosen_kinds, files, open_peers, opening, search
from hierspec_bench.peers.catalogue import PeerKind
from hierspec_bench.peers.install import Environment, install, python_of
from hierspec_bench.peers.opening import WorkerPeer
from hierspec_bench.peers.process import SERVE, PeerError, Worker

FAKE = """
import os, threading, time
print("a library greets while it is imported")

def tick():
    ticks = [0]
    def count():
        while True:
            time.sleep(0.01)
            ticks[0] += 1
    threading.Thread(target=count, daemon=True).start()
    return ticks

class Worker:
    def open(self, model, setting):
        print("loading", model)
        os.write(1, b"and from C\\n")
        if setting.get("hangs"):
            time.sleep(60)
        if setting.get("fails"):
            raise RuntimeError("first line\\nno such precision")
        self.setting = setting
        return {"version": "fake 1", "dtype": "float32", "seen": os.environ.get("PYTHONPATH", "nothing")}

    def generate(self, request):
        do = self.setting.get("do", "")
        if do == "crash":
            os.write(2, b"Segmentation fault of mine\\n"); os._exit(7)
        if do == "hang":
            time.sleep(60)
        if do == "empty":
            return {"seconds": 1.0}
        if do == "counts":
            self.ticks = getattr(self, "ticks", None) or tick()
            return {"tokens": [request["fresh"] + 5], "seconds": 1.0, "ticks": self.ticks[0]}
        tokens = request["prompt"][:1] * request["max_tokens"]
        if do == "stops":
            tokens = [5, request["stop_ids"][0], 6, 7]
        if do == "hides the stop":
            tokens = [5]
        return {"tokens": tokens, "seconds": self.setting.get("seconds", 1.0), "stopped": do == "hides the stop"}
"""


@pytest.fixture
def fake(tmp_path):
    folder = tmp_path / "workers"
    folder.mkdir()
    (folder / "serve.py").write_text(SERVE.read_text())
    (folder / "with_fake.py").write_text(FAKE)
    return [sys.executable, folder / "serve.py", "with_fake"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return hierspec.load(tiny_checkpoint(tmp_path_factory.mktemp("peers") / "tiny", "llama"))


@pytest.fixture
def peer(fake, model):
    kind = PeerKind("fake", "fake", "with_fake", ({},), "folder")
    opened = WorkerPeer(kind, model, fake, None)
    yield opened
    opened.close()


def ask(prompt=(1, 2), count=3):
    asked = {"prompt": list(prompt), "max_tokens": count, "temperature": 0, "seed": 0, "stop_ids": [2], "fresh": True}
    return {"do": "generate", **asked}


def opened_worker(command, **setting):
    worker = Worker("fake", command)
    worker.ask({"do": "open", "model": "m", "setting": setting}, 20)
    return worker


def test_stray_prints_do_not_break_the_protocol(fake, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    worker = Worker("fake", fake)
    assert worker.ask({"do": "open", "model": "m", "setting": {}}, 20)["seen"] == "nothing"
    assert worker.ask(ask(), 20)["tokens"] == [1, 1, 1]
    assert worker.last_line() == "and from C"
    worker.close()
    assert worker._process.returncode == 0


def test_a_crash_is_told_with_its_last_line(fake):
    worker = opened_worker(fake, do="crash")
    with pytest.raises(PeerError, match=r"ended with 7 .*Segmentation fault of mine\.$"):
        worker.ask(ask(), 20)
    with pytest.raises(PeerError, match=r"has ended|ended with 7"):
        worker.ask(ask(), 20)
    worker.close()


def test_a_worker_that_hangs_is_ended(fake):
    worker = opened_worker(fake, do="hang")
    with pytest.raises(PeerError, match=r"no answer to 'generate' within 0\.3 seconds"):
        worker.ask(ask(), 0.3)
    assert worker._process.returncode == -9


def test_a_worker_stands_still_while_others_are_measured(fake):
    """What its threads would do meanwhile is not left to them."""
    worker = opened_worker(fake, do="counts")
    worker.ask(ask(), 20)
    time.sleep(0.5)
    assert worker.ask(ask(), 20)["ticks"] < 25  # of fifty, had it gone on
    worker.close()
    assert worker._process.returncode == 0  # it was not killed: it heard that it was to end


def test_what_was_closed_is_not_killed_again(fake, monkeypatch):
    """Hours later its number may be that of another process."""
    worker = opened_worker(fake, do="crash")
    with pytest.raises(PeerError):
        worker.ask(ask(), 20)
    monkeypatch.setattr("hierspec_bench.peers.process.os.killpg", lambda *_: pytest.fail("killed another process"))
    worker.close()
    with pytest.raises(PeerError, match="has ended"):
        worker.ask(ask(), 20)


def test_garbage_is_told(tmp_path):
    for said in ("not json", "[1]"):
        worker = Worker("fake", [sys.executable, "-c", f"input(); print({said!r}, flush=True); input()"])
        with pytest.raises(PeerError, match="something else than a JSON object"):
            worker.ask({"do": "open"}, 20)
        assert worker._process.poll() is not None


def test_a_worker_ends_with_its_parent_also_while_it_loads(fake):
    said = (
        "import sys, time, os; from hierspec_bench.peers.process import Worker; "
        f"worker = Worker('fake', {[str(part) for part in fake]!r}); "
        'worker._process.stdin.write(b\'{"do": "open", "model": "m", "setting": {"hangs": true}}\\n\'); '
        "worker._process.stdin.flush(); time.sleep(0.5); print(worker._process.pid, flush=True); os._exit(1)"
    )
    parent = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=60, check=False)
    pid = int(parent.stdout)
    for _ in range(100):
        if not running(pid):
            break
        time.sleep(0.1)
    assert not running(pid)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
    try:  # no /proc here
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_time_is_counted_in_short_steps(fake):
    """A machine that stood still for an hour in the midst of one has not used the patience up."""
    waited = []

    class NeverThere:
        def put(self, line):
            pass  # whatever the worker's pipe ends with

        def get(self, timeout):
            waited.append(timeout)
            raise queue.Empty

    worker = Worker("fake", fake)
    worker._lines = NeverThere()
    with pytest.raises(PeerError, match=r"no answer to .open. within 4\.5 seconds"):
        worker.ask({"do": "open", "model": "m", "setting": {}}, 4.5)
    assert sum(waited) == 4.5
    assert max(waited) <= 1


def test_what_cannot_be_started_and_what_says_an_error(fake):
    with pytest.raises(PeerError, match="cannot be started"):
        Worker("fake", ["/no/such/python"])
    worker = Worker("fake", fake)
    with pytest.raises(PeerError, match=r"The engine fake says: RuntimeError: no such precision\.$"):
        worker.ask({"do": "open", "model": "m", "setting": {"fails": True}}, 20)
    assert worker.ask({"do": "open", "model": "m", "setting": {}}, 20)["version"] == "fake 1"  # it lives on
    worker.close()


def test_the_same_counting_for_all(peer, model):
    stop = sorted(model.stop_ids)[0]
    peer.open_with({"do": "stops"})
    assert peer.generate([1, 2], Sampling(max_tokens=8)).tokens == [5, stop]
    peer.open_with({"do": "hides the stop"})
    assert peer.generate([1, 2], Sampling(max_tokens=8)).tokens == [5, min(model.config.eos_ids)]
    assert peer.generate([1, 2], Sampling(max_tokens=1)).tokens == [5]
    peer.open_with({"do": "empty"})
    with pytest.raises(PeerError, match="without tokens and seconds"):
        peer.generate([1, 2], Sampling(max_tokens=8))
    assert peer.about["setting"] == {"do": "empty"}
    assert peer.about["version"] == "fake 1"


def test_a_new_conversation_is_told_and_what_cannot_be_told_is_refused(peer):
    peer.open_with({"do": "counts"})
    asked = Sampling(max_tokens=8)
    fresh = []
    for forgets in (True, False, True):
        if forgets:
            peer.forget()
        fresh.append(peer.generate([1, 2], asked).tokens == [6])
    assert fresh == [True, False, True]
    with pytest.raises(PeerError, match=r"gets temperature and seed, not top_p, stop\.$"):
        peer.generate([1, 2], replace(asked, top_p=0.9, stop=("x",)))
    peer.about["searched"] = [1]
    peer.renew()
    assert peer.about["searched"] == [1]
    assert peer.generate([1, 2], asked).tokens


def test_options_that_other_engines_do_not_know_are_refused(model, capsys):
    assert main(["bench", "run", str(model.folder), "--baselines", "openvino", "--top-p", "0.9", "--stop", "x"]) == 2
    assert "not --top-p, --stop: leave that out, or --peers" in " ".join(capsys.readouterr().err.split())


def test_room_is_made_for_the_longest_conversation(fake):
    kind = PeerKind("fake", "fake", "with_fake", ({},), "folder")

    def room(longest, most):
        small = SimpleNamespace(enlarged="", config=SimpleNamespace(context=most), folder=Path(), file=None)
        return WorkerPeer(kind, small, fake, None, longest)._resolved({})[0]["context"]

    assert [room(0, 8192), room(6000, 8192), room(9000, 8192), room(0, 2048)] == [4096, 6000, 8192, 2048]


def test_the_search_keeps_the_fastest_and_every_reason(fake, model, monkeypatch, tmp_path):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    settings = ({"seconds": 2.0}, {"fails": True}, {"seconds": 0.5}, {"seconds": 1.0})
    monkeypatch.setitem(KINDS, "fake", PeerKind("fake", "fake", "with_fake", settings, "folder"))
    monkeypatch.setitem(ENVIRONMENTS, "fake", Environment("fake", ()))
    monkeypatch.setattr(opening, "python_of", lambda environment: Path(sys.executable))
    monkeypatch.setattr(opening, "SERVE", fake[1])
    for _ in range(2):  # searched, then read from the cache
        [peer], absent = open_peers("fake,vllm:ngram", model, [[9], [9]], temperature=0.5)
        assert list(absent) == ["vllm:ngram"]
        assert "sample soundly" in absent["vllm:ngram"]
        assert peer.about["setting"] == {"seconds": 0.5}
        assert [item.get("tokens_per_second") for item in peer.about["searched"]] == [24.0, None, 96.0, 48.0]
        assert "no such precision" in peer.about["searched"][1]["error"]
        peer.close()
        monkeypatch.setattr(opening, "search", None)
    [peer], _ = open_peers("fake", model, [[9]], settings="default")
    assert peer.about["setting"] == {"seconds": 2.0}
    assert "searched" not in peer.about
    peer.close()


def test_after_a_setting_that_is_far_too_slow_others_are_tried(fake, model, monkeypatch, tmp_path):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    settings = ({"seconds": 0.5}, {"do": "hang"}, {"hangs": True}, {"seconds": 0.25})
    monkeypatch.setattr(search, "_PATIENCE", 0.5)  # of a fake, which is opened in a moment
    peer = WorkerPeer(PeerKind("fake", "fake", "with_fake", settings, "folder"), model, fake, None)
    opening._settle(peer, "1", [[9], [9]], lambda *_: None, False, lambda: False)
    assert peer.about["setting"] == {"seconds": 0.25}
    assert "gave no answer to 'generate' within 2 seconds" in peer.about["searched"][1]["error"]
    assert "gave no answer to 'open' within" in peer.about["searched"][2]["error"]
    peer.close()


def test_a_search_where_nothing_runs_gives_the_reason():
    def refuse(setting, limit):
        raise HierspecError(f"Not with {setting['n']}.")

    with pytest.raises(HierspecError, match="Not with 1"):
        search.search([{"n": 1}, {"n": 2}], refuse, lambda prompt, most, limit: None, [[1]])


@dataclass(frozen=True)
class Took:
    seconds: float
    tokens: list[int]


def test_hopeless_settings_are_dropped_after_one_prompt_and_the_search_ends_in_time():
    asked, limits, clock = [], [], [0.0]
    speeds = {"first": 10.0, "slow": 3.0, "fair": 4.0, "fast": 20.0, "fair now hopeless": 4.0, "late": 99.0}

    def generate(prompt, most, limit):
        asked.append((name[0], prompt, most))
        limits.append(limit)
        clock[0] += 1.0
        return Took(most / speeds[name[0]], [7] * most)

    name = [""]
    allowance = search.Allowance(2, 26.0, lambda: clock[0])
    with allowance.part() as over:
        found = search.search(
            [{"name": one} for one in speeds],
            lambda setting, limit: name.__setitem__(0, setting["name"]),
            generate,
            [[1, 2], [3], [4]],
            over=over,
        )
    assert found.setting == {"name": "fast"}
    assert [item.get("tokens_per_second") for item in found.searched] == [10.0, None, 4.0, 20.0, None, None]
    assert found.searched[1]["error"] == "Dropped after one prompt: 3.00 tokens/s, and the best 10.00."
    assert found.searched[4]["error"] == "Not tried: the time for searching was over."
    assert asked[0] == ("first", [2, 1], search.WARM_TOKENS)  # warm before time counts, with another text
    assert [one[1] for one in asked if one[0] == "slow"] == [[2, 1], [1, 2]]
    assert (allowance.peers, allowance.seconds) == (1, 26.0 - len(asked))
    assert limits[:5] == [None] * 4 + [3 * search.TOKENS / 10 + 60]  # nothing is known before the first has answered


def test_what_there_was_no_time_for_is_tried_the_next_time():
    speeds, tried = {"a": 10.0, "b": 30.0, "c": 20.0}, []

    def generate(prompt, most, limit):
        return Took(most / speeds[tried[-1]], [7] * most)

    def searched(over, earlier=()):
        return search.search(
            [{"name": one} for one in speeds],
            lambda setting, limit: tried.append(setting["name"]),
            generate,
            [[1, 2], [3]],
            over=over,
            earlier=earlier,
        )

    first = searched(lambda: True)
    assert (first.setting, first.complete, tried) == ({"name": "a"}, False, ["a"])
    second = searched(lambda: False, first.tried)
    assert (second.setting, second.complete, tried) == ({"name": "b"}, True, ["a", "b", "c"])
    assert [item["tokens_per_second"] for item in second.searched] == [10.0, 30.0, 20.0]


def test_something_is_tried_even_without_time():
    found = search.search([{}, {"n": 2}], lambda *_: None, lambda *_: Took(1.0, [1]), [[1]], over=lambda: True)
    assert found.setting == {}


def test_a_setting_kept_is_kept_for_this_very_list_model_and_number_of_threads(fake, model, monkeypatch):
    def key(settings, threads):
        monkeypatch.setattr(opening.torch, "get_num_threads", lambda: threads)
        return WorkerPeer(PeerKind("fake", "fake", "with_fake", settings, "folder"), model, fake, None).key()

    keys = [key(({},), 2), key(({"n": 1},), 2), key(({},), 1), key(({},), 2)]
    assert keys[0] == keys[3]
    assert len({json.dumps(one) for one in keys}) == 3


def test_an_install_that_fails_is_told_and_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    wrong = Environment("vllm", ("hierspec-no-such-package==1.0",))
    monkeypatch.setitem(ENVIRONMENTS, "vllm", wrong)
    assert main(["bench", "peers", "--install", "vllm"]) == 2
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "No matching distribution found for hierspec-no-such-package==1.0" in said["absent_peers"]["vllm"]
    with pytest.raises(HierspecError, match=r"could not be installed \(No matching distribution"):
        python_of(wrong)
    assert sorted(path.name for path in (tmp_path / "peers").iterdir()) == ["vllm.reason.txt"]  # nothing half-made
    with pytest.raises(HierspecError, match="not installed; run hierspec bench peers --install openvino"):
        python_of(ENVIRONMENTS["openvino"])


def _wheel(folder, name):
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")


def test_an_environment_is_kept_without_what_is_optional(tmp_path, monkeypatch):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for name in ("needed", "tool", "optional"):
        _wheel(tmp_path, name)
    full = Environment("full", ("needed==1.0",), optional=("optional==1.0",), tools=("tool",))
    part = Environment("part", ("needed==1.0",), optional=("missing==1.0",), tools=("tool",))
    for environment, found in ((full, "01"), (part, "0")):
        python = install(environment)
        assert python == python_of(environment)
        tried = (
            "import importlib.util as u; print(*(n for n, m in enumerate(['needed', 'optional']) if u.find_spec(m)))"
        )
        said = subprocess.run([python, "-c", tried], capture_output=True, text=True, check=True).stdout
        assert said.split() == list(found)
    assert full.wanted != replace(full, optional=()).wanted


def test_what_has_to_be_compiled_is_installed_only_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path))
    asked = []
    monkeypatch.setattr(peers, "install", lambda environment, progress: asked.append(environment.name))
    assert main(["bench", "peers", "--install"]) == 0
    assert asked == [name for name in ENVIRONMENTS if name != "llama.cpp-native"]
    assert main(["bench", "peers", "--install", "llama.cpp-native:lookup,openvino"]) == 0
    assert asked[-2:] == ["llama.cpp-native", "openvino"]
    with pytest.raises(HierspecError, match=r"llama\.cpp-native \(it is compiled here.* all leaves it out"):
        python_of(ENVIRONMENTS["llama.cpp-native"])
    native = ENVIRONMENTS["llama.cpp-native"]
    assert native.wanted != replace(native, variables=()).wanted  # another build is another environment


def test_names():
    assert [kind.name for kind in chosen_kinds("openvino,openvino,vllm")] == ["openvino", "vllm"]
    assert len(chosen_kinds("all")) == len(KINDS) == 14
    with pytest.raises(HierspecError, match="Unknown engine 'nobody'"):
        chosen_kinds("nobody")


def test_an_unknown_engine_to_install_is_told(capsys):
    assert main(["bench", "peers", "--install", "nobody"]) != 0
    assert "Unknown engine 'nobody'; those to install are transformers" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize("name", ["transformers", "transformers:lookup"])
def test_an_installed_engine_writes_what_we_write(name, model):
    """The real thing, on a tiny model, where its environment is there."""
    try:
        python_of(ENVIRONMENTS[KINDS[name].environment])
    except HierspecError as error:
        pytest.skip(str(error))
    [peer], absent = open_peers(name, model, settings="default")
    try:
        assert not absent
        answer = peer.generate([5, 6, 7, 5, 6], Sampling(max_tokens=12))
        assert answer.tokens == list(model.generate([5, 6, 7, 5, 6], plan="plain", max_tokens=12).tokens)
        assert answer.seconds > 0
        assert "transformers" in peer.about["version"]
    finally:
        peer.close()


@pytest.mark.model
def test_native_llama_writes_the_same_with_lookup_and_after_a_beginning_it_kept(default_model):
    try:
        python_of(ENVIRONMENTS["llama.cpp-native"])
    except HierspecError as error:
        pytest.skip(str(error))
    sampling = Sampling(max_tokens=16)
    opened, absent = open_peers("llama.cpp-native,llama.cpp-native:lookup", default_model, settings="default")
    try:
        assert not absent
        plain, lookup = opened
        prompt = default_model.encode("Say this once more: one, two, three, four, five, six, seven, eight, nine, ten.")
        first = plain.generate(prompt, sampling)
        assert first.tokens == lookup.generate(prompt, sampling).tokens
        assert 0 < first.first_seconds < first.seconds
        longer = [*prompt, *first.tokens, *prompt[-6:]]
        kept = plain.generate(longer, sampling)
        lookup.generate(longer[1:4], sampling)  # which shares no beginning
        assert kept.tokens == lookup.generate(longer, sampling).tokens
    finally:
        for peer in opened:
            peer.close()


def test_a_model_in_the_bits_of_its_file_is_converted_for_engines_that_read_folders(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(files, "convert", lambda path, dtype: asked.append((path, dtype)) or tmp_path / "floats")
    in_floats = SimpleNamespace(enlarged="", folder=tmp_path / "folder", file=None, name="m")
    assert files.float_folder(in_floats) == tmp_path / "folder"
    assert asked == []
    as_stored = SimpleNamespace(enlarged="", folder=tmp_path / "no weights", file=tmp_path / "m.gguf", name="m")
    assert files.float_folder(as_stored) == tmp_path / "floats"
    assert asked == [(tmp_path / "m.gguf", torch.float32)]
    assert files.gguf_of(as_stored) == tmp_path / "m.gguf"
