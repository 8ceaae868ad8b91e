"""A tokenizer folder from the metadata of a GGUF file, which has the vocabulary but no tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown
from hierspec.text.tokenizers_guard import library_errors


class TokenType(IntEnum):
    """tokenizer.ggml.token_type"""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Split:
    """How a byte-level vocabulary splits text before its merges apply."""

    patterns: tuple[str, ...] = ()  # applied one after the other, before GPT-2's pattern or instead of it
    gpt2_pattern: bool = False
    single_digits: bool = False
    nfc: bool = False  # text is first normalised to Unicode's composed form
    ignore_merges: bool = False  # a word in the vocabulary is not built from merges
    add_bos: bool = False  # if the file does not say


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION_AND_SPACE
_QWEN2_PATTERN = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION_AND_SPACE
_QWEN35_PATTERN = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# In the order of llama.cpp's fallback, which files with "default" were made with.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT_PATTERNS = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]")

# Qwen2's pattern, without line ends after punctuation.
_SEED_PATTERN = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"

_LLAMA3 = _Split((_LLAMA3_PATTERN,), ignore_merges=True, add_bos=True)
_SMOLLM = _Split(gpt2_pattern=True, single_digits=True)
_SPLITS = {
    "default": _Split(_DEFAULT_PATTERNS),
    "gpt-2": _Split(gpt2_pattern=True),
    "smollm": _SMOLLM,
    "starcoder": _SMOLLM,
    "refact": _SMOLLM,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Split((_QWEN2_PATTERN,), nfc=True),
    "qwen35": _Split((_QWEN35_PATTERN,), nfc=True),
    "seed-coder": _Split((_SEED_PATTERN,)),
    "tekken": _Split((_TEKKEN_PATTERN,), ignore_merges=True, add_bos=True),
}
# Control tokens that end a message in every model; files older than the GGUF keys for them name only one.
_MESSAGE_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


@dataclass(frozen=True)
class _Vocabulary:
    """The metadata under tokenizer.ggml, checked."""

    model: str
    pre: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    scores: tuple[float, ...]
    merges: tuple[tuple[str, str], ...]
    special_ids: dict[str, int]  # bos, eos, unknown, padding, eot, eom: those in the file
    add_bos: bool | None
    add_eos: bool
    add_space_prefix: bool | None

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> _Vocabulary:
        def value(name: str, default: Any = None) -> Any:
            return metadata.get(f"tokenizer.ggml.{name}", default)

        tokens = _items(metadata, "tokens", str)
        if not tokens or value("model") is None:
            raise HierspecError("This GGUF file has no vocabulary; use one that was made with its tokenizer.")
        if len(set(tokens)) != len(tokens):
            raise HierspecError("This GGUF file names one token twice; make it again with a newer converter.")
        types = _items(metadata, "token_type", int) or (int(TokenType.NORMAL),) * len(tokens)
        scores = tuple(map(float, _items(metadata, "scores", (float, int))))
        if len(types) != len(tokens) or len(scores) not in (0, len(tokens)):
            raise HierspecError("This GGUF file's token types or scores do not fit its vocabulary; download it again.")
        names = ("bos", "eos", "unknown", "padding", "eot", "eom")
        special_ids = {name: value(f"{name}_token_id") for name in names}
        return cls(
            model=str(value("model")),
            pre=str(value("pre", "")),
            tokens=tokens,
            types=types,
            scores=scores,
            merges=tuple(_merge(line) for line in _items(metadata, "merges", str)),
            special_ids={n: i for n, i in special_ids.items() if isinstance(i, int) and 0 <= i < len(tokens)},
            add_bos=value("add_bos_token"),
            add_eos=bool(value("add_eos_token", False)),
            add_space_prefix=value("add_space_prefix"),
        )

    def of_type(self, *kinds: TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in kinds]

    def special(self, name: str) -> str | None:
        return self.tokens[self.special_ids[name]] if name in self.special_ids else None


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and, where the file has one,
    chat_template.jinja into `folder`, so that the folder tokenizes as the model's original tokenizer does."""
    vocabulary = _Vocabulary.from_metadata(metadata)
    with library_errors("This GGUF file's tokenizer is damaged or not supported; fetch it again."):
        _write(vocabulary, metadata.get("tokenizer.chat_template"), Path(folder))


