"""Other engines: what each needs, and the settings to search for its best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hierspec.core.errors import HierspecError

Setting = Mapping[str, Any]
FILE = "file"  # the GGUF file's own weights


@dataclass(frozen=True)
class PeerKind:
    """One way of running one engine. The first setting is its default.

    `weights` in a setting says which file to open (the GGUF file itself, or one made from it in another format); the
    other keys are for the worker.
    """

    name: str
    environment: str
    worker: str  # module in workers/
    settings: tuple[Setting, ...]
    reads: str = "gguf"  # or "folder", in Hugging Face's layout
    assistant: str = ""  # how it reads the pack's small model: "folder" or "gguf"
    reopens: bool = True  # a worker can be reopened with another setting
    samples: bool = True  # it is known to sample from the model's distribution
    learns: bool = False  # earlier answers make it faster
    note: str = ""


_TEXT = "answers come as text and are read with the model's tokenizer; stops where the GGUF file says"
_LLAMA_WEIGHTS: tuple[Setting, ...] = tuple(
    {"weights": weights, "flash": flash}
    for weights, flash in ((FILE, True), (FILE, False), ("Q4_0", True), ("Q8_0", True), ("F16", True), ("F32", True))
)
_NATIVE_WEIGHTS: tuple[Setting, ...] = tuple(
    {"weights": weights, "flash": flash} for weights in (FILE, "Q4_0", "Q8_0") for flash in (True, False)
)
_OPENVINO: tuple[Setting, ...] = (
    {"weights": FILE},
    {"weights": FILE, "precision": "f32"},
    {"weights": FILE, "precision": "f16"},
    {"weights": FILE, "precision": "f32", "group_size": 32},
    {"weights": "Q4_0", "precision": "f32"},
    {"weights": "Q8_0", "precision": "f32"},
    {"weights": "F16", "precision": "f32"},
    {"weights": "F16", "precision": "f16"},
    # If the processor multiplies matrices of bfloat16 or bytes, OpenVINO itself chooses bfloat16.
    {"weights": "Q4_0"},
    {"weights": "Q8_0"},
    {"weights": "F16"},
)


def _lookups(base: Setting, *sizes: tuple[int, int]) -> tuple[Setting, ...]:
    return tuple({**base, "lookup_ngram": ngram, "lookup_tokens": tokens} for ngram, tokens in sizes)


_LLAMA_NGRAMS = (  # weights, tokens matched, tokens drafted
    *((FILE, 12, 48), (FILE, 3, 4), (FILE, 4, 8), ("Q8_0", 3, 4)),
    *(("F16", 3, 4), ("F32", 3, 4), ("F32", 3, 2), ("F32", 4, 8)),
)
_TRANSFORMERS: Setting = {"dtype": "float32"}
_VLLM: Setting = {"dtype": "float32"}

_ALL = (
    PeerKind(
        "transformers",
        "transformers",
        "with_transformers",
        (_TRANSFORMERS, {"threads": 1, "dtype": "float32"}, {"dtype": "bfloat16"}),
        "folder",
    ),
    PeerKind(
        "transformers:lookup",
        "transformers",
        "with_transformers",
        _lookups(_TRANSFORMERS, (2, 10), (2, 4), (3, 5), (3, 10)),
        "folder",
    ),
    PeerKind(
        "transformers:assisted",
        "transformers",
        "with_transformers",
        tuple({**_TRANSFORMERS, "draft_tokens": tokens} for tokens in (5, 3, 2)),
        "folder",
        assistant="folder",
    ),
    PeerKind(
        "transformers:early-exit",
        "transformers",
        "with_transformers",
        tuple({**_TRANSFORMERS, "exit": layer, "draft_tokens": 3} for layer in (8, 4)),
        "folder",
    ),
    PeerKind("openvino", "openvino", "with_openvino", _OPENVINO),
    PeerKind(
        "openvino:lookup",
        "openvino",
        "with_openvino",
        (
            *_lookups(_OPENVINO[0], (3, 5), (2, 3), (3, 2)),
            *_lookups(_OPENVINO[1], (3, 5), (2, 3), (3, 10)),
            *_lookups(_OPENVINO[5], (3, 5)),
            *_lookups({"weights": "Q8_0"}, (3, 5), (3, 2)),
        ),
    ),
    PeerKind("llama.cpp", "llama.cpp", "with_llama", _LLAMA_WEIGHTS, note=_TEXT),
    PeerKind(
        "llama.cpp:ngram",
        "llama.cpp",
        "with_llama",
        tuple(
            {"weights": weights, "flash": True, "ngram": ngram, "draft_tokens": tokens}
            for weights, ngram, tokens in _LLAMA_NGRAMS
        ),
        note=_TEXT,
    ),
    PeerKind(
        "llama.cpp:draft",
        "llama.cpp",
        "with_llama",
        tuple(
            {"weights": weights, "flash": True, "draft_tokens": tokens}
            for weights, tokens in ((FILE, 3), (FILE, 5), ("Q8_0", 3), ("F32", 3), ("F32", 2))
        ),
        assistant="gguf",
        note=_TEXT,
    ),
    PeerKind("llama.cpp-native", "llama.cpp-native", "with_llama_native", _NATIVE_WEIGHTS),
    PeerKind(
        "llama.cpp-native:lookup",
        "llama.cpp-native",
        "with_llama_native",
        (
            *_lookups(_NATIVE_WEIGHTS[0], (2, 10), (2, 4), (3, 3)),
            *_lookups(_NATIVE_WEIGHTS[2], (2, 10), (2, 4), (3, 3), (2, 2), (3, 2), (4, 2), (3, 1)),
            *_lookups(_NATIVE_WEIGHTS[4], (2, 4), (3, 2)),
        ),
    ),
    PeerKind("vllm", "vllm", "with_vllm", (_VLLM, {"dtype": "bfloat16"}), "folder", reopens=False),
    PeerKind(
        "vllm:ngram",
        "vllm",
        "with_vllm",
        tuple({**_VLLM, "method": "ngram", "lookup_ngram": n, "draft_tokens": k} for n, k in ((3, 5), (3, 3))),
        "folder",
        reopens=False,
        samples=False,
    ),
    PeerKind(
        "vllm:suffix",
        "vllm",
        "with_vllm",
        ({**_VLLM, "method": "suffix", "draft_tokens": 8},),
        "folder",
        reopens=False,
        samples=False,
        learns=True,
    ),
)
KINDS = {kind.name: kind for kind in _ALL}


def chosen_kinds(names: str | list[str]) -> list[PeerKind]:
    """Engines by name, separated by commas; "all" is every one."""
    asked = [name for name in (names.split(",") if isinstance(names, str) else names) if name]
    if "all" in asked:
        return list(KINDS.values())
    unknown = [name for name in asked if name not in KINDS]
    if unknown:
        raise HierspecError(f"Unknown engine {unknown[0]!r}; choose from {', '.join(KINDS)}, or all.")
    return [KINDS[name] for name in dict.fromkeys(asked)]
