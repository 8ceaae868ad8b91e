"""The tokenizer of a folder: the same ids and text as transformers reads from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from hierspec.core.errors import HierspecError
from hierspec.text.tokenizer import Tokenizer

SENTENCES = [
    "The river ran past 1234 houses, and nobody counted them twice.",
    "def area(width, height):\n    return width * height  # simple\n",
    "Ünïcödé, 漢字, हिन्दी and 😀 travel together.",
    "  spaces   and\ttabs\r\n\n\nend ",
    "it's they'll WE'RE don't",
    "",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def train() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|begin|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES * 3, trainer)
    return backend


BACKEND = train()


def folder_with(path: Path, template_processor: bool = False, **files: Any) -> Path:
    backend = Backend.from_str(BACKEND.to_str())
    if template_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
        )
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


BEGIN = {"content": "<|begin|>", "__type": "AddedToken"}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "bare": {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}},
    "post-processor": {"template_processor": True, "tokenizer_config": {"bos_token": "<|begin|>"}},
    "add_bos_token": {"tokenizer_config": {"bos_token": BEGIN, "add_bos_token": True}},
    "tokenizer.json outranks": {
        "template_processor": True,
        "tokenizer_config": {"bos_token": "<|begin|>", "add_bos_token": False},
    },
    "both ends": {
        "tokenizer_config": {
            "bos_token": "<|begin|>",
            "eos_token": "<|im_end|>",
            "add_bos_token": True,
            "add_eos_token": True,
        }
    },
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_ids_and_text_equal_transformers(name: str, tmp_path: Path) -> None:
    files = {"tokenizer_config": {}, **CONFIGURATIONS[name]}
    files["tokenizer_config"] = {"tokenizer_class": "PreTrainedTokenizerFast", **files["tokenizer_config"]}
    folder = folder_with(tmp_path, **files)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*SENTENCES, "a<|im_end|>b <|begin|>"]:
        ids = ours.encode(text, special=True)
        assert ids == theirs(text)["input_ids"]
        assert ours.encode(text, special=True, begin=False) == theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, special=True) == theirs.decode(ids, skip_special_tokens=False)
        assert ours.decode(ours.encode(text)) == text  # control tokens in the text are characters here
    assert ours.vocabulary_size == len(theirs)
    assert ours.bos_id == theirs.bos_token_id


def test_control_tokens_in_text_are_characters_unless_asked(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert tokenizer.encode("<|im_end|>", special=True) == [end]
    assert end not in tokenizer.encode("<|im_end|>")


def test_pieces_are_exact_bytes(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    for text in SENTENCES:
        assert b"".join(map(tokenizer.piece, tokenizer.encode(text))) == text.encode()
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert (tokenizer.piece(end), tokenizer.piece(end, special=True)) == (b"", b"<|im_end|>")
    assert tokenizer.piece(tokenizer.vocabulary_size + 5) == tokenizer.piece(-1) == b""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"config": {"eos_token_id": 1}}, (1,)),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [7, 1]}}, (7, 1)),
        ({"generation_config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, (7, 2)),
        ({"tokenizer_config": {"eos_token": {"content": "<|im_end|>", "__type": "AddedToken"}}}, (2,)),
        ({"config": {"eos_token_id": None}, "special_tokens_map": {"eos_token": "<|im_end|>"}}, (2,)),
    ],
)
def test_stop_ids(files: dict[str, Any], expected: tuple[int, ...], tmp_path: Path) -> None:
    assert Tokenizer.from_folder(folder_with(tmp_path, **files)).stop_ids == expected


def test_chat_equals_transformers(tmp_path: Path) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin|>", "chat_template": TEMPLATE}
    folder = folder_with(tmp_path, template_processor=True, tokenizer_config=config)
    ours, theirs = Tokenizer.from_folder(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": SENTENCES[2]}, {"role": "assistant", "content": SENTENCES[0]}]
    assert ours.has_chat_template
    expected = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert ours.encode_chat(chat) == expected
    assert ours.encode_chat(chat).count(ours.bos_id) == 1


def test_where_a_chat_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    folder = folder_with(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(folder).render_chat([]) == "named"
    (folder / "chat_template.jinja").write_text("file")
    assert Tokenizer.from_folder(folder).render_chat([]) == "file"


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HierspecError, match=r"There is no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path))
    with pytest.raises(HierspecError, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "x"}])
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HierspecError, match=r"config\.json cannot be read: it is not JSON"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(HierspecError, match="not a tokenizer that hierspec can read"):
        Tokenizer.from_folder(tmp_path)


def test_an_unknown_decoder_is_refused() -> None:
    backend = Backend(models.WordPiece({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(HierspecError, match="WordPiece"):
        Tokenizer(backend)
