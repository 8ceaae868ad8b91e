"""Checkpoints: whole folders load without copies, anything else is one sentence; and the paths of the cache."""

import errno
import json
import sys
import time
import types
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from hierspec.checkpoints.families import FAMILIES
from hierspec.checkpoints.load import expected_tensors, load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.paths import cache_folder, whole_file, whole_folder
from hierspec.testing.checkpoints import SPECIAL_TOKENS, tiny_checkpoint, tiny_config


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIERSPEC_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_as_transformers_wrote_it(family: str, tmp_path: Path) -> None:
    import transformers

    folder = tiny_checkpoint(tmp_path / "ours", family)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    model.save_pretrained(tmp_path / "theirs")
    for source in (folder, tmp_path / "theirs"):
        loaded = load_checkpoint(source)
        assert loaded.config == tiny_config(family)
        assert list(loaded.weights) == list(expected_tensors(loaded.config))
        for name, tensor in loaded.weights.items():
            assert torch.equal(tensor, model.state_dict()[name]), name


def test_weights_are_mapped_not_read(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    loaded = load_checkpoint(folder)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder / "model.safetensors") in maps.read_text()
    assert loaded.name == "m"
    assert loaded.folder == folder
    assert loaded.dtype == torch.float32


def test_other_dtypes_shards_and_extra_tensors(tmp_path: Path) -> None:
    whole = load_checkpoint(tiny_checkpoint(tmp_path / "whole", dtype=torch.bfloat16), torch.float16)
    many = load_checkpoint(str(tiny_checkpoint(tmp_path / "many", dtype=torch.bfloat16, shards=3)), torch.float16)
    assert list(whole.weights) == list(many.weights)
    assert all(torch.equal(whole.weights[name], many.weights[name]) for name in whole.weights)
    assert {tensor.dtype for tensor in whole.weights.values()} == {torch.float16}
    stored = load_file(tmp_path / "whole" / "model.safetensors")
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(stored, tmp_path / "whole" / "model.safetensors")
    assert list(load_checkpoint(tmp_path / "whole").weights) == list(whole.weights)


