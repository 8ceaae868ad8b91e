"""Whatever is given as a prompt is read, or refused in one sentence that says what to do."""

from collections import UserDict

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Library

import hierspec
from hierspec import HierspecError
from hierspec.prompt_ids import prompt_ids
from hierspec.testing.checkpoints import write_byte_tokenizer
from hierspec.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
# Reads every variable there may be, and strips what it writes, as many templates do.
TEMPLATE = (
    "{% if tools %}[{{ tools[0]['name'] }}]{% endif %}"
    "{% if enable_thinking is defined %}({{ 'think' if enable_thinking else 'no' }}){% endif %}{{ style }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def bare(folder):
    return Tokenizer(Library.from_file(str(folder / "tokenizer.json")))


@pytest.fixture(scope="module")
def curious(folder):
    return Tokenizer(Library.from_file(str(folder / "tokenizer.json")), chat_template=TEMPLATE)


class BatchEncoding(UserDict):
    """As transformers returns one."""


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6, 7],
        (5, 6, 7),
        range(5, 8),
        np.array([5, 6, 7]),
        np.array([[5, 6, 7]], np.int32),
        [np.int64(5), np.int32(6), 7],
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]]),
        list(torch.tensor([5, 6, 7])),
        [[5, 6, 7]],
        BatchEncoding(input_ids=[5, 6, 7], attention_mask=[1, 1, 1]),
        BatchEncoding(input_ids=torch.tensor([[5, 6, 7]])),
    ],
)
def test_ids_may_come_in_any_of_the_usual_containers(tokenizer, prompt):
    ids = prompt_ids(tokenizer, prompt, False, {})
    assert ids == [5, 6, 7]
    assert all(type(token) is int for token in ids)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (None, "not None"),
        (7, "not 7"),
        (1.5, "not 1.5"),
        (b"hello", "decode them first"),
        pytest.param(object(), "this is something else", id="object"),
        ({1, 2}, "this is something else"),
        (["a", "b"], "call generate_many"),
        ([[1, 2], [3]], "call generate_many"),
        (torch.tensor([[1, 2], [3, 4]]), "call generate_many"),
        ([MESSAGES, MESSAGES], "call generate_many"),
        (MESSAGES[0], "as a list, also a single one"),
        ([1.0, 2.0], "whole numbers and nothing else"),
        ([True, False], "whole numbers and nothing else"),
        ([1, "a"], "whole numbers and nothing else"),
        ([1, None], "whole numbers and nothing else"),
        (torch.tensor([1.5]), "whole numbers and nothing else"),
        (np.array([True]), "whole numbers and nothing else"),
        ([torch.tensor([1, 2])], "whole numbers and nothing else"),
        ("", "The prompt is empty"),
        ("a\ud800b", "half a character"),
        ([{"role": "user", "content": "\udcff"}], "half a character"),
        ([{"content": "x"}], 'needs a "role"'),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_told_in_one_sentence(tokenizer, prompt, told):
    with pytest.raises(HierspecError, match=told) as error:
        prompt_ids(tokenizer, prompt, False, {})
    assert "\n" not in str(error.value)


def test_raw_text_may_be_empty_only_where_something_begins_it(tokenizer, bare):
    for one in (tokenizer, bare):
        with pytest.raises(HierspecError, match="The prompt is empty"):
            prompt_ids(one, "", True, {})
    assert prompt_ids(bare, "ab", False, {}) == bare.encode("ab")
    with pytest.raises(HierspecError, match="surrogate"):
        prompt_ids(bare, "\ud800", True, {})


def test_templates_are_given_their_variables(curious):
    def text(**options):
        return curious.decode(prompt_ids(curious, MESSAGES, False, options), special=True)

    usual = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert text() == text(tools=None) == usual
    assert text(tools=[{"name": "search"}]) == f"[search]{usual}"
    assert text(enable_thinking=False) == f"(no){usual}"
    assert text(enable_thinking=True, template_variables={"style": "brief"}) == f"(think)brief{usual}"
    assert (
        curious.decode(prompt_ids(curious, "hi", False, {"enable_thinking": True}), special=True) == f"(think){usual}"
    )


@pytest.mark.parametrize("content", ["The answer", "The answer ", " is", "", "ends<|im_end|>"])
@pytest.mark.parametrize("template", [TEMPLATE, None])
def test_an_answer_is_continued_where_transformers_continues_it(folder, curious, tokenizer, template, content):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    ours = curious if template else tokenizer
    expected = theirs.apply_chat_template(
        messages, chat_template=template, tokenize=False, continue_final_message=True, style=""
    )
    ids = prompt_ids(ours, messages, False, {"continue_final_message": True})
    assert ours.decode(ids, special=True) == expected


@pytest.mark.parametrize(
    ("prompt", "options", "told"),
    [
        ("x", {"continue_final_message": True}, "needs a last message of the assistant"),
        (MESSAGES, {"continue_final_message": True}, "needs a last message of the assistant"),
        ([{"role": "assistant", "content": None}], {"continue_final_message": True}, "needs a last message"),
        (MESSAGES, {"tools": [len]}, "tools must be a list of JSON schemas"),
        (MESSAGES, {"tools": "search"}, "tools must be a list of JSON schemas"),
        (MESSAGES, {"template_variables": ["style"]}, "template_variables must be a table"),
        ([1, 2], {"tools": [{"name": "search"}]}, "tools is for a chat template, and this prompt is token ids"),
    ],
)
def test_wrong_options_are_told(tokenizer, prompt, options, told):
    with pytest.raises(HierspecError, match=told):
        prompt_ids(tokenizer, prompt, False, options)


def test_options_of_templates_need_a_template(tokenizer, bare):
    with pytest.raises(HierspecError, match="this prompt is raw text; leave it out"):
        prompt_ids(tokenizer, "x", True, {"enable_thinking": False})
    with pytest.raises(HierspecError, match="a model without a chat template"):
        prompt_ids(bare, "x", False, {"template_variables": {"a": 1}})


def test_a_model_that_is_loaded_already_is_refused():
    for source in (torch.nn.Linear(1, 1), 7):
        with pytest.raises(HierspecError, match="load takes a model's folder, file or hub name"):
            hierspec.load(source)  # type: ignore[arg-type]
