"""Files of models, plans and prompts that mean harm, by seed and number: each case is one mutated file in a folder."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile_mutations import Mutation
from hostile_templates import hostile_templates
from safetensors.torch import load_file, save

from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import EXITS, FEATURE, SMALL, VOCABULARY
from hierspec.core.plan import Plan, TierPlan
from hierspec.prompts import read_prompts
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.testing.packs import tiny_eagle, tiny_eagle3, tiny_pack

_SIZES = {"hidden": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "intermediate": 32, "layers": 8, "context": 160}
_PATTERNS = (
    "(a+)+$",
    "(.*)*x",
    "(?:a|a)*b",
    "(([\\s\\S])*)*z",
    "(((",
    "\\p{L}+",
    "(.+)+\\1$",
    "(?:.|.){19}\\d",
    "(?:.|.){22}\\d",
    "",
)
_BOMBS = (
    "{{ 'x' * 10 ** 9 }}",
    "{{ ('a' * 10 ** 6) | list | map('upper') | join | length }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'abc' }}{% endfor %}{% endfor %}",
    "{{ '\\ud800' }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if a %}" * 3000,
    "",
    "{{ messages | tojson }}" * 3000,
)


@dataclass(frozen=True)
class Case:
    """A mutated file, and what a user would do with it: load a model and write four tokens, or read the file."""

    kind: str
    run: Callable[[], object]


class Originals:
    """One good file of each kind, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny_checkpoint(folder / "model", vocabulary=320, **_SIZES)
        (self.model / "generation_config.json").write_text('{"bos_token_id": 1, "eos_token_id": [2, 0]}')
        (self.model / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
        self.shards = tiny_checkpoint(folder / "shards", vocabulary=320, shards=2, **_SIZES)
        self.config = load_checkpoint(self.model, pack="none").config
        self.pack = tiny_pack(folder / "pack", self.model)
        self.eagles = [tiny_eagle(folder / "eagle", self.config), tiny_eagle3(folder / "eagle3", self.config)]
        self.gguf = folder / "model.gguf"
        self.gguf.write_bytes(_gguf(self.model, self.config))
        plan = Plan(tiers=(TierPlan(exit_layer=4), TierPlan(exit_layer=2, stores=("context",))))
        (folder / "plan.toml").write_text(plan.to_toml())
        (folder / "prompts.jsonl").write_text(
            '{"task": "qa", "turns": ["a", "b"]}\n{"category": "math", "turns": ["c"]}\n'
        )


def make_case(originals: Originals, seed: int, number: int, folder: Path) -> Case:
    """Writes the files of a case into `folder`, which must not exist."""
    chance = random.Random(f"{seed} {number}")
    kind = list(_KINDS)[number % len(_KINDS)]
    return Case(kind, _KINDS[kind](Mutation(chance), originals, folder))


def _loads(folder: Path, plan: Any = "plain", pack: Path | str = "none") -> Callable[[], object]:
    def run() -> object:
        import hierspec

        model = hierspec.load(folder, dtype="float32", backend="torch", pack=pack, kv_memory=1 << 26)
        return model.generate("Why a b?", plan=plan, max_tokens=4).tokens

    return run


def _copied(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    return folder


def _json_file(*names: str) -> Callable[[Mutation, Originals, Path], Callable[[], object]]:
    def make(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
        source = originals.shards if names == ("model.safetensors.index.json",) else originals.model
        path = _copied(source, folder) / mutation.pick(names)
        content = json.loads(path.read_text())
        if path.name == "config.json":
            content["model_type"] = mutation.pick(("llama", "mistral", "qwen2", "qwen3", "smollm3", "seed_oss"))
            content |= {"layer_types": ["full_attention"] * 8} if mutation.chance.random() < 0.2 else {}
            content["rope_scaling"] = mutation.pick((None, {"rope_type": "linear", "factor": 2.0}, _LLAMA3, _YARN))
        path.write_bytes(mutation.json(content))
        return _loads(folder)

    return make


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}


def _tokenizer(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
    path = _copied(originals.model, folder) / "tokenizer.json"
    content = json.loads(path.read_text())
    pattern, text = {"Regex": mutation.pick(_PATTERNS)}, mutation.pick(("", "x", "aa", "a" * 99999))
    replace = {
        "type": "Replace",
        "pattern": mutation.pick((pattern, {"String": mutation.pick(("", "a"))})),
        "content": text,
    }
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * mutation.pick((1, 1000)) + [
        {"SpecialToken": {"id": "zz", "type_id": 0}}
    ]
    known = {"zz": {"id": "zz", "ids": [mutation.pick((1, 4_000_000_000))], "tokens": ["zz"]}}
    changes: tuple[dict[str, Any], ...] = (
        {"pre_tokenizer": {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}},
        {"normalizer": {"type": "Sequence", "normalizers": [replace] * mutation.pick((1, 20))}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": mutation.pick(("AAAA", "", "/////w=="))}},
        {"normalizer": {"type": "Prepend", "prepend": text}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "single": single,
                "pair": [],
                "special_tokens": mutation.pick(({}, known)),
            }
        },
        {"decoder": {"type": "Sequence", "decoders": [{**replace, "pattern": {"String": ""}}, {"type": "Fuse"}]}},
        {
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 10**12, "stop": 0}],
            }
        },
        {
            "padding": {
                "strategy": {"Fixed": 10**9},
                "direction": "Right",
                "pad_to_multiple_of": 10**9,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        },
        {"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10**9}},
        {
            "added_tokens": [
                {
                    "id": mutation.pick((0, 5_000, 4_000_000_000)),
                    "content": text,
                    "single_word": False,
                    "lstrip": True,
                    "rstrip": True,
                    "normalized": True,
                    "special": True,
                }
            ]
        },
    )
    choice = mutation.chance.random()
    if choice < 0.5:
        content |= mutation.pick(changes)
    if choice > 0.4:
        part = mutation.pick(("model", "added_tokens", "pre_tokenizer", "decoder"))
        content[part] = mutation.tree(content[part])
    path.write_bytes(mutation.json(content) if mutation.chance.random() < 0.2 else json.dumps(content).encode())
    return _loads(folder)


def _template(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
    path = _copied(originals.model, folder) / "chat_template.jinja"
    match mutation.chance.randrange(4):
        case 0:
            path.write_text(mutation.pick(_BOMBS), encoding="utf-8")
        case 1:
            path.write_bytes(mutation.bytes(path.read_bytes()))
        case _:
            path.write_text(hostile_templates(mutation.chance.randrange(1 << 30), 1)[0], encoding="utf-8")
    return _loads(folder)


def _weights(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
    path = _copied(originals.model, folder) / "model.safetensors"
    path.write_bytes(_changed_file(mutation, path))
    return _loads(folder)


def _changed_file(mutation: Mutation, path: Path) -> bytes:
    match mutation.chance.randrange(3):
        case 0:
            return mutation.bytes(path.read_bytes())
        case 1:
            return mutation.safetensors(path.read_bytes())
    return save(mutation.tensors(load_file(path)))


def _pack(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
    path = _copied(originals.pack, folder) / "pack.json"
    described = json.loads(path.read_text())
    tiers = {
        EXITS: TierPlan(exit_layer=2, head="adapter"),
        FEATURE: TierPlan(draft="feature"),
        SMALL: TierPlan(draft="small"),
        VOCABULARY: TierPlan(exit_layer=2),
    }
    file, tier = mutation.pick(list(tiers.items()))
    if mutation.chance.random() < 0.25:
        path.write_bytes(mutation.json(described))
    else:
        content = _changed_file(mutation, folder / file)
        (folder / file).write_bytes(content)
        described["files"][file]["sha256"] = hashlib.sha256(content).hexdigest()
        path.write_text(json.dumps(described))
    return _loads(originals.model, Plan(tiers=(tier,)), folder)


def _eagle(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
    _copied(mutation.pick(originals.eagles), folder)
    path = folder / mutation.pick(("config.json", "model.safetensors", "model.safetensors"))
    if path.suffix == ".json":
        path.write_bytes(mutation.json(json.loads(path.read_text())))
    else:
        path.write_bytes(_changed_file(mutation, path))
    return _loads(originals.model, Plan(tiers=(TierPlan(draft=str(folder)),)))


def _gguf_file(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
    folder.mkdir()
    path = folder / "model.gguf"
    if mutation.chance.random() < 0.5:
        path.write_bytes(mutation.bytes(originals.gguf.read_bytes()))
    else:
        path.write_bytes(_gguf(originals.model, originals.config, mutation))
    return _loads(path)


def _plan(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
    folder.mkdir()
    path = folder / "plan.toml"
    text = (originals.folder / "plan.toml").read_bytes()
    values = (
        "[" * 5000,
        "9" * 5000,
        "{a = 1}",
        "[1, 2]",
        "-1",
        "1e999",
        "nan",
        "2026-01-01",
        '"\\u0000"',
        "true",
        "[[1]]",
    )
    lines = text.decode().splitlines()
    at = mutation.chance.randrange(len(lines))
    if "=" in lines[at]:
        lines[at] = f"{lines[at].split('=')[0]}= {mutation.pick(values)}"
    deep = b"a = " + b"[" * 100_000
    path.write_bytes(mutation.pick((mutation.bytes(text), "\n".join(lines).encode(), "\n".join(lines).encode(), deep)))
    return lambda: Plan.read(path)


def _prompts(mutation: Mutation, originals: Originals, folder: Path) -> Callable[[], object]:
    folder.mkdir()
    path = folder / "prompts.jsonl"
    lines = (originals.folder / "prompts.jsonl").read_bytes().splitlines()
    at = mutation.chance.randrange(len(lines))
    lines[at] = mutation.json(json.loads(lines[at]))
    path.write_bytes(b"\n".join(lines))
    return lambda: read_prompts(path)


_KINDS: dict[str, Callable[[Mutation, Originals, Path], Callable[[], object]]] = {
    "gguf": _gguf_file,
    "safetensors": _weights,
    "config": _json_file("config.json"),
    "tokenizer": _tokenizer,
    "template": _template,
    "pack": _pack,
    "eagle": _eagle,
    "settings": _json_file("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    "index": _json_file("model.safetensors.index.json"),
    "plan": _plan,
    "prompts": _prompts,
}


def _gguf(model: Path, config: Any, mutation: Mutation | None = None) -> bytes:
    """The model as a GGUF file; a mutation changes some of its values, shapes and types."""
    from hierspec.checkpoints.families import family_named

    vocabulary = json.loads((model / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*vocabulary, *(f"<{number}>" for number in range(len(vocabulary), config.vocabulary))]
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": config.context,
        "llama.block_count": config.layers,
        "llama.embedding_length": config.hidden,
        "llama.feed_forward_length": config.intermediate,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config.norm_eps,
        "llama.rope.freq_base": config.rotary.theta,
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 1.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["a b"] if "ab" in vocabulary else [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": (model / "chat_template.jinja").read_text(),
    }
    weights = load_checkpoint(model, pack="none").weights
    names = family_named("llama").gguf.names
    tensors = {names(name): (tensor.shape[::-1], 0, tensor.numpy().tobytes()) for name, tensor in weights.items()}
    if mutation:
        for _ in range(mutation.pick((1, 1, 2))):
            key = mutation.pick([*metadata, "llama.attention.key_length", "llama.expert_count", "split.count"])
            metadata[key] = mutation.pick(_GGUF_EXTREMES)
        if mutation.chance.random() < 0.5:
            name = mutation.pick(list(tensors))
            shape, code, data = tensors[name]
            shape = mutation.pick((shape, shape[::-1], (1,), (0,), (2**40, 2**40), (*shape, 1), ()))
            tensors[name] = shape, mutation.pick((0, 1, 2, 8, 12, 30, 99, code)), data
    return _gguf_bytes(metadata, tensors)


_GGUF_EXTREMES: tuple[Any, ...] = (
    *(0, 1, 3, 2**31, 2**63, -1, 0.0, 1e-9, 1e38, -1.0, float("nan"), float("inf"), True, "", "x", "llama", "yarn"),
    *("linear", "qwen2", [], [1, 2], ["a", "b"], [0.5], ["a", "a"], [2, 2], "{{ 'x' * 10 ** 9 }}", "\x00\n"),
)


def _gguf_bytes(metadata: dict[str, Any], tensors: dict[str, tuple[Any, int, bytes]]) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value: Any) -> tuple[int, bytes]:
        if isinstance(value, bool):
            return 7, struct.pack("<?", value)
        if isinstance(value, int):
            return (10, struct.pack("<Q", value)) if value > 2**31 else (5, struct.pack("<i", min(value, 2**31 - 1)))
        if isinstance(value, float):
            return 6, struct.pack("<f", value)
        if isinstance(value, str):
            return 8, text(value)
        items = [typed(item) for item in value]
        return 9, struct.pack("<IQ", items[0][0] if items else 8, len(items)) + b"".join(data for _, data in items)

    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
    for key, value in metadata.items():
        code, data = typed(value)
        parts += [text(key), struct.pack("<I", code), data]
    offset, stored = 0, []
    for name, (shape, code, data) in tensors.items():
        parts += [text(name), struct.pack("<I", len(shape)), *(struct.pack("<Q", size) for size in shape)]
        parts.append(struct.pack("<IQ", code, offset))
        padded = data + b"\0" * (-len(data) % 32)
        stored.append(padded)
        offset += len(padded)
    header = b"".join(parts)
    return header + b"\0" * (-len(header) % 32) + b"".join(stored)
