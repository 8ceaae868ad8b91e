"""Draft models of their own: their loss, a run that resumes, the folder, and the command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import train_ladder
from torch.nn import functional

import hierspec
from hierspec.checkpoints.load import load_checkpoint
from hierspec.cli.main import main
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.train.distillation import distances
from hierspec.train.draft_models import DraftModelsObjective as Objective
from hierspec.train.draft_models import DraftShape, measured, new_model, shapes_of, train_draft_models
from hierspec.train.loop import Settings
from hierspec.train.network import Network
from hierspec.train.synthesise import Texts


def test_the_distance_and_its_gradients_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hierspec.train.distillation._SLICE_CPU", 3 * 40)  # three positions a slice
    torch.manual_seed(0)
    feature, head = torch.randn(7, 8), torch.randn(40, 8)
    drafts = [(torch.randn(7, size, requires_grad=True), torch.randn(40, size, requires_grad=True)) for size in (4, 6)]
    found = distances(feature, head, drafts)
    (found[0].divergence + 2 * found[1].divergence).backward()
    p = functional.linear(feature, head).softmax(-1)
    for number, (features, own) in enumerate(drafts):
        ours = features.grad, own.grad
        features.grad = own.grad = None
        logits = functional.linear(features, own)
        expected = functional.kl_div(logits.log_softmax(-1), p, reduction="batchmean")
        ((1 + number) * expected).backward()
        torch.testing.assert_close(found[number].divergence, expected.detach())
        torch.testing.assert_close(found[number].overlap, torch.minimum(p, logits.softmax(-1)).sum(-1).mean().detach())
        torch.testing.assert_close(found[number].agreement, (logits.argmax(-1) == p.argmax(-1)).float().mean())
        for one, other in zip(ours, (features.grad, own.grad), strict=True):
            torch.testing.assert_close(one, other)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Network:
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("models") / "target"))
    return Network(checkpoint.config, checkpoint.weights).frozen("cpu", torch.float32)


@pytest.fixture(scope="module")
def texts() -> Texts:
    tokens = torch.randint(3, 259, (12, 24), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return Texts(tokens, torch.ones_like(tokens, dtype=torch.bool))


def test_a_stopped_run_resumes_and_learns(target: Network, texts: Texts, tmp_path: Path) -> None:
    shapes = shapes_of([(1, 64)])
    whole = Settings(steps=12, batch=4, rate=1e-2, checkpoint=tmp_path / "work")
    config = DraftShape(1, 64).config(target.config)
    before = measured(Objective(target, {"draft": new_model(config, target)}), texts)["draft"]
    train_draft_models(target, texts, texts, shapes, replace(whole, steps=6))
    models, run, figures = train_draft_models(target, texts, texts, shapes, whole)
    assert run.steps == 12
    assert list(models) == list(figures) == ["draft-1x64"]
    assert figures["draft-1x64"]["divergence"] < before["divergence"]
    assert figures["draft-1x64"]["1 - TV"] > before["1 - TV"]


def test_the_script_writes_folders_that_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, ids = tiny_checkpoint(tmp_path / "model"), tmp_path / "ids.txt"
    ids.write_text("5 6 7 8 9 10 11 12\n" * 40)
    command = ["--tokens", str(ids), "--minutes", "5", "--steps", "3", "--shapes", "1x64,2x128", "--length", "16"]
    command += ["--batch", "4", "--model", str(source), "--device", "cpu", "--output", str(tmp_path / "ladder")]
    assert train_ladder.main([*command, "--call-minutes", "0"]) == 0  # pauses before its first step, models and all
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["finished"], document["steps"], len(document["models"])) == (False, 0, 2)
    assert train_ladder.main([*command, "--results", str(tmp_path / "record.json")]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads((tmp_path / "record.json").read_text())
    assert (document["finished"], document["steps"]) == (True, 3)
    model = hierspec.load(source)
    tiers = tuple(TierPlan(draft=str(tmp_path / "ladder" / name), gather=2) for name in ("draft-2x128", "draft-1x64"))
    drafted = model.generate([5, 6, 7], plan=Plan(tiers=tiers), max_tokens=12)
    assert drafted.tokens == model.generate([5, 6, 7], plan="plain", max_tokens=12).tokens
    assert load_checkpoint(tmp_path / "ladder" / "draft-1x64", torch.bfloat16).config.hidden == 64
    ids.write_text("5 6 999\n" * 40)
    assert train_ladder.main(command) != 0
    assert "outside the model's vocabulary" in capsys.readouterr().err


def test_the_command_trains_from_the_models_own_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tiny_checkpoint(tmp_path / "model")
    command = ["train", "model", str(source), "--shapes", "1x64", "--steps", "2", "--batch", "2", "--device", "cpu"]
    command += ["--conversations", "8", "--length", "32", "--write-batch", "4", "--output", str(tmp_path / "ladder")]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [Path(folder).name for folder in document["folders"]] == ["draft-1x64"]
    assert (tmp_path / "ladder" / "draft-1x64" / "tokenizer.json").is_file()


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(HierspecError, match="multiple of 64"):
        DraftShape(2, 100)
