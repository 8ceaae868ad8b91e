"""A request whose tier 0 is a host's: what it is drafted, and what is refused."""

import random
import sys
from types import ModuleType, SimpleNamespace

import pytest
from model_free_host import Host, Text, own_text, proposer

import hierspec
from hierspec.assembly.assembler import Assembler
from hierspec.assembly.drafts import LoadOptions
from hierspec.assembly.vocabulary import Vocabulary
from hierspec.checkpoints.load import read_config
from hierspec.core.errors import HierspecError
from hierspec.core.plan import Plan, TierPlan
from hierspec.hosts import vllm_options
from hierspec.hosts.guest import Guest
from hierspec.hosts.host_pace import HostPace
from hierspec.hosts.vllm import Proposer
from hierspec.hosts.vllm_options import GuestOptions, check_version, read_options, read_plan
from hierspec.testing.checkpoints import tiny_checkpoint
from hierspec.text.tokenizer import Tokenizer


def run(host, seed):
    """All drafts of a random run."""
    rng, drafts = random.Random(seed), []
    texts = [own_text(number, rng) for number in range(12)]
    waiting = texts.copy()
    while waiting or host.batch:
        while waiting and len(host.batch) < 4:
            host.batch.append(waiting.pop())
        new = host.step(verified=rng.choice([0, 2, 9]))
        drafts.append([new[id(text)] for text in host.batch])
        host.batch = [text for text in host.batch if len(text.tokens) - text.length > 1]
    return drafts


@pytest.mark.parametrize("merge", [True, False])
def test_where_only_stores_draft_it_is_what_the_recursion_drafts(merge):
    plan = Plan(stores=("context", "history"), merge=merge, budget=12)
    short, whole = Host(proposer(plan)), Host(proposer(plan))
    whole.proposer._guest._tiers = True  # as if there were any
    assert run(short, 5) == run(whole, 5)
    assert short.accepted > 300


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("host") / "target", "llama")


def opened(target, plan, most=4):
    tokenizer = Tokenizer.from_folder(target)
    vocabulary = Vocabulary("target", tokenizer, _size(target))
    return Guest(Assembler(vocabulary, LoadOptions(backend="torch")), plan, HostPace(most, False), 512)


def _size(folder):
    return read_config(folder).vocabulary


def test_a_draft_model_and_the_ladder_under_it_draft_for_a_host(target):
    """The host's texts are the draft model's own, so all that it drafts is accepted, in fewer steps than tokens."""
    ladder = (TierPlan(draft=str(target), gather=4, stores=("context",)), TierPlan(draft=str(target), gather=2))
    guest = opened(target, Plan(tiers=ladder))
    request = guest.begin(Text(list(range(1, 20)), 19).tokens)
    written = []
    for _ in range(6):
        guest.draft([request])
        draft = request.drafted
        assert len(draft) == 4
        written += draft
        assert guest.wrote(request, draft)  # the host verified all but the token after it
    plain = hierspec.load(target, backend="torch").generate(list(range(1, 20)), plan="plain", max_tokens=24)
    assert written == list(plain.tokens)[: len(written)]


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(tiers=(TierPlan(exit_layer=2),)), "Tier 1 is an exit of the target"),
        (Plan(tiers=(TierPlan(draft="feature"),)), "a feature drafter"),
        (Plan(tiers=(TierPlan(draft="small"),)), "runs on the target's embeddings"),
        (Plan(tiers=(TierPlan(skip_layers=(1,)),)), "skip_layers"),
        (Plan(rule="residual"), "a host compares tokens"),
    ],
)
def test_what_a_host_keeps_to_itself_is_refused_in_one_sentence(target, plan, says):
    with pytest.raises(HierspecError, match=says):
        opened(target, plan)


def test_a_draft_of_another_vocabulary_is_refused(target):
    tokenizer = Tokenizer.from_folder(target)
    vocabulary = Vocabulary("target", tokenizer, _size(target) + 8)
    with pytest.raises(HierspecError, match="another vocabulary"):
        Guest(Assembler(vocabulary, LoadOptions()), Plan(tiers=(TierPlan(draft=str(target)),)), HostPace(4, False), 512)


@pytest.mark.parametrize("version", ["0.21.3", "0.33.0", "1.0"])
def test_another_vllm_is_refused(version, monkeypatch):
    monkeypatch.setattr(vllm_options, "vllm_version", lambda: version)
    with pytest.raises(HierspecError, match=rf"vLLM 0\.22 to 0\.32, not {version}"):
        check_version()


def test_known_ones_are_not(monkeypatch):
    for version in ("0.22.0", "0.25.1", "0.32.0+cpu"):
        monkeypatch.setattr(vllm_options, "vllm_version", lambda version=version: version)
        check_version()


def test_options_come_from_the_configuration_then_from_the_environment():
    environment = {"HIERSPEC_PLAN": "lookup", "HIERSPEC_NAMESPACE": "me"}
    assert read_options({}, {}) == GuestOptions()
    assert read_options(None, environment) == GuestOptions("lookup", "me")
    assert read_options({"hierspec": "rest"}, environment) == GuestOptions("rest", "me")
    assert read_options({"hierspec": {"namespace": "you"}}, environment) == GuestOptions("lookup", "you")
    for wrong in ({"hierspec": 3}, {"hierspec": {"paln": "x"}}, {"hierspec": {"plan": 3}}):
        with pytest.raises(HierspecError, match="additional_config"):
            read_options(wrong, {})
    assert read_options({"hierspec": {"fill": "off"}}, {}).fill == "off"
    with pytest.raises(HierspecError, match="fill must be auto or off, not 'on'"):
        read_options(None, {"HIERSPEC_FILL": "on"})


def test_plans_are_named_or_files(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('rule = "coupled"\nstores = ["context"]\n')
    assert read_plan(str(file), 30).stores == ("context",)
    assert read_plan("auto", 30) == read_plan("hd+", 30)
    with pytest.raises(HierspecError, match="no plan or plan file"):
        read_plan("nothing", 30)


def configuration(target, **additional):
    model = SimpleNamespace(
        max_model_len=512,
        model=str(target),
        tokenizer=str(target),
        hf_text_config=SimpleNamespace(num_hidden_layers=4),
        get_vocab_size=lambda: _size(target),
    )
    return SimpleNamespace(
        model_config=model,
        additional_config=additional,
        speculative_config=SimpleNamespace(num_speculative_tokens=4),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_vllm_makes_one_and_only_the_first_rank_drafts(target, rank, monkeypatch, tmp_path):
    distributed = ModuleType("vllm.distributed")
    distributed.get_tp_group = lambda: SimpleNamespace(rank_in_group=rank)
    sample = ModuleType("vllm.v1.sample")
    sample.rejection_sampler = ModuleType("vllm.v1.sample.rejection_sampler")
    for module in (ModuleType("vllm"), ModuleType("vllm.v1"), sample, distributed):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(vllm_options, "vllm_version", lambda: "0.32.0")
    plan = tmp_path / "plan.toml"
    plan.write_text('stores = ["context", "history"]\nmerge = true\n')
    options = {"plan": str(plan), "stores": str(tmp_path)}
    made = Proposer(configuration(target, hierspec=options))
    made.load_model(object())
    host = Host(made)
    text = Text([1, 2, 3, 4, 5] * 20, 30)
    host.batch = [text]
    host.step()
    assert bool(host.drafts[id(text)]) == (rank == 0)
    made.close()