def _write(vocabulary: _Vocabulary, template: object, folder: Path) -> None:
    if vocabulary.model == "gpt2":
        tokenizer, add_bos = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary), True
    else:
        raise HierspecError(
            f"This GGUF file's tokenizer is of the kind {shown(vocabulary.model)}; hierspec reads the kinds gpt2 and "
            "llama."
        )
    # These tokens are recognised in text before anything else, whole and unchanged.
    special = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    plain = vocabulary.of_type(TokenType.USER_DEFINED)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])

    add_bos = (add_bos if vocabulary.add_bos is None else bool(vocabulary.add_bos)) and "bos" in vocabulary.special_ids
    add_eos = vocabulary.add_eos and "eos" in vocabulary.special_ids
    begin = [vocabulary.tokens[vocabulary.special_ids["bos"]]] if add_bos else []
    end = [vocabulary.tokens[vocabulary.special_ids["eos"]]] if add_eos else []
    if begin or end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, "$B", *end],
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*begin, *end}],
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "bos_token": vocabulary.special("bos"),
        "eos_token": vocabulary.special("eos"),
        "unk_token": vocabulary.special("unknown"),
        "pad_token": vocabulary.special("padding"),
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": vocabulary.special_ids.get("bos"), "eos_token_id": _end_ids(vocabulary)},
    )
    if isinstance(template, str) and template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether such tokenizers start a text with a special token."""
    split = _SPLITS.get(vocabulary.pre)
    if split is None:
        # Any other split would silently give different tokens, and worse text.
        raise HierspecError(
            f"This GGUF file splits text in the way {shown(vocabulary.pre)}, which is not supported; "
            f"supported are {', '.join(_SPLITS)}."
        )
    tokenizer = _bpe(vocabulary, vocabulary.merges, ignore_merges=split.ignore_merges)
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2_pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE: spaces are written ▁, characters outside the vocabulary as bytes."""
    prefix = vocabulary.add_space_prefix is not False
    tokenizer = _bpe(
        vocabulary,
        vocabulary.merges or _merges_from_scores(vocabulary),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.special("unknown"),
    )
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _bpe(vocabulary: _Vocabulary, merges: Sequence[tuple[str, str]], **options: Any) -> Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    with library_errors("This GGUF file's merges do not fit its vocabulary; fetch it again."):
        return Tokenizer(models.BPE(vocab=ids, merges=list(merges), **options))


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece's merges: any two neighbours that together are a token, the highest score first."""
    if not vocabulary.scores:
        raise HierspecError("This GGUF file has neither merges nor scores for its vocabulary; download it again.")
    # Control, byte and unknown tokens never come from ordinary text, so they are not merged.
    scores = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        if kind in (TokenType.NORMAL, TokenType.UNUSED)
    }
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    # Of two ways to make one token, the longer left part comes first, as in the common conversion of such models.
    merges.sort(key=lambda merge: (-merge[0], -len(merge[1])))
    return [(left, right) for _, left, right in merges]


def _items(metadata: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> tuple[Any, ...]:
    """A list under tokenizer.ggml with items of one type; empty if it is missing."""
    items = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
        raise HierspecError(f"This GGUF file's vocabulary is damaged ({name} is not a list of them); fetch it again.")
    return tuple(items)


def _merge(line: str) -> tuple[str, str]:
    """Splits a merge "left right"; a token may begin with a space, hence the search from the second character."""
    middle = line.find(" ", 1)
    return line[:middle], line[middle + 1 :]


def _end_ids(vocabulary: _Vocabulary) -> list[int]:
    """Every id that ends a text: those the file names, and the usual ones among its control tokens."""
    named = [vocabulary.special_ids[name] for name in ("eos", "eot", "eom") if name in vocabulary.special_ids]
    control = set(vocabulary.of_type(TokenType.CONTROL))
    usual = [vocabulary.tokens.index(token) for token in _MESSAGE_ENDS if token in control]
    return list(dict.fromkeys(named + usual))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}, indent=2) + "\n", encoding="utf-8")
