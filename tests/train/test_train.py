"""Training: the network with gradients equals the decoder, conversations are the model's own, students learn."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from hierspec.checkpoints.families import FAMILIES
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import (
    layers_like,
)
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.text.tokenizer import Tokenizer
from hierspec.train.divergence import ReferenceDistribution
from hierspec.train.loop import Settings, fit
from hierspec.train.measure import agreement
from hierspec.train.network import Network
from hierspec.train.own_text import answers, write_own_text
from hierspec.train.students import (
    ExitAdapter,
    FeatureDrafter,
    FrozenTargetObjective,
    draft_vocabulary,
    free_running,
)
from hierspec.train.synthesise import Template, Texts, greedy_answers, synthesise


def _network(folder: Path, architecture: str = "llama") -> tuple[Network, Tokenizer]:
    checkpoint = load_checkpoint(tiny_checkpoint(folder, architecture))
    return Network(checkpoint.config, checkpoint.weights).frozen("cpu", torch.float32), Tokenizer.from_folder(folder)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_network_equals_the_reference_implementation(tmp_path: Path, architecture: str) -> None:
    transformers = pytest.importorskip("transformers")
    network, _ = _network(tmp_path, architecture)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(3, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    last = network.config.layers
    with torch.no_grad():
        logits = functional.linear(network.norm(network(tokens, {last})[last]), network.head)
        torch.testing.assert_close(logits, reference(tokens).logits, atol=1e-5, rtol=1e-4)


def test_greedy_answers_are_the_models_own(tmp_path: Path) -> None:
    """Every answer token is the best token of a pass over the text before it, whatever else is in the batch."""
    network, tokenizer = _network(tmp_path)
    texts = greedy_answers(network, tokenizer, ["abc", "a longer prompt than the first"], most=20)
    last = network.config.layers
    with torch.no_grad():
        logits = functional.linear(network.norm(network(texts.tokens.long(), {last})[last]), network.head)
    stop = Template.of(tokenizer).to_answer[0]
    others = torch.tensor(sorted(set(network.config.eos_ids) - {stop}), dtype=torch.long)
    logits[..., others] = -torch.inf
    for row in range(2):
        positions = texts.answers[row].nonzero()[:, 0]
        assert 0 < len(positions) <= 20
        assert torch.equal(logits[row, positions - 1].argmax(-1).int(), texts.tokens[row, positions])
        prompt = tokenizer.decode(texts.tokens[row, : int(positions[0])].tolist(), special=True)
        assert prompt.endswith("assistant\n")


def test_conversations_follow_the_chat_template(tmp_path: Path) -> None:
    network, tokenizer = _network(tmp_path)
    texts = synthesise(network, tokenizer, 9, length=96, prompts=["say hello"], batch=4)
    template = Template.of(tokenizer)
    assert texts.tokens.shape == (9, 96)
    assert texts.answers.any(1).sum() >= 3  # at least those that start with a whole prompt are answered
    for row in range(9):
        tokens = texts.tokens[row].tolist()
        assert tokens[: len(template.opening)] == list(template.opening)
        first = int(texts.answers[row].nonzero()[0, 0]) if texts.answers[row].any() else None
        if first is not None:
            assert tokens[first - len(template.to_answer) : first] == list(template.to_answer)
    again = synthesise(network, tokenizer, 9, length=96, prompts=["say hello"], batch=4)
    assert torch.equal(texts.tokens, again.tokens)


def test_own_text_is_the_answers_and_the_same_for_a_seed(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "tiny", "llama")
    numbers = torch.arange(40).view(2, 20)
    texts = Texts(numbers, (numbers % 20 > 3) & (numbers < 39))
    assert list(answers(texts)) == [list(range(4, 20))]  # the other has 15 tokens
    written = []
    for name in ("a.jsonl", "b.jsonl.gz"):
        tokens = write_own_text(folder, tmp_path / name, 3, 64, ["What is it?"], seed=4, batch=2)
        opened = gzip.open if name.endswith(".gz") else open
        with opened(tmp_path / name, "rt", encoding="utf-8") as file:
            written.append((tokens, [json.loads(line) for line in file]))
    assert written[0] == written[1]
    assert written[0][0] >= 16
    assert all(list(line) == ["text"] for line in written[0][1])


def test_what_a_drafting_step_sees() -> None:
    """Step 3 at position 5: keys of step 1 up to position 3, of step 2 at 4, of step 3 at 5."""
    visible = free_running(7, 3, "cpu")[5].view(3, 7)
    assert visible[0].nonzero()[:, 0].tolist() == [0, 1, 2, 3]
    assert visible[1].nonzero()[:, 0].tolist() == [4]
    assert visible[2].nonzero()[:, 0].tolist() == [5]


@pytest.mark.parametrize(("layers", "taps"), [(1, ()), (2, (1, 3))])
def test_free_running_equals_drafting_one_token_after_the_other(
    tmp_path: Path, layers: int, taps: tuple[int, ...]
) -> None:
    """The parallel computation of training gives what a drafter does step by step at one position."""
    network, _ = _network(tmp_path)
    drafter = FeatureDrafter(network, 3, layers, taps).eval()
    if drafter.first is not None:
        torch.nn.init.normal_(drafter.first.weight, std=0.1, generator=torch.Generator().manual_seed(3))
    tokens = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(2))
    last = network.config.layers
    with torch.no_grad():
        states = network(tokens, {last, *taps})
        feature = network.norm(states[last])
        parallel = drafter.draft_features(network, tokens, states, feature)
        embedded = functional.embedding(tokens, network.embedding)
        tapped = [functional.rms_norm(states[tap], (64,), eps=network.config.norm_eps) for tap in taps]
        real = [functional.pad(part[:, :-1], (0, 0, 1, 0)) for part in (feature, *tapped)]
        for end in (6, 9):  # the last position whose predecessor's feature is the target's
            cache: list[tuple[torch.Tensor, torch.Tensor]] = []
            x = (drafter.first or drafter.fc)(torch.cat((embedded, *real), dim=-1))[:, : end + 1]
            rotation = network.rotation(0, end + 1)
            for block in drafter.blocks:
                q, k, v = block.project(x, rotation)
                attention = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = block.finish(x, attention)
                cache.append((k, v))
            drafted = drafter.norm(x)[:, -1:]
            torch.testing.assert_close(drafted[:, 0], parallel["step 1"][:, end])
            for step in (2, 3):
                position = end + step - 1
                x = drafter.fc(torch.cat((embedded[:, position : position + 1], drafted), dim=-1))
                for number, block in enumerate(drafter.blocks):
                    q, k, v = block.project(x, network.rotation(position, position + 1))
                    k, v = (torch.cat(pair, dim=2) for pair in zip(cache[number], (k, v), strict=True))
                    x = block.finish(x, functional.scaled_dot_product_attention(q, k, v, enable_gqa=True))
                    cache[number] = k, v
                drafted = drafter.norm(x)
                torch.testing.assert_close(drafted[:, 0], parallel[f"step {step}"][:, position], atol=1e-5, rtol=1e-4)


def test_divergence_and_its_gradient_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    head, feature, draft = (torch.randn(rows, 16, generator=generator) for rows in (50, 9, 9))
    draft.requires_grad_()
    reference = ReferenceDistribution(feature, head)
    divergence = reference.divergence(draft)
    log_probabilities = (feature @ head.T).log_softmax(-1)
    expected = (log_probabilities.exp() * (log_probabilities - (draft @ head.T).log_softmax(-1))).sum(-1)
    torch.testing.assert_close(divergence, expected)
    weights = torch.rand(9, generator=generator)
    (gradient,) = torch.autograd.grad((divergence * weights).sum(), draft, retain_graph=True)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), draft)
    torch.testing.assert_close(gradient, expected_gradient)
    assert float(reference.agreement(feature)) == 1.0


def test_students_learn_and_a_stopped_run_resumes(tmp_path: Path) -> None:
    network, tokenizer = _network(tmp_path / "model")
    texts = synthesise(network, tokenizer, 12, length=64, batch=12)
    vocabulary = draft_vocabulary(texts.tokens, 128, network.config)

    def fresh() -> FrozenTargetObjective:
        torch.manual_seed(0)
        return FrozenTargetObjective(network, [ExitAdapter(network, 2)], vocabulary)

    def agreed(objective: FrozenTargetObjective) -> float:
        return agreement(objective, network.head, texts, ["chat"] * len(texts))["all"]["exit 2"]

    uninterrupted, stopped = fresh(), fresh()
    before = agreed(uninterrupted)
    fit(uninterrupted, texts, Settings(steps=60, batch=4))
    assert agreed(uninterrupted) > before + 0.1
    folder = tmp_path / "state"
    # A killed run leaves its checkpoint. The learning rate depends on the step, so the same 60 steps are made.
    stopping = Settings(steps=60, batch=4, checkpoint=folder, every=0.0)
    steps: list[int] = []

    def stop(step: int, loss: float, figures: dict[str, float]) -> None:
        steps.append(step)
        if step == 50 and len(steps) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(stopped, texts, stopping, report=stop)
    resumed = fresh()
    assert fit(resumed, texts, stopping).steps == 60
    for name, parameter in uninterrupted.trained().items():
        torch.testing.assert_close(resumed.trained()[name], parameter, atol=1e-5, rtol=1e-4)


def test_an_adapter_runs_as_it_was_trained_where_layers_do_not_rotate(tmp_path: Path) -> None:
    """SmolLM3 leaves every fourth layer without rotary: what is made from such a layer has none either."""
    checkpoint = load_checkpoint(tiny_checkpoint(tmp_path, "smollm3"))
    network = Network(checkpoint.config, checkpoint.weights).frozen("cpu", torch.float32)
    assert not checkpoint.config.rotary_layers[3]
    for layer in (2, 3):
        assert layers_like(checkpoint.config, [layer]).rotary_layers == (ExitAdapter(network, layer).blocks[0].rotates,)
