"""--history: a file or a database that servers share, refused in one sentence where there is none."""

from __future__ import annotations

import pytest
from redis_server import RedisServer, free_port, needs_redis

import hierspec
from hierspec.cli.main import main
from hierspec.core.plan import Plan

ONLY_HISTORY = Plan(stores=("history",), budget=8)


@pytest.mark.parametrize("command", [["generate", "-p", "Hi"], ["serve"], ["chat"], ["store", "info"]])
def test_no_database_is_refused_before_a_model_is_loaded(command, capsys, monkeypatch):
    monkeypatch.setattr("hierspec.language_model.load", lambda *_, **__: pytest.fail("it was loaded"))
    url = f"redis://127.0.0.1:{free_port()}/0"
    assert main([*command, "--history", url]) != 0
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"No Redis server answers at {url}" in said
    assert "--history" in said


def test_a_database_of_another_kind_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "-p", "Hi", "--history", "postgres://here/0"])
    assert "redis://HOST:PORT/NUMBER" in capsys.readouterr().err


@needs_redis
def test_what_one_model_wrote_another_process_would_draft(tiny, tmp_path, capsys):
    redis = RedisServer(tmp_path)
    try:
        for number, namespace in enumerate(("anna", "anna", "bert")):
            with hierspec.load(tiny, history=redis.url, backend="torch", keep_learnt=False) as model:
                answer = model.generate("Hi", plan=ONLY_HISTORY, max_tokens=40, namespace=namespace, raw=True)
                plain = model.generate("Hi", plan="plain", max_tokens=40, raw=True)
            assert answer.tokens == plain.tokens
            assert ("history" in answer.sources) == (number == 1)
        assert main(["store", "info", tiny, "--history", redis.url, "--json"]) == 0
        assert '"namespaces": 2' in capsys.readouterr().out
        assert main(["store", "drop", "history", tiny, "--history", redis.url]) == 0
        assert main(["store", "info", tiny, "--history", redis.url, "--json"]) == 0
        assert '"documents": 0' in capsys.readouterr().out
    finally:
        redis.kill()


def test_a_file_may_be_named_too(tiny, tmp_path):
    file = tmp_path / "mine.sqlite"
    with hierspec.load(tiny, history=file, keep_learnt=False) as model:
        model.generate("Hi", plan=ONLY_HISTORY, max_tokens=40, raw=True)
    (tmp_path / "mine.txt").write_text("another's")
    assert main(["store", "info", tiny, "--history", str(file)]) == 0
    assert main(["store", "drop", "history", tiny, "--history", str(file)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
