"""What only a GPU shows: recorded graphs, matrix units, sizes of real models."""

import random

import numpy as np
import pytest
import torch
from texts import Texts, states

import hierspec
from hierspec import Plan, TierPlan
from hierspec.backends.cuda.backend import CudaBackend
from hierspec.core.proposal import Proposal
from hierspec.scorers.climb import advance
from hierspec.testing.checkpoints import random_weights, tiny_checkpoint, tiny_config
from hierspec.testing.packs import tiny_pack

pytestmark = pytest.mark.cuda
SIZES = [  # of the default model and of larger ones, with few layers
    {"heads": 9, "kv_heads": 3, "hidden": 576, "head_size": 64, "intermediate": 1536, "vocabulary": 4096},
    {"heads": 32, "kv_heads": 8, "hidden": 4096, "head_size": 128, "intermediate": 14336, "vocabulary": 4096},
]


@pytest.fixture(scope="module", params=[(0, "bfloat16"), (0, "int8"), (1, "bfloat16"), (1, "int8")])
def decoder(request):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU here")
    number, format = request.param
    config = tiny_config("llama", layers=2, context=4096, **SIZES[number])
    weights = {name: tensor.to("cuda") for name, tensor in random_weights(config).items()}
    return CudaBackend().decoder(config, weights, format)


def test_every_width_tree_and_cut_has_the_bits_of_one_row_a_pass(decoder):
    rng = random.Random(1)
    tokens = np.array([rng.randrange(4096) for _ in range(600)], np.int32)
    texts = Texts(decoder, (1,), most_bytes=1 << 30)
    one = texts.new(700)
    expected = {}
    with torch.inference_mode():
        for start in (1, 250, 500):  # around the borders of blocks; what lies between is prefilled
            for length in range(start, start + 40):
                one.align(tokens[:length], Proposal())
                advance(decoder, [one], 2)
                expected[length] = decoder.logits(states(one, length - 1, length))[0].clone()
        for width in (1, 2, 5, 16, 17, 31, 33, 39):
            for start in (1, 250, 500):
                other = texts.new(700)
                other.align(tokens[:start], Proposal())
                advance(decoder, [other], 2)
                tree = rng.random() < 0.5
                spine = tokens[start : start + width].tolist()
                nodes = [token for right in spine for token in ((right, 7) if tree else (right,))]
                step = 2 if tree else 1
                parents = [-1 if node < step else node // step * step - step for node in range(len(nodes))]
                other.align(tokens[:start], Proposal(tuple(nodes), tuple(parents)))
                for stop in rng.choice([(2,), (1, 2)]):
                    advance(decoder, [other], stop)
                found = decoder.logits(states(other, start - 1, other.used))
                assert torch.equal(found[0], expected[start])
                for place in range(min(width, 39)):
                    assert torch.equal(found[1 + place * step], expected[start + 1 + place]), (width, start, place)
                other.release()


def test_recorded_passes_repeat_themselves_and_take_no_memory(decoder):
    tokens = np.arange(40, dtype=np.int32)
    texts = Texts(decoder, (), most_bytes=1 << 28)
    found, held = [], []
    with torch.inference_mode():
        for _ in range(6):
            text = texts.new(60)
            text.align(tokens, Proposal())
            advance(decoder, [text], 2)
            found.append(decoder.logits(states(text, 30, 40)).clone())
            text.release()
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
    assert all(torch.equal(logits, found[0]) for logits in found)
    assert held[-1] - held[-2] <= found[0].numel() * 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plans_write_the_plain_text(tmp_path, temperature):
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU here")
    sizes = {"heads": 4, "kv_heads": 2, "hidden": 128, "head_size": 64, "intermediate": 256, "layers": 4, "eos_ids": ()}
    tiny_checkpoint(tmp_path / "model", "llama", **sizes)
    tiny_pack(tmp_path / "pack", tmp_path / "model", exits=(1, 2), taps=(1,))
    model = hierspec.load(tmp_path / "model", device="cuda", pack=tmp_path / "pack", kv_memory=1 << 28)
    assert model.decoder.backend.name == "cuda"
    rng = random.Random(2)
    for _ in range(3):
        prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 80))]
        options = {"max_tokens": 60, "temperature": temperature, "seed": 5}
        plain = model.generate(prompt, plan="plain", **options).tokens
        # The adapter of exit 2 has two layers.
        exits = Plan(tiers=(TierPlan(exit_layer=2, gather=3), TierPlan(exit_layer=1, gather=2)))
        for plan in ("draft", "lookup", "layerskip", exits):
            assert model.generate(prompt, plan=plan, **options).tokens == plain, plan
