"""What replaces two functions of vLLM for CPUs."""

from types import SimpleNamespace

import pytest
import torch

from hierspec.hosts.vllm_sampling import cure_sampling, spread


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
def test_each_request_has_its_value_once_for_each_of_its_tokens(dtype):
    values = torch.tensor([3, 0, 5, 7], dtype=dtype)
    spread_out = spread(values, torch.tensor([2, 3, 3, 6], dtype=torch.int32), 6, replace_from=0, replace_to=1)
    assert spread_out.dtype == dtype
    assert spread_out.tolist() == [3, 3, 1, 7, 7, 7]
    assert spread(values, torch.zeros(4, dtype=torch.int32), 0).shape == (0,)


def test_a_temperature_is_no_whole_number():
    assert spread(torch.tensor([0.5]), torch.tensor([2]), 2).tolist() == [0.5, 0.5]


def test_a_step_without_drafts_is_left_as_it_is_and_others_reach_vllm():
    def constrain(logits, counts, metadata):
        return sampler.expand_batch_to_tokens(metadata, counts, len(logits))

    sampler = SimpleNamespace(expand_batch_to_tokens=None, apply_sampling_constraints=constrain)
    cure_sampling(sampler)
    nothing = torch.empty(0, 9)
    assert sampler.apply_sampling_constraints(nothing, torch.zeros(1), None) is nothing
    spread_out = sampler.apply_sampling_constraints(torch.empty(2, 9), torch.tensor([2]), torch.tensor([0.7]))
    assert spread_out.tolist() == pytest.approx([0.7, 0.7])


def test_another_version_is_left_alone():
    other = SimpleNamespace(something=1)
    cure_sampling(other)
    assert vars(other) == {"something": 1}
