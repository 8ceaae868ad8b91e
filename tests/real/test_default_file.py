"""The default model in the bits of its GGUF file: its pack fits, and every plan writes what plain decoding writes."""

import pytest

import hierspec
from hierspec import Sampling
from hierspec.checkpoints.gguf_weights import GgufWeights, open_gguf
from hierspec.core.errors import HierspecError

pytestmark = pytest.mark.model

PROMPTS = [
    "Repeat this list in reverse order: apple, pear, plum, cherry, peach, apple, pear, plum, cherry, peach.",
    "What is 17 plus 25? Explain each step.",
    "Name three rivers in Europe and the countries they run through.",
]


@pytest.fixture(scope="module")
def model(default_model):
    if not default_model.decoder.backend.exact:
        pytest.skip("the compiled backend runs files in their own bits, and it cannot run here")
    return default_model


def test_it_runs_in_its_own_bits_with_its_pack(model):
    assert model.decoder.products == "int4+q8_0"
    assert model.file is not None
    assert model.file.suffix == ".gguf"
    assert not list(model.folder.glob("*.safetensors"))
    assert model.pack is not None
    stored = GgufWeights(open_gguf(model.file))
    read = sum(stored.stored(name).raw.nbytes for name in stored if name.endswith(("_proj.weight", "tokens.weight")))
    assert read <= model.decoder.weight_bytes < 1.01 * read  # nothing is widened in this file
    assert "own bits, since it is a GGUF file on a CPU: 210 in Q4_1, 1 in Q8_0" in str(model.dtype_choice)
    with pytest.raises(HierspecError, match="give one of them"):
        hierspec.load(weights="float32", dtype="bfloat16")


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_every_plan_and_a_batch_write_what_plain_writes(model, temperature):
    sampling = Sampling(max_tokens=24, temperature=temperature, seed=11)
    answers = [model.generate(prompt, plan="plain", sampling=sampling).tokens for prompt in PROMPTS]
    passes = []
    for plan in ("lookup", "layerskip", "eagle", "hsd", "draft", "auto"):
        for prompt, expected in zip(PROMPTS, answers, strict=True):
            drafted = model.generate(prompt, plan=plan, sampling=sampling)
            assert drafted.tokens == expected, (plan, prompt)
            passes.append(drafted.stats.tokens_per_pass)
    assert sum(passes) / len(passes) > 1.2  # drafters that were trained on its floats draft for it
    for prompt, batched in zip(PROMPTS, model.generate_many(PROMPTS, plan="eagle", sampling=sampling), strict=True):
        assert batched.tokens == answers[PROMPTS.index(prompt)]


def test_it_is_nearly_the_model_in_floats(model):
    """Only the inputs of products are rounded, to 8 bits: it agrees with the same numbers in float32 nearly always."""
    floats = hierspec.load(weights="float32")
    assert floats.file is None
    assert floats.decoder.products == "float32"
    text = floats.generate(PROMPTS[2], plan="plain", max_tokens=48)
    ids = [*floats.encode(PROMPTS[2]), *text.tokens]
    agreed = 0
    for place in range(len(text.tokens)):
        context = ids[: len(ids) - len(text.tokens) + place]
        agreed += model.generate(context, plan="plain", max_tokens=1).tokens[0] == text.tokens[place]
    assert agreed >= 0.85 * len(text.tokens)