def test_a_tied_head_may_be_stored_or_not(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", tied=True)
    assert "lm_head.weight" not in load_checkpoint(folder).weights
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert "lm_head.weight" not in load_checkpoint(folder).weights


def test_progress_is_reported(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    loaded = load_checkpoint(tiny_checkpoint(tmp_path / "m"), progress=lambda *step: steps.append(step))
    assert steps[-1] == ("Loading weights", len(loaded.weights), len(loaded.weights))


def test_the_tiny_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "<|im_start|>user\nGrüße, 你好 🙂\t<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < 259
    assert ids[0] == SPECIAL_TOKENS.index("<|im_start|>")
    assert "message['role']" in (folder / "chat_template.jinja").read_text()


def _assert_one_sentence(source: Any, message: str, dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(HierspecError, match=message) as caught:
        load_checkpoint(source, dtype)
    assert "\n" not in str(caught.value)


def test_sources_that_are_no_model(tmp_path: Path) -> None:
    _assert_one_sentence(tmp_path / "nowhere", "There is no model at")
    _assert_one_sentence("./nowhere/at-all", "There is no model at")
    _assert_one_sentence("nonsense", "There is no model at")
    _assert_one_sentence(tmp_path / "nowhere.gguf", "There is no file")
    _assert_one_sentence(tmp_path, "no config.json")
    (tmp_path / "notes.txt").write_text("hello")
    _assert_one_sentence(tmp_path / "notes.txt", "neither a model folder nor a .gguf file")
    _assert_one_sentence(tiny_checkpoint(tmp_path / "m"), "torch.int8", torch.int8)


@pytest.mark.parametrize("file", ["x" * 300, "../x", "a\nb", "a\0b", ""])
def test_an_index_names_files_beside_it(file: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", shards=2)
    index = folder / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": shards | {next(iter(shards)): file}}))
    _assert_one_sentence(folder, "is not the name of a file|is missing")


def test_damaged_folders(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    for damaged in (b"", b"\xff" * 64, whole[:50], whole[:-1], (2**40).to_bytes(8, "little") + whole[8:]):
        weights.write_bytes(damaged)
        _assert_one_sentence(folder, "is damaged")
    weights.write_bytes(whole)
    described = config.read_text()
    for damaged in ("", "{", "[]", "\x00", "[" * 100_000):
        config.write_text(damaged)
        _assert_one_sentence(folder, "cannot be read")
    config.write_text(described)
    (folder / "generation_config.json").write_text("{]")
    _assert_one_sentence(folder, r"generation_config\.json cannot be read")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"

    def store(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, folder / "model.safetensors")

    store({key: tensor for key, tensor in stored.items() if key != name})
    _assert_one_sentence(folder, rf"{name} \[96, 64\] is missing")
    store({**stored, name: torch.zeros(64, 96)})
    _assert_one_sentence(folder, rf"{name} should be \[96, 64\] and is \[64, 96\]")
    store({**stored, name: torch.zeros(96, 64, dtype=torch.int8)})
    _assert_one_sentence(folder, "as I8, which is not supported")
    store({key: tensor for key, tensor in stored.items() if key != "lm_head.weight"})
    _assert_one_sentence(folder, r"lm_head\.weight \[320, 64\] is missing")


def test_damaged_shards(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", shards=2)
    index = folder / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    (folder / "model-00002-of-00002.safetensors").rename(folder / "away")
    _assert_one_sentence(folder, r"model-00002-of-00002\.safetensors is missing")
    (folder / "away").rename(folder / "model-00002-of-00002.safetensors")
    for outside in ("../secret.safetensors", "/etc/passwd", ".."):
        index.write_text(json.dumps({"weight_map": {**described["weight_map"], "lm_head.weight": outside}}))
        _assert_one_sentence(folder, "not the name of a file|is missing")
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": 3}}))
    _assert_one_sentence(folder, "no weight_map")
    del described["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(described))
    _assert_one_sentence(folder, r"model\.norm\.weight \[64\] is missing")


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    _assert_one_sentence(folder, "has no weights")
    (folder / "pytorch_model.bin").write_bytes(b"")
    _assert_one_sentence(folder, "convert them to safetensors")


def test_hub_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    folder = tiny_checkpoint(tmp_path / "m")

    def snapshot_download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/absent":
            raise RuntimeError("Repository not found.\nsecond line")
        return str(folder)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert load_checkpoint("org/name").name == "org/name"
    assert asked == [("org/name", ["*.safetensors", "*.json", "*.jinja"])]
    _assert_one_sentence("org/absent", r"the hub did not give it \(Repository not found\)")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    _assert_one_sentence("org/name", r"pip install 'hierspec\[hub\]'")


def test_the_real_hub_library_respects_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    _assert_one_sentence("org/name-that-is-not-here", "the hub did not give it")


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path / "cache"
    assert cache_folder().is_dir()
    monkeypatch.delenv("HIERSPEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    assert cache_folder() == tmp_path / "shared" / "hierspec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "hierspec"
    (tmp_path / "file").write_text("in the way")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        monkeypatch.setenv("HIERSPEC_CACHE", str(path))
        with pytest.raises(HierspecError, match=r"cannot be written .*set HIERSPEC_CACHE"):
            cache_folder()


def _fail_inside(writing: AbstractContextManager[Path], error: BaseException) -> None:
    with writing as temporary:
        (temporary / "half" if temporary.is_dir() else temporary).write_text("half")
        raise error


def test_files_and_folders_are_replaced_whole(tmp_path: Path) -> None:
    file, folder = tmp_path / "a" / "file", tmp_path / "b" / "folder"
    for text in ("one", "two"):
        with whole_file(file) as temporary:
            temporary.write_text(text)
        with whole_folder(folder) as temporary:
            (temporary / text).write_text(text)
    assert file.read_text() == "two"
    assert [item.name for item in folder.iterdir()] == ["two"]
    with pytest.raises(HierspecError, match="disk is full"):
        _fail_inside(whole_file(file), OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(HierspecError, match=r"folder cannot be written \(the disk may only be read\)"):
        _fail_inside(whole_folder(folder), OSError(errno.EROFS, "Read-only file system"))
    with pytest.raises(KeyboardInterrupt):
        _fail_inside(whole_folder(folder), KeyboardInterrupt())
    assert file.read_text() == "two"
    assert [item.name for item in folder.iterdir()] == ["two"]
    assert len(list(file.parent.iterdir())) == len(list(folder.parent.iterdir())) == 1


def test_what_a_killed_process_left_is_removed_a_day_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, other = tmp_path / ".file.123-abcd.part", tmp_path / ".another.123-abcd.part"
    left.mkdir()
    other.write_text("not ours")
    with whole_file(tmp_path / "file") as temporary:
        temporary.write_text("now")
    assert left.exists()
    tomorrow = time.time() + 2 * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    with whole_file(tmp_path / "file") as temporary:
        temporary.write_text("tomorrow")
    assert not left.exists()
    assert other.exists()
