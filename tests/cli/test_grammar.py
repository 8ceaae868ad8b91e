"""`hierspec generate` with the options that say what an answer must look like."""

import json

import pytest

from hierspec.cli.main import main


def test_every_option_of_a_grammar(tiny, tmp_path, capsys):
    schema, lark = tmp_path / "schema.json", tmp_path / "rules.lark"
    schema.write_text(json.dumps({"enum": ["é", 12]}))
    lark.write_text('start: "x" | "yz"')
    answers = {
        ("--json-schema", str(schema)): {'"é"', "12"},
        ("--regex", "a{2}é"): {"aaé"},
        ("--grammar", str(lark)): {"x", "yz"},
        ("--choice", "yes", "--choice", "no"): {"yes", "no"},
    }
    for options, texts in answers.items():
        assert main(["generate", tiny, "-p", "abc", *options, "--check", "--plan", "hispec"]) == 0
        out, err = capsys.readouterr()
        assert out.strip() in texts
        assert "identical to plain" in err
    assert main(["generate", tiny, "-p", "abc", "--json-object", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("{")


def test_json_is_still_a_document_about_the_answer(tiny, capsys):
    assert main(["generate", tiny, "-p", "abc", "--choice", "yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "yes"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--json-schema", "nowhere.json"], "no such file"),
        (["--regex", "("], "cannot be used"),
        (["--regex", "a", "--json-object"], "cannot be given together"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tiny, capsys, options, reason):
    try:
        status = main(["generate", tiny, "-p", "abc", *options])
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert reason in capsys.readouterr().err
