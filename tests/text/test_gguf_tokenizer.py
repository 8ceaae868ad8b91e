"""GGUF metadata -> tokenizer folder: the same ids as the tokenizer the metadata was made from."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from hierspec.core.errors import HierspecError
from hierspec.text.gguf_tokenizer import write_tokenizer
from hierspec.text.tokenizer import Tokenizer

CORPUS = [
    "In 1984 the 365 clocks of the 12 towers struck thirteen; we'll say it's late, THEY'RE early.",
    "def total(values: list[int]) -> int:\n\treturn sum(values)  # 100 + 23\n\n",
    "Ça déjà vu, naïve e\u0301te\u0301 ½ Ⅷ ٣ 漢字かな हिन्दी 😀👨‍👩‍👧 — “quoted” …",
    "   leading,   inner   and trailing   \r\n\r\n\tspace \u00a0 \u3000 ",
]
PIECES = ["a", "The", " the", "é", "e\u0301", "漢", "😀", " ", "  ", "\t", "\n", "\r\n", "7", "1984", "½", "'s", "'LL"]
PIECES += ["!", "...", "<|im_start|>", "<|im_end|>", "<think>", "_", "\u00a0", "हि", "x=1;", "/", "\x00"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SEED_CODER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(count: int = 150) -> list[str]:
    choose = random.Random(0)
    return CORPUS + ["".join(choose.choices(PIECES, k=choose.randint(1, 20))) for _ in range(count)]


def original(pre: str) -> Backend:
    """Tokenizers as their models ship them, trained on a few lines."""
    backend = Backend(models.BPE(ignore_merges=pre == "llama-bpe"))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    steps: list[Any] = [level]
    if pre == "smollm":
        steps = [pre_tokenizers.Digits(individual_digits=True), level]
    elif pre != "gpt-2":
        pattern = {"llama-bpe": LLAMA3, "seed-coder": SEED_CODER}.get(pre, LLAMA3.replace("{1,3}", ""))
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), level]
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS * 2, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return backend


def metadata_of(backend: Backend, pre: str, **more: Any) -> dict[str, Any]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = {token.content: 3 if token.special else 4 for token in backend.get_added_tokens_decoder().values()}
    merges = json.loads(backend.to_str())["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [kinds.get(token, 1) for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "seed-coder"])
def test_byte_level_ids_equal_the_original(pre: str, tmp_path: Path) -> None:
    backend = original(pre)
    write_tokenizer(metadata_of(backend, pre, add_bos_token=False), tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in texts():
        ids = ours.encode(text, special=True)
        assert ids == backend.encode(text).ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == backend.decode(ids)


def test_the_kinds_of_splits_differ() -> None:
    # Guards the test above: with one split for all it would prove nothing.
    ids = {pre: tuple(original(pre).encode("1984 365 they'RE").ids) for pre in ("gpt-2", "smollm", "llama-bpe")}
    assert len(set(ids.values())) == 3


@pytest.mark.parametrize(
    ("pre", "more", "begin", "end"),
    [
        ("llama-bpe", {}, [1], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_beginning_and_end(pre: str, more: dict[str, Any], begin: list[int], end: list[int], tmp_path: Path) -> None:
    write_tokenizer(metadata_of(original(pre), pre, **more), tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    inner = ours.encode("the late", begin=False)
    assert ours.encode("the late") == theirs("the late")["input_ids"] == [*begin, *inner, *end]


def test_chat_template_and_ends(tmp_path: Path) -> None:
    metadata = metadata_of(original("smollm"), "smollm", eot_token_id=0)
    metadata["tokenizer.chat_template"] = "{% for m in messages %}<|im_start|>{{ m.content }}\r\n{% endfor %}"
    write_tokenizer(metadata, tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.stop_ids == (2, 0)
    assert tokenizer.bos_id == 1
    ids = tokenizer.encode_chat([{"role": "user", "content": "the"}])
    assert ids[0] == 1
    assert tokenizer.decode(ids) == "the\n"  # Jinja writes every line end as \n


WORDS = ["the", "three", "trees", "there", "breathe", "these", "other", "brother", "bother", "them", "gather", "hence"]


def sentencepiece_metadata(**more: Any) -> dict[str, Any]:
    """A vocabulary as SentencePiece writes it: controls, bytes, joined pieces by score, single letters last."""
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False, special_tokens=[])
    backend.train_from_iterator([word for word in WORDS for _ in range(3)], trainer)
    vocabulary = backend.get_vocab()
    learned = sorted(vocabulary, key=vocabulary.__getitem__)
    joined, letters = [t for t in learned if len(t) > 1], [t for t in learned if len(t) == 1]
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*fixed, *joined, *letters, "[INST]", "<extra>"]
    scores = [0.0] * len(fixed) + [-float(i) for i in range(len(joined) + len(letters))] + [0.0, 0.0]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(joined) + len(letters)), 4, 3]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


def naive_sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """SentencePiece's rule: join the neighbours with the best score until nothing joins."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == 1}
    score = {token: metadata["tokenizer.ggml.scores"][i] for token, i in ids.items()}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while pairs := [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in score]:
        _, index = min(pairs)
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


def test_sentencepiece_ids_equal_its_rule(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata()
    write_tokenizer(metadata, tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    choose = random.Random(0)
    letters = [*WORDS, *"theranb", " ", "  ", "é", "漢", "😀", "\n", "<0x41>", "</s"]
    for _ in range(200):
        text = "".join(choose.choices(letters, k=choose.randint(1, 15)))
        ids = ours.encode(text)
        assert ids == [1, *naive_sentencepiece(text, metadata)] == theirs(text)["input_ids"]
        assert ours.decode(ids) == text == theirs.decode(ids, skip_special_tokens=True)


def test_sentencepiece_marked_tokens(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=False, add_bos_token=False)
    write_tokenizer(metadata, tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    user_defined, control = tokenizer.token_id("[INST]"), tokenizer.token_id("<extra>")
    assert tokenizer.encode("[INST]<extra>", special=True) == [user_defined, control]
    literal = tokenizer.encode("[INST]<extra></s>")  # a control token in plain text stays text
    assert literal[0] == user_defined
    assert control not in literal
    assert 2 not in literal
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = metadata_of(original("gpt-2"), "gpt-2")
    for change, words in [
        ({"tokenizer.ggml.pre": "tomorrow"}, "'tomorrow'"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.tokens": []}, "no vocabulary"),
        ({"tokenizer.ggml.token_type": [1]}, "do not fit"),
        ({"tokenizer.ggml.merges": ["nothing known"]}, "merges do not fit"),
    ]:
        with pytest.raises(HierspecError, match=words):
            write_tokenizer(good | change, tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 5},
        {"tokens": ["a", 5]},
        {"tokens": "abc"},
        {"token_type": ["a", "b", "c"]},
        {"token_type": 1.5},
        {"scores": ["x"] * 3},
        {"merges": [1, 2]},
        {"merges": ["x y"]},
        {"model": ["gpt2"]},
        {"pre": ["default"]},
    ],
)
def test_a_vocabulary_of_other_types_is_one_sentence(changes: dict[str, Any], tmp_path: Path) -> None:
    good = {"model": "gpt2", "pre": "default", "tokens": ["a", "b", "ab"], "merges": ["a b"], "bos_token_id": "a"}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in good.items()}
    write_tokenizer(metadata, tmp_path)  # an id of another type is left out
    with pytest.raises(HierspecError, match="This GGUF file") as caught:
        write_tokenizer(metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}, tmp_path)
    assert str(caught.value).isprintable()
