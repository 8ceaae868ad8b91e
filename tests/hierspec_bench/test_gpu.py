"""`hierspec bench gpu`: all of it on a CPU with a tiny model, in time, and whatever fails costs its own part."""

import json

import numpy as np
import pytest
import torch

import hierspec
from hierspec import HierspecError
from hierspec.backends.torch.backend import TorchBackend
from hierspec.cli.main import main
from hierspec.prompts import BenchPrompt
from hierspec.testing.checkpoints import random_weights, tiny_checkpoint
from hierspec.testing.packs import tiny_pack
from hierspec_bench.gpu.bench import GpuBench, Settings
from hierspec_bench.gpu.engines import gpu_engines, token_times
from hierspec_bench.gpu.random_models import SHAPES, RandomWeights, shape_config
from hierspec_bench.gpu.roofline import roofline
from hierspec_bench.gpu.shape_passes import Passes, chain, measure_shape, tree
from hierspec_bench.gpu.timing import Deadline
from hierspec_bench.peers.opening import WorkerPeer

CPU = torch.device("cpu")
LARGER = "hidden=96,layers=8"
PLANS = ("draft", "eagle+", "layerskip", "rest", "auto")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("gpu")
    tiny_checkpoint(root / "tiny", "llama", layers=6, intermediate=192)
    tiny_pack(root / "pack", root / "tiny")
    prompts = [{"task": f"task {number % 2}", "turns": [f"word {number} word {number}"]} for number in range(4)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return root


def settings(**changes):
    chosen = {"seconds": 3600.0, "plans": ("lookup",), "sizes": ("",), "temperatures": (0.0,), "batches": ()}
    chosen |= {"prompts": [BenchPrompt("a", ("word word",)), BenchPrompt("b", ("more words",))], "max_tokens": 8}
    chosen |= {"shapes": ("tiny",), "contexts": (8,), "widths": (1, 4), "engines": ()}
    return Settings(device=CPU, **{**chosen, **changes})


def test_the_command_measures_everything(folder, tmp_path, capsys):
    output = tmp_path / "gpu.json"
    arguments = ["--pack", str(folder / "pack"), "--prompts", str(folder / "prompts.jsonl"), "--output", str(output)]
    arguments += ["--device", "cpu", "--dtype", "float32", "--seconds", "3600", "--enlarged", LARGER, "--engines", ""]
    arguments += ["--shapes", "tiny", "--contexts", "8,24", "--widths", "1,2,4", "--batch", "1,2,4"]
    arguments += ["--plans", ",".join(PLANS), "--max-tokens", "8", "--limit", "3", "--no-learnt"]
    assert main(["bench", "gpu", str(folder / "tiny"), *arguments]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert json.loads(output.read_text()) == document
    assert document["kind"] == "gpu"
    assert document["complete"] is True
    assert document["command"].startswith("hierspec")
    assert document["roofline"]["copy_terabytes_per_second"] > 0
    assert [result["context"] for result in document["passes"]] == [8, 24]
    for result in document["passes"]:
        assert list(result["widths"]) == ["1", "2", "4"]
        assert result["plain"]["tokens_per_second"] > 0
    names = "tiny", f"tiny enlarged to {LARGER}"
    assert [(run["model"], run["temperature"]) for run in document["runs"]] == [
        (name, temperature) for temperature in (0, 1) for name in names
    ]
    for run in document["runs"]:
        assert list(run["absent_plans"]) == ["rest"]  # there is no corpus
        assert list(run["plans"]) == ["plain", *(plan for plan in PLANS if plan != "rest")]
        assert all(figures["identical"] == 3 for figures in run["plans"].values())
        assert "texts" not in run
    assert [run["model"] for run in document["batches"]] == list(names)
    for run in document["batches"]:
        assert {"plain, batch of 4", "auto, batch of 2"} <= set(run["plans"])
        assert all(figures["identical"] == 4 for figures in run["plans"].values())
    assert err.splitlines()[-1].startswith("auto, batch of 4")  # tables come last
    assert "cut off" not in err


def test_the_models_own_size_can_be_left_out(folder, capsys):
    arguments = ["--pack", str(folder / "pack"), "--prompts", str(folder / "prompts.jsonl"), "--device", "cpu"]
    arguments += ["--dtype", "float32", "--enlarged", LARGER, "--only-enlarged", "--parts", "plans", "--no-learnt"]
    arguments += ["--plans", "lookup", "--max-tokens", "4", "--limit", "2", "--temperature", "0"]
    assert main(["bench", "gpu", str(folder / "tiny"), *arguments]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert run["enlarged"] == LARGER


def test_without_a_gpu_it_says_so(folder, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "gpu", str(folder / "tiny")]) == 2
    assert "There is no CUDA GPU here; --device cpu runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--seconds 0", "--seconds must be more than 0 and at most"),
        ("--seconds nan", "not nan"),
        ("--batch 1,x", "--batch takes numbers from 1 to 65,536"),
        ("--widths 0", "--widths takes numbers from 1 to 65,536"),
        ("--shapes 9B", "There is no shape '9B'"),
        ("--enlarged 9B", "cannot be enlarged to '9B'"),
        ("--plans nothing", "nothing"),
        ("--engines tgi", "There is no engine 'tgi'"),
        ("--parts all", "There is no part 'all'"),
        ("--temperature x", "--temperature takes numbers"),
        ("--only-enlarged --enlarged=", "--only-enlarged leaves nothing to measure"),
    ],
)
def test_mistakes_are_one_sentence(options, told, folder, capsys):
    assert main(["bench", "gpu", str(folder / "tiny"), "--device", "cpu", *options.split()]) == 2
    assert told in capsys.readouterr().err


