"""HiSpec's setting: rates that fit the paper's, the latency formula, and what the command says of it."""

import json

import hispec_synthetic as synthetic
import numpy as np
import pytest

from hierspec.core.errors import HierspecError
from hierspec.pacing.costs import Costs
from hierspec.testing.checkpoints import tiny_checkpoint


def test_the_rates_are_the_papers():
    rates = synthetic.setting("token")
    assert rates.lower * rates.accepted == pytest.approx(synthetic.SINGLE)  # the lower exit is right that often
    assert rates.upper == pytest.approx(synthetic.THROUGH_TWO)
    assert rates.corrected / rates.accepted == pytest.approx(synthetic.CORRECTED)
    wide = synthetic.setting("block")
    assert sum(wide.single**depth for depth in (1, 2, 3, 4)) / 4 == pytest.approx(synthetic.SINGLE)
    for found in (rates, wide):
        assert all(0 < share < 1 for share in vars(found).values())


def simulated(costs, probabilities, blocks, rng, passes=4000) -> float:
    """The same as the formula, by rolling dice."""

    def block(level: int, gather: int) -> tuple[int, float]:
        have, seconds = 0, 0.0
        while have < gather:
            guess, spent = block(level + 1, blocks[level]) if level < len(probabilities) else (0, 0.0)
            seconds += spent + costs[level].seconds(1 + guess)
            stood = 0
            while stood < guess and rng.random() < probabilities[level]:
                stood += 1
            have += stood + 1
        return have, seconds

    tokens, seconds = np.sum([block(0, 1) for _ in range(passes)], axis=0)
    return float(tokens / seconds * costs[0].seconds(1))


@pytest.mark.parametrize(
    ("probabilities", "blocks"), [([0.6], [4]), ([0.8, 0.6], [4, 2]), ([0.9, 0.7, 0.5], [5, 3, 2])]
)
def test_the_formula_is_what_a_simulation_gives(probabilities, blocks):
    costs = [Costs(range(1, 17), [base + 0.02 * rows for rows in range(16)]) for base in (1.0, 0.3, 0.15, 0.1)]
    found = synthetic.predicted_speedup(costs[: len(probabilities) + 1], probabilities, blocks)
    assert found == pytest.approx(simulated(costs, probabilities, blocks, np.random.default_rng(0)), rel=0.02)


def test_random_models_have_the_shape_that_was_asked_for():
    model = synthetic.random_model("tiny", "cpu")
    assert (model.name, model.config.layers, model.config.hidden) == ("random-tiny", 2, 64)
    assert len(model.generate("abc", plan="plain", max_tokens=4).tokens) == 4
    assert synthetic.shape_config("70B").layers == 80
    with pytest.raises(HierspecError, match="cannot run here with weights in int3"):
        synthetic.random_model("tiny", "cpu", "int3")


def test_the_command_marks_what_it_shows(tmp_path, capsys):
    folder = str(tiny_checkpoint(tmp_path / "tiny", "llama", layers=8))
    assert synthetic.main([folder, "--limit", "2", "--max-tokens", "20"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    assert result["synthetic"] is True
    assert [name for name, plan in result["plans"].items() if plan.get("synthetic")] == [
        "layerskip",
        "hispec",
        "hispec+",
    ]
    assert set(result["setting"]["formula"]) < set(result["setting"]["measured"])
    assert "the paper 1.84x to 2.08x" in err
