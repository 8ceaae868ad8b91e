"""`hierspec chat`: commands, messages of several lines, and how it ends."""

import json
import sys

import pytest

from hierspec.cli.main import main

END, CONTROL_C = EOFError, KeyboardInterrupt


@pytest.fixture
def talk(loaded, monkeypatch, capsys):
    """Types lines, or raises what a key raises; gives the status, the messages that were answered, and what was
    shown."""

    def talking(*typed, arguments=(), interactive=True, interrupt=(), leaves=False):
        lines, said = list(typed), []

        def read(prompt=""):
            assert bool(prompt) == interactive
            line = lines.pop(0) if lines else END
            if not isinstance(line, str):
                raise line
            return line

        from hierspec.chat import Chat

        say = Chat.say

        def recorded(self, text):
            said.append((text, [dict(message) for message in self.messages], self.plan))
            for step in say(self, text):
                yield step
                if text in interrupt:
                    raise CONTROL_C

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: interactive, raising=False)
        monkeypatch.setattr(Chat, "say", recorded)
        try:
            status = main(["chat", "--max-tokens", "3", *arguments])
        finally:
            monkeypatch.setattr(Chat, "say", say)
        assert bool(lines) == (leaves or bool(status)), "it left before all was typed, or did not leave"
        return status, said, capsys.readouterr()

    return talking


def texts(said):
    return [text for text, _, _ in said]


def test_an_empty_line_does_not_leave(talk):
    status, said, shown = talk("", "hi", "  ", "again")
    assert status == 0
    assert texts(said) == ["hi", "again"]
    assert "/help lists commands" in shown.err
    assert "cut after 3 tokens" in shown.err


def test_messages_of_several_lines(talk):
    _, said, _ = talk("one\\", "two\\", "three", '"""first', "", 'last"""', '"""', "alone", '"""', '"""short"""')
    assert texts(said) == ["one\ntwo\nthree", "first\n\nlast", "alone", "short"]


def test_control_c_stops_an_answer_and_twice_leaves(talk):
    status, said, shown = talk("hi", "more", interrupt=["hi"])
    assert (status, texts(said)) == (0, ["hi", "more"])
    assert "Stopped." in shown.err
    assert said[1][1][-1]["role"] == "assistant"  # what was written stays
    status, said, shown = talk("hi", CONTROL_C, "never", interrupt=["hi"])
    assert (status, texts(said)) == (130, ["hi"])
    status, said, shown = talk(CONTROL_C, "hi", CONTROL_C, CONTROL_C, "never")
    assert (status, texts(said)) == (130, ["hi"])
    assert "Ctrl-C once more" in shown.err


def test_commands_change_the_conversation(talk):
    _, said, shown = talk("a", "/clear", "b", "/system Be brief.", "c", "/system", "/plan plain", "d", "/plan", "/help")
    messages = [[message["content"] for message in before if message["role"] != "assistant"] for _, before, _ in said]
    assert messages == [[], [], ["Be brief."], ["Be brief.", "c"]]
    plans = [plan for _, _, plan in said]
    assert plans[0] == plans[2] != plans[3]
    assert not plans[3].stores
    assert "Be brief." in shown.err
    assert "plan plain:" in shown.err
    assert "/save FILE" in shown.err


def test_a_conversation_is_saved_to_a_new_file(talk, tmp_path):
    as_json, as_text = tmp_path / "talk.json", tmp_path / "talk.txt"
    _, _, shown = talk("hi", f"/save {as_json}", f"/save {as_text}", f"/save {as_text}", "/save")
    document = json.loads(as_json.read_text(encoding="utf-8"))
    assert [message["role"] for message in document["messages"]] == ["user", "assistant"]
    assert as_text.read_text(encoding="utf-8").startswith("user: hi\n\nassistant: ")
    assert "exists; name a new file" in shown.err
    assert "/save needs the name of a file" in shown.err


def test_what_a_command_cannot_do_ends_nothing(talk):
    long = "x" * 300
    _, said, shown = talk("/sing", "/plan hispek", f"/plan {long}", f"/save {long}", "/save a\0b", "/plan rest", "hi")
    assert texts(said) == ["hi"]
    for told in ("no command /sing", "did you mean 'hispec'?", "too long", "a NUL", "There is no corpus"):
        assert told in shown.err
    assert texts(talk("hi", "/quit", "never", leaves=True)[1]) == ["hi"]


def test_a_pipe_is_read_line_by_line(talk):
    status, said, shown = talk("hi", "", "again", interactive=False)
    assert (status, texts(said)) == (0, ["hi", "again"])
    assert "/help lists commands" not in shown.err
    status, _, shown = talk("/sing", "never", interactive=False)
    assert status == 2


def test_json_takes_every_line_as_it_is(talk):
    status, said, shown = talk("/help", "a\\", "", "b", arguments=["--json"], interactive=False)
    assert (status, texts(said)) == (0, ["/help", "a\\", "b"])
    turns = [json.loads(line) for line in shown.out.splitlines()]
    assert [turn["ended"] for turn in turns] == ["length"] * 3


def test_a_plan_that_cannot_run_is_refused_before_anybody_types(talk):
    status, said, shown = talk("hi", arguments=["--plan", "rest"])
    assert (status, said) == (2, [])
    assert "There is no corpus" in shown.err
