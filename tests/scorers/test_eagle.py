"""EAGLE-3 heads: step by step as their definition over the whole text, and never another text."""

import json
import random

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file
from scorers.test_catalogue import Reference, assert_same, check_walk
from torch.nn import functional

import hierspec
from hierspec import HierspecError, Plan, Sampling, TierPlan
from hierspec.checkpoints.eagle import Eagle3Branch, read_eagle
from hierspec.checkpoints.load import load_checkpoint
from hierspec.core.engine import Engine
from hierspec.testing.checkpoints import tiny_checkpoint, tiny_config
from hierspec.testing.packs import tiny_eagle3

LAYERS = 8
TAPS = (2, 4, 5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_checkpoint(root / "target", "llama", layers=LAYERS)
    config = hierspec.load(root / "target", backend="torch").config
    tiny_eagle3(root / "head", config)
    tiny_eagle3(root / "whole", config, seed=1, tokens=None)
    return root


@pytest.fixture(scope="module", params=["compiled", "torch"])
def model(request, folders):
    return hierspec.load(folders / "target", backend=request.param)


class Naive(Reference):
    """The published definition for a whole text, from the tensors as they are published."""

    def __init__(self, target, head) -> None:
        super().__init__(target)
        self.w = load_file(head / "model.safetensors")

    def middle(self, embedded: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        """The layer on rows [positions, hidden] of both, at positions 0, 1, …"""
        w = {name.removeprefix("midlayer."): tensor for name, tensor in self.w.items()}
        heads, kv = self.target.config.num_attention_heads, self.target.config.num_key_value_heads
        count, size = len(feature), self.target.config.head_dim
        y = torch.cat(
            (self.normed(embedded, w["input_layernorm.weight"]), self.normed(feature, w["hidden_norm.weight"])), dim=1
        )
        q, k, v = ((y @ w[f"self_attn.{part}_proj.weight"].T).view(count, -1, size).transpose(0, 1) for part in "qkv")
        angles = torch.arange(count)[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

        def turned(z):
            return z * cos + torch.cat((-z[..., size // 2 :], z[..., : size // 2]), dim=-1) * sin

        q, k = turned(q), turned(k).repeat_interleave(heads // kv, dim=0)
        seen = (q @ k.transpose(1, 2) / size**0.5 + torch.full((count, count), -torch.inf).triu(1)).softmax(dim=-1)
        seen = (seen @ v.repeat_interleave(heads // kv, dim=0)).transpose(0, 1).reshape(count, -1)
        x = feature + seen @ w["self_attn.o_proj.weight"].T
        y = self.normed(x, w["post_attention_layernorm.weight"])
        y = functional.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        return x + y @ w["mlp.down_proj.weight"].T

    def logits(self, tokens: list[int], written: int) -> torch.Tensor:
        """Of what follows the last token, where the target has written the first ones."""
        states = self.states(tokens)
        fused = torch.cat([states[tap] for tap in TAPS], dim=1) @ self.w["fc.weight"].T
        embeddings = self.target.model.embed_tokens.weight.detach()[tokens]
        # The first token has no feature before it and no place, but where there is nothing else.
        start = int(len(tokens) > 1)
        features: list[torch.Tensor] = []
        for place in range(start, len(tokens)):
            own = features and place >= written
            nothing = torch.zeros_like(fused[0])
            features.append(self.middle(embeddings[start:place], torch.stack(features))[-1] if own else nothing)
            if place < written and place:
                features[-1] = fused[place - 1]
        x = self.middle(embeddings[start:], torch.stack(features))[-1]
        known = self.normed(x, self.w["norm.weight"]) @ self.w["lm_head.weight"].T
        found = torch.full((self.target.config.vocab_size,), -torch.inf)
        draft = torch.arange(len(known))
        found[draft + self.w["d2t"] if "d2t" in self.w else draft] = known
        return found


@pytest.mark.parametrize(("name", "seed"), [("head", 0), ("head", 1), ("whole", 2)])
def test_a_head_step_by_step_is_its_definition_over_the_whole_text(model, folders, name, seed):
    branch = read_eagle(folders / name, model.config)
    assert isinstance(branch, Eagle3Branch)
    assert branch.taps == TAPS
    naive = Naive(folders / "target", folders / name)
    check_walk(model.assembler.tier_scorer(TierPlan(draft=str(folders / name))), naive.logits, seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_head_never_changes_the_text(model, folders, seed):
    """In a tree, above an exit and beside a store, alone and in a batch, greedy and sampled."""
    rng = random.Random(seed)
    tier = TierPlan(draft=str(folders / "head"), gather=3, candidates=2)
    below = [(), (TierPlan(exit_layer=2, gather=2),)][seed % 2]
    plan = Plan(stores=("context",), budget=12, merge=True, tiers=(tier, *below))
    sampling = Sampling(max_tokens=16, temperature=[0, 0.8, 4.0][seed], seed=seed)
    prompts = ["".join(rng.choices(["ab", "the ", "12"], k=rng.randrange(1, 9))) for _ in range(3)]
    plain = [model.generate(prompt, plan="plain", sampling=sampling).tokens for prompt in prompts]
    alone = model.generate(prompts[0], plan=plan, sampling=sampling)
    assert_same(model, prompts[0], sampling, plain[0], alone.tokens)
    requests = [model.request(prompt, plan, sampling) for prompt in prompts]
    for _ in Engine().run(requests):
        if rng.random() < 0.1:
            model.forget()
    for prompt, expected, request in zip(prompts, plain, requests, strict=True):
        assert_same(model, prompt, sampling, expected, request.output)


def test_guesses_stand_and_a_forbidden_draft_vocabulary_is_no_obstacle(model, folders):
    plan = Plan(tiers=(TierPlan(draft=str(folders / "head"), gather=3, candidates=2),))
    hot = model.generate("abc", plan=plan, sampling=Sampling(max_tokens=40, temperature=8.0, seed=3))
    assert sum(hot.stats.tiers[0].accepted.values()) > 3
    known = read_eagle(folders / "head", model.config).tokens
    sampling = Sampling(max_tokens=6, logit_bias={int(token): -np.inf for token in known}, seed=0)
    plain = model.generate([5, 6], plan="plain", sampling=sampling)
    assert model.generate([5, 6], plan=plan, sampling=sampling).tokens == plain.tokens


@pytest.mark.parametrize(
    ("config", "change", "told"),
    [
        ({"hidden": 128, "head_size": 32}, {}, "hidden size 128, and this one has 64"),
        ({"vocabulary": 400}, {}, "vocabulary 400, and this one has 320"),
        ({}, {"fc.weight": torch.zeros(64, 128)}, r"fc.weight should be \[64, 192\] and is \[64, 128\]"),
        ({}, {"d2t": torch.full((100,), 300)}, "d2t does not name 100 tokens"),
        ({}, {"lm_head.weight": torch.zeros(90, 64)}, r"lm_head.weight should be \[100, 64\]"),
    ],
)
def test_a_head_that_does_not_fit_is_told(folders, tmp_path, config, change, told):
    model = hierspec.load(folders / "target", backend="torch")
    folder = tiny_eagle3(tmp_path / "head", tiny_config("llama", **config) if config else model.config)
    save_file(load_file(folder / "model.safetensors") | change, folder / "model.safetensors")
    with pytest.raises(HierspecError, match=told) as error:
        model.assembler.tier_scorer(TierPlan(draft=str(folder)))
    assert "\n" not in str(error.value)


def test_what_a_head_cannot_do_is_told(folders, tmp_path):
    model = hierspec.load(folders / "target", backend="compiled")
    for changes, told in (({"vocabulary": "full"}, "leave vocabulary out"), ({"weights": "int8"}, "leave weights out")):
        with pytest.raises(HierspecError, match=told):
            model.assembler.tier_scorer(TierPlan(draft=str(folders / "head"), **changes))
    folder = tiny_eagle3(tmp_path / "other", model.config)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"norm_before_residual": True}))
    with pytest.raises(HierspecError, match="sets norm_before_residual"):
        model.assembler.tier_scorer(TierPlan(draft=str(folder)))
    shallow = hierspec.load(tiny_checkpoint(tmp_path / "shallow", "llama", layers=5), backend="torch")
    with pytest.raises(HierspecError, match="models of 7 layers and more, and this one has 5"):
        shallow.assembler.tier_scorer(TierPlan(draft=str(folders / "head")))


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.json", b"[1]", "no JSON object"),
        ("config.json", b"5", "no JSON object"),
        ("config.json", b'{"model_type": "llama", "rms_norm_eps": "x"}', "must be a"),
        ("config.json", b'{"a":' * 100_000, "nested too deeply"),
        ("model.safetensors", {"d2t": torch.zeros(100)}, "stores d2t as F32"),
        ("model.safetensors", {"fc.weight": torch.zeros(64, 192, dtype=torch.int32)}, "stores fc.weight as I32"),
    ],
)
def test_a_damaged_head_is_one_sentence(folders, tmp_path, file, content, told):
    target = load_checkpoint(folders / "target").config
    path = tiny_eagle3(tmp_path / "head", target) / file
    path.write_bytes(content if isinstance(content, bytes) else save(load_file(path) | content))
    with pytest.raises(HierspecError, match=told) as error:
        read_eagle(path.parent, target)
    assert str(error.value).isprintable()