def test_a_part_that_fails_leaves_the_others(folder):
    def load(size):
        if size:
            raise RuntimeError("out of memory")
        return hierspec.load(folder / "tiny", dtype="float32", device="cpu", keep_learnt=False)

    seen = []
    bench = GpuBench(settings(sizes=("8B", "")), load, {"command": "hierspec"})
    bench.run(measured=lambda: seen.append(len(bench.document["parts"])))
    failed, worked = bench.document["parts"][-2:]
    assert failed["error"] == "RuntimeError: out of memory"
    assert worked["complete"]
    assert bench.document["complete"] is False
    assert seen == [1, 2, 3, 4, 4]  # after every part, and at the end
    assert not bench.different
    [run] = bench.document["runs"]
    run["plans"]["lookup"] |= {"identical": 1, "ties": 0}
    assert bench.different


def test_no_prompt_of_a_batch_comes_twice():
    """Its answer would be drafted from history."""
    prompts = [BenchPrompt("qa", ("x", "y")), BenchPrompt("qa", ("z",))]
    chosen = GpuBench(
        settings(prompts=prompts, batches=(1, 5)), lambda size: pytest.fail("loaded"), {}
    )._batch_prompts()
    assert [prompt.turns for prompt in chosen] == [("x",), ("z",), ("x (2)",), ("z (2)",), ("x (3)",)]


def test_when_time_is_up_nothing_is_begun():
    clock = [0.0]

    def now():
        clock[0] += 1
        return clock[0]

    deadline = Deadline(10, now)
    assert not deadline.over
    assert deadline.until(3).left <= 3
    while not deadline.over:
        pass
    assert clock[0] <= 14
    assert list(measure_shape("tiny", CPU, "float32", (8, 16), deadline, (1,))) == []
    bench = GpuBench(settings(seconds=1e-9), lambda size: pytest.fail("loaded"), {})
    bench.run()
    assert [part.get("left_out") for part in bench.document["parts"][1:]] == ["There was no time left."] * 2


def test_a_format_that_a_backend_lacks_is_told():
    [result] = measure_shape("tiny", CPU, "int8", (8,), Deadline(60), (1,))
    assert "compiled backend" in result["refused"]
    with pytest.raises(HierspecError, match="There is no shape"):
        shape_config("9B")


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_whole_models(shape):
    config = shape_config(shape)
    assert not TorchBackend("cpu").refuses(config, "float32")
    weights = RandomWeights(config, CPU)
    assert len(weights) == len(list(weights))
    name = "model.layers.1.self_attn.k_proj.weight"
    assert name in weights
    assert torch.equal(weights[name], weights[name])


def test_a_tree_has_the_chains_rows_twice():
    """In float64 the order of sums does not show."""
    config = shape_config("tiny")
    weights = {name: tensor.double() for name, tensor in random_weights(config).items()}
    backend = TorchBackend("cpu")
    decoder = backend.decoder(config, weights, "float64")
    memory = decoder.memory((config.layers,), 1 << 24)
    with torch.inference_mode():
        passes = Passes(decoder, memory, 12, 8)
        of_chain = passes.logits(chain(memory, 12, 8), passes.tokens)
        of_tree = passes.logits(tree(memory, 12, 8), np.repeat(passes.tokens, 2))
    for side in (0, 1):
        assert torch.allclose(of_tree[side::2], of_chain, atol=1e-4)


