"""A chat reads what its template is given, and goes on with answers that were cut short."""

from dataclasses import replace

import pytest

import hierspec
from hierspec import Chat, HierspecError
from hierspec.testing.checkpoints import tiny_checkpoint

TEMPLATE = (
    "{% if tools %}[{{ tools[0]['name'] }}]{% endif %}"
    "{% if enable_thinking is defined %}({{ 'think' if enable_thinking else 'no' }}){% endif %}{{ style }}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return hierspec.load(folder, backend="compiled", device="cpu")


def say(chat: Chat, text: str) -> str:
    return "".join(step.text for step in chat.say(text))


def test_every_turn_is_read_with_the_variables_of_the_chat(model):
    options = {"tools": [{"name": "search"}], "enable_thinking": False, "template_variables": {"style": "brief"}}
    chat = Chat(model, "Be kind.", max_tokens=4, **options)
    for text in ("one", "two"):
        say(chat, text)
    ids = chat.ask("three")
    start = "[search](no)brief<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
    assert model.tokenizer.decode(ids, special=True).startswith(start)
    assert model.encode([{"role": "user", "content": "x"}], **options) == Chat(model, **options).ask("x")


@pytest.mark.parametrize("plan", ["plain", "lookup"])
def test_an_answer_that_the_limit_cut_goes_on_as_if_it_had_not(model, plan):
    chat = Chat(model, max_tokens=7, plan=plan)
    asked = Chat(model).ask("tell me")
    text = say(chat, "tell me")
    text += "".join(step.text for step in chat.go_on())
    text += "".join(step.text for step in chat.go_on())
    whole = model.generate(asked, max_tokens=21, plan="plain")
    assert chat._written[1][len(asked) :] == list(whole.tokens)
    assert chat.messages == [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": whole.text}]
    before = model.decoder.layer_rows
    say(chat, "more")
    assert (model.decoder.layer_rows - before) / model.config.layers < 60  # earlier turns are not computed again
    assert len(chat.messages) == 4


def test_an_answer_that_was_left_goes_on_too(model):
    chat, asked = Chat(model, max_tokens=12, plan="plain"), Chat(model).ask("tell me")
    for _ in chat.say("tell me"):
        break
    assert chat.last.ended == "cancelled"
    for _ in chat.go_on():
        pass
    assert chat._written[1][len(asked) :] == list(model.generate(asked, max_tokens=13, plan="plain").tokens)


def test_there_must_be_something_to_go_on_with(model):
    chat = Chat(model, max_tokens=8)
    with pytest.raises(HierspecError, match="no unfinished answer"):
        chat.go_on()
    whole = say(chat, "tell me")
    finished = Chat(model, max_tokens=8, stop=whole[2:4])
    say(finished, "tell me")
    with pytest.raises(HierspecError, match="no unfinished answer"):
        finished.go_on()
    with pytest.raises(HierspecError, match="continue_final_message is for generate"):
        Chat(model, continue_final_message=True)  # type: ignore[call-arg]


def test_a_begun_answer_is_continued_by_generate(model):
    begun = [{"role": "user", "content": "tell me"}, {"role": "assistant", "content": "Well"}]
    ids = model.encode(begun, continue_final_message=True)
    assert model.tokenizer.decode(ids, special=True).endswith("<|im_start|>assistant\nWell")
    answer = model.generate(begun, continue_final_message=True, max_tokens=9)
    assert answer.tokens == model.generate(ids, plan="plain", max_tokens=9).tokens


def test_an_answer_that_went_on_ends_before_its_stop_string(model):
    whole = model.generate(Chat(model).ask("tell me"), max_tokens=24, plan="plain").text
    chat = Chat(model, max_tokens=6)
    say(chat, "tell me")
    stop = next(whole[at : at + 3] for at in range(9, len(whole)) if whole.index(whole[at : at + 3]) == at)
    chat.sampling = replace(chat.sampling, stop=(stop,), max_tokens=18)
    for _ in chat.go_on():
        pass
    assert chat.messages[-1]["content"] == whole[: whole.index(stop)]
    with pytest.raises(HierspecError, match="no unfinished answer"):
        chat.go_on()
