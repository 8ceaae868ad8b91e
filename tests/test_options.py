"""Options by name are those of Sampling and of chat templates, for editors and type checkers too."""

import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import hierspec
from hierspec import HierspecError, Sampling, SamplingOptions, TemplateOptions
from hierspec.options import ChatOptions, GrammarOptions, ManyCall, OneCall, Options, one_each, several_samplings, split

ROOT = Path(__file__).parent.parent


def test_every_field_of_sampling_is_an_option_of_the_same_type():
    types = {option.name: option.type for option in fields(Sampling)}
    # A Sampling makes tuples of them; a grammar may be given in several ways.
    wider = {"stop": "str | Sequence[str]", "stop_ids": "int | Sequence[int]", "grammar": "Grammar | str | None"}
    named = SamplingOptions.__annotations__ | {"grammar": GrammarOptions.__annotations__["grammar"]}
    assert {name: kind.__forward_arg__ for name, kind in named.items()} == types | wider


def test_options_of_calls_hold_all_others():
    sampling, template = (
        {*SamplingOptions.__annotations__, *GrammarOptions.__annotations__},
        {*TemplateOptions.__annotations__},
    )
    assert set(Options.__annotations__) == sampling | template
    assert set(ChatOptions.__annotations__) == sampling | template - {"continue_final_message"}
    named = {"plan", "sampling", "raw", "namespace"}
    assert set(OneCall.__annotations__) == set(ManyCall.__annotations__) == sampling | template | named


def test_options_are_split_and_unknown_ones_refused():
    assert split({"max_tokens": 3, "tools": []}) == ({"max_tokens": 3}, {"tools": []})
    with pytest.raises(HierspecError, match="did you mean 'enable_thinking'"):
        split({"enable_thinkin": True})


def test_one_for_all_or_one_for_each():
    assert one_each("auto", 2, "plan") == ["auto", "auto"]
    assert one_each(["auto", "plain"], 2, "plan") == ["auto", "plain"]
    with pytest.raises(HierspecError, match="plan must be one for all prompts or one for each: got 1 for 2"):
        one_each(["auto"], 2, "plan")


def test_seeds_of_several_answers_are_clear_and_never_meet():
    seeds = [[each.seed for each in several_samplings(Sampling(seed=seed), 50)] for seed in range(50)]
    assert [of[0] for of in seeds] == list(range(50))
    assert len({seed for of in seeds for seed in of}) == 50 * 50
    assert seeds[7] == [each.seed for each in several_samplings(Sampling(seed=7), 50)]
    assert several_samplings(Sampling(), 1)[0].seed is not None
    for wrong in (0, -1, 1.0, True, "2"):
        with pytest.raises(HierspecError, match="n must be a whole number from 1 up"):
            several_samplings(Sampling(), wrong)


SCRIPT = """\
import hierspec

model = hierspec.load("folder")
reveal_type(model.generate("x", max_tokens=5, top_p=0.9, plan="plain", enable_thinking=False))
reveal_type(model.generate("x", n=3, stop="."))
reveal_type(model.generate_many(["x"], sampling=[hierspec.Sampling()]))
reveal_type(model.generate_many(["x"], errors="return"))
reveal_type(model.generate([1, 2, 3]).logprobs)
for index, step in model.stream_many([[{"role": "user", "content": "x"}]], logprobs=2):
    reveal_type(step)
hierspec.Chat(model, temperature=0.5, tools=[])
model.generate("x", max_token=5)
model.generate("x", temperature="hot")
model.stream("x", raw="yes")
hierspec.Chat(model, continue_final_message=True)
model.generate(3.5)
"""
WRONG = {12, 13, 14, 15, 16}  # lines that must not pass
CONFIGURATION = """\
[mypy]
follow_imports = skip
ignore_missing_imports = true
"""
FOLLOWED = ["", ".chat", ".generating", ".generation", ".language_model", ".options", ".prompt_ids", ".streams"]
FOLLOWED += [".core.logprobs", ".core.sampling"]


def test_a_type_checker_knows_the_options_and_what_comes_back(tmp_path):
    """Only the files of the Python API are followed: what they import does not matter here, and takes a minute."""
    (tmp_path / "script.py").write_text(SCRIPT)
    followed = "".join(f"[mypy-hierspec{name}]\nfollow_imports = silent\n" for name in FOLLOWED)
    (tmp_path / "mypy.ini").write_text(CONFIGURATION + followed)
    source = Path(hierspec.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(tmp_path), "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={"MYPYPATH": str(source), "PATH": ""}, capture_output=True, text=True, check=False
    )
    lines = [line.split(":", 2) for line in done.stdout.splitlines() if line.startswith("script.py:")]
    notes = [said.split('"')[1] for _, _, said in lines if "Revealed type" in said]
    assert [note.replace("hierspec.generation.", "").replace("builtins.", "") for note in notes] == [
        "Generation",
        "list[Generation]",
        "list[Generation]",
        "list[Generation | Failure]",
        "tuple[hierspec.core.logprobs.TokenLogprobs, ...]",
        "TextStep",
    ], done.stdout + done.stderr
    assert {int(number) for _, number, said in lines if " error: " in said} == WRONG, done.stdout


def test_both_packages_ship_their_types():
    described = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for package in ("hierspec", "hierspec_bench"):
        assert "py.typed" in described["tool"]["setuptools"]["package-data"][package]
        assert (ROOT / "src" / package / "py.typed").is_file()
    assert "Typing :: Typed" in described["project"]["classifiers"]
    assert described["project"]["version"] == hierspec.__version__
