"""The proposer as vLLM 0.25.1 makes and calls it on a GPU: its V1 runner, without asynchronous scheduling."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from hierspec.hosts import vllm, vllm_options
from hierspec.hosts.filling import Filling
from hierspec.testing.checkpoints import tiny_checkpoint

ROWS, CONTEXT = 16, 256  # of vLLM's arrays: max_num_seqs and max_model_len


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Of vLLM only what says the rank is there. Whoever looks for its CPU parts fails."""
    monkeypatch.setattr(vllm_options, "vllm_version", lambda: "0.25.1")
    distributed = ModuleType("vllm.distributed")
    distributed.get_tp_group = lambda: SimpleNamespace(rank_in_group=0)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.distributed", distributed)
    monkeypatch.setitem(sys.modules, "vllm.v1.sample", None)
    monkeypatch.setenv("HIERSPEC_STORES", str(tmp_path / "stores"))
    monkeypatch.setenv("HIERSPEC_LEARNT", "off")


@pytest.fixture
def config(tmp_path):
    folder = str(tiny_checkpoint(tmp_path / "model", "llama"))
    plan = tmp_path / "plan.toml"
    plan.write_text('stores = ["context", "history"]\nmerge = true\n')
    model = SimpleNamespace(
        model=folder,
        tokenizer=folder,
        max_model_len=CONTEXT,
        hf_text_config=SimpleNamespace(num_hidden_layers=4),
        get_vocab_size=lambda: 320,
    )
    return SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        additional_config={"hierspec": {"plan": str(plan)}},
    )


class Runner:
    """Its arrays, and its order: what was sampled is in them before the proposer is called."""

    def __init__(self, proposer):
        self.proposer = proposer
        self.token_ids_cpu = np.zeros((ROWS, CONTEXT), np.int32)
        self.num_tokens_no_spec = np.zeros(ROWS, np.int32)
        proposer.load_model(object())

    def begin(self, row, prompt):
        self.token_ids_cpu[row, : len(prompt)] = prompt
        self.num_tokens_no_spec[row] = len(prompt)

    def step(self, sampled):
        for row, tokens in enumerate(sampled):
            start = self.num_tokens_no_spec[row]
            self.token_ids_cpu[row, start : start + len(tokens)] = tokens
            self.num_tokens_no_spec[row] += len(tokens)
        slots = {"model.layers.0.self_attn.attn": object()}  # tensors on the GPU: nobody may read them
        drafts = self.proposer.propose(sampled, self.num_tokens_no_spec, self.token_ids_cpu, slot_mappings=slots)
        # The scheduler may not verify all of a draft. Afterwards drafts lie in the array behind the text.
        for row, draft in enumerate(drafts):
            end = self.num_tokens_no_spec[row]
            self.token_ids_cpu[row, end : end + len(draft)] = draft
        return drafts


def test_it_opens_and_drafts_as_the_runner_calls_it(installed, config):
    runner = Runner(vllm.Proposer(config))
    runner.begin(0, [5, 6, 7, 8, 9, 5, 6])
    runner.begin(1, list(range(40, 60)))
    drafts = runner.step([[7], []])  # the second is still in its prompt
    assert drafts[0][:2] == [8, 9]
    assert drafts[1] == []
    assert all(type(token) is int for token in drafts[0])
    drafts = runner.step([[8, 9, 5], [40]])
    assert drafts[0][0] == 6
    assert drafts[1][0] == 41
    assert max(map(len, drafts)) <= 4
    runner.proposer.close()


def test_drafts_are_filled_so_that_whole_steps_are_replayed(installed, config):
    config.model_config.hf_text_config.eos_token_id = [2, 3]
    runner = Runner(vllm.Proposer(config))
    runner.begin(0, [5, 6, 7, 8, 9, 5, 6])
    runner.begin(1, list(range(40, 60)))
    runner.begin(2, list(range(70, 90)))
    first, unread, unlike = runner.step([[7], [], [90]])
    assert first[:2] == [8, 9]
    assert unread == []  # it still reads its prompt
    assert unlike == [2, 2, 2, 2]  # nothing was found
    assert len(first) == 4
    # A filling token that the target wrote too: the text goes on if its user wanted no end.
    assert [len(draft) for draft in runner.step([[8, 9], [60], [2, 2, 91]])] == [4, 4, 4]
    runner.proposer.close()


def test_drafts_are_not_filled_where_that_gains_nothing(installed, config):
    many = Filling(4, 0)
    drafts = [[1]] * 31
    many.fill(drafts, [[1]] * 31)
    assert drafts == [[1]] * 31
    for change in ("eager", "off"):
        config.model_config.enforce_eager = change == "eager"
        if change == "off":
            config.additional_config["hierspec"]["fill"] = "off"
        runner = Runner(vllm.Proposer(config))
        runner.begin(0, list(range(70, 90)))
        assert runner.step([[90]]) == [[]]
        runner.proposer.close()


def test_other_ranks_draft_nothing(installed, config, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm.distributed"], "get_tp_group", lambda: SimpleNamespace(rank_in_group=1))
    runner = Runner(vllm.Proposer(config))
    runner.begin(0, [5, 6, 7, 8, 9, 5, 6])
    assert runner.step([[7]]) == [[]]


def test_cpu_parts_are_looked_for_on_a_cpu_alone(installed, config):
    config.device_config.device_type = "cpu"
    with pytest.raises(ImportError):
        vllm.Proposer(config).load_model(object())