def test_limits_of_the_device_are_measured():
    assert all(value for value in roofline(CPU).values())


def test_only_some_parts_are_measured(folder):
    bench = GpuBench(settings(parts=("passes",)), lambda size: pytest.fail("loaded"), {})
    bench.run()
    assert [part["part"] for part in bench.document["parts"]] == ["passes, tiny"]
    assert bench.document["complete"]


def test_other_engines_run_in_processes_of_their_own(folder):
    engines = gpu_engines(("vllm", "transformers"), CPU, "float32")
    assert list(engines) == ["transformers"]

    def load(size):
        return hierspec.load(folder / "tiny", dtype="float32", device="cpu", keep_learnt=False)

    bench = GpuBench(settings(engines=("transformers",), parts=("engines",), batches=(1, 2)), load, {})
    bench.run()
    [run] = bench.document["runs"]
    assert run["absent_engines"] == run["absent_peers"] == {}
    assert run["peers"]["transformers"]["identical"] == 2
    assert run["peers"]["transformers"]["about"]["setting"]["cache"] == "static"
    rows = list(token_times(engines, shape_config("tiny"), (8,), (2,), Deadline(600)))
    assert [(row["engine"], row["context"]) for row in rows] == [("transformers", 8)]
    assert rows[0]["token_ms"] > 0
    assert list(token_times(engines, shape_config("tiny"), (8,), (), Deadline(0))) == []


def test_batches_of_an_engine_are_counted_after_once_untimed(folder, monkeypatch):
    """Stands in for vLLM, which is not here."""
    asked = []

    class Answering:
        name = "vllm"

        def __init__(self, *arguments):
            pass

        def ask(self, request, timeout):
            asked.append(request)
            if request["do"] == "open":
                return {"version": "1"}
            if "prompts" in request:
                return {"counts": [request["max_tokens"]] * len(request["prompts"]), "seconds": 2.0}
            return {"tokens": [5] * request["max_tokens"], "seconds": 0.25 * request["max_tokens"]}

        def close(self):
            asked.append("closed")

    monkeypatch.setattr("hierspec_bench.gpu.engines.Worker", Answering)
    monkeypatch.setattr("hierspec_bench.gpu.engines._imports", lambda python, package: package == "vllm")
    engines = gpu_engines(("vllm", "vllm-exact", "transformers"), torch.device("cuda"), "bfloat16", "python-of-vllm")
    assert list(engines) == ["vllm", "vllm-exact"]
    assert engines["vllm-exact"].environment["VLLM_BATCH_INVARIANT"] == "1"
    assert engines["vllm"].command[0] == "python-of-vllm"
    del engines["vllm-exact"]
    rows = list(token_times(engines, shape_config("tiny"), (8,), (1, 4), Deadline(600)))
    assert [row.get("token_ms") for row in rows] == [250.0, None, None]
    assert [(row["batch"], row["tokens_per_second"]) for row in rows[1:]] == [(1, 36.0), (4, 144.0)]
    assert asked[0]["setting"]["random"]
    assert asked[-1] == "closed"

    monkeypatch.setattr("hierspec_bench.gpu.bench.gpu_engines", lambda *arguments: engines)
    monkeypatch.setattr(WorkerPeer, "close", lambda peer: None)
    model = hierspec.load(folder / "tiny", dtype="float32", device="cpu", keep_learnt=False)
    bench = GpuBench(settings(engines=("vllm",), parts=("engines",), batches=(1, 2)), lambda size: model, {})
    bench.run()
    assert bench.document["parts"][0].get("error") is None
    assert [row["tokens_per_second"] for row in bench.document["engines"]] == [4.0, 8.0]


def test_engines_that_there_are_not_are_refused():
    with pytest.raises(HierspecError, match="There is no engine 'tgi' for a GPU"):
        gpu_engines(("tgi",), CPU, "float32")
    with pytest.raises(HierspecError, match="cannot be run to look for transformers"):
        gpu_engines(("transformers",), CPU, "float32", "/nowhere/python")
