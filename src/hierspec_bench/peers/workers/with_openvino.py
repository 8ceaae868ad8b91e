"""OpenVINO GenAI on a GGUF file: plain, prompt lookup."""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

_LOADED_BY = ("threads", "precision", "lookup_tokens", "kv_cache", "group_size")


class Worker:
    def __init__(self) -> None:
        self.pipe: Any = None
        self.key: Any = None

    def open(self, model: str, setting: dict[str, Any]) -> dict[str, Any]:
        lookup = "lookup_tokens" in setting
        key = model, lookup, *(setting.get(name) for name in _LOADED_BY if name != "lookup_tokens")
        if key != self.key:
            self.pipe = self.key = None  # free the old one's memory first
            properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(setting.get("threads", 2))}
            if "precision" in setting:
                properties["INFERENCE_PRECISION_HINT"] = setting["precision"]
            if "kv_cache" in setting:
                properties["KV_CACHE_PRECISION"] = setting["kv_cache"]
            if "group_size" in setting:
                properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = setting["group_size"]
            if lookup:
                properties["prompt_lookup"] = True
            self.pipe = openvino_genai.LLMPipeline(model, "CPU", **properties)
            self.key = key
        self.setting = setting
        return {"version": f"openvino-genai {openvino_genai.__version__}", "dtype": setting.get("precision", "default")}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.apply_chat_template = False
        config.stop_token_ids = set(request["stop_ids"])
        if request["stop_ids"]:
            config.eos_token_id = request["stop_ids"][0]
        config.do_sample = request["temperature"] > 0
        if config.do_sample:
            config.temperature, config.top_p, config.top_k = request["temperature"], 1.0, 1 << 30
            config.rng_seed = request["seed"]
        if "lookup_tokens" in self.setting:
            config.num_assistant_tokens = self.setting["lookup_tokens"]
            config.max_ngram_size = self.setting.get("lookup_ngram", 3)
        ids = np.array([request["prompt"]], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        began = time.perf_counter()
        result = self.pipe.generate(inputs, config)
        seconds = time.perf_counter() - began
        tokens = [int(token) for token in result.tokens[0]]
        answer: dict[str, Any] = {"tokens": tokens, "seconds": seconds, "stopped": len(tokens) < request["max_tokens"]}
        first = result.perf_metrics.get_ttft().mean / 1e3
        if 0 < first <= seconds:
            answer |= {"first_seconds": first, "first_tokens": 1}
        return answer
