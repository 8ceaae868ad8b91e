"""llama.cpp through xllamacpp on a GGUF file: plain, n-grams, a draft model."""

import importlib.metadata
import json
import time
from typing import Any

import xllamacpp

_KINDS = xllamacpp.common_speculative_type
_FLASH = xllamacpp.llama_flash_attn_type


class Worker:
    def __init__(self) -> None:
        self.server: Any = None

    def open(self, model: str, setting: dict[str, Any]) -> dict[str, Any]:
        self.server = None
        threads = int(setting.get("threads", 2))
        parameters = xllamacpp.CommonParams()
        parameters.model.path = model
        parameters.n_ctx, parameters.n_parallel, parameters.verbosity = int(setting.get("context", 4096)), 1, 0
        parameters.cache_ram_mib = 0  # cache the prefix of this conversation, not those of earlier prompts
        for pool in (parameters.cpuparams, parameters.cpuparams_batch):
            pool.n_threads = threads
            pool.poll = 0  # idle threads sleep, because others are measured meanwhile
        if "flash" in setting:
            on = _FLASH.LLAMA_FLASH_ATTN_TYPE_ENABLED
            parameters.flash_attn_type = on if setting["flash"] else _FLASH.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if "batch" in setting:
            parameters.n_ubatch = setting["batch"]
        if "ngram" in setting:
            parameters.speculative.types = [_KINDS.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            parameters.speculative.ngram_simple.size_n = setting["ngram"]
            parameters.speculative.ngram_simple.size_m = setting["draft_tokens"]
        if "assistant" in setting:
            parameters.speculative.types = [_KINDS.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
            draft = parameters.speculative.draft
            draft.mparams.path = setting["assistant"]
            draft.n_max = setting.get("draft_tokens", 5)
            for pool in (draft.cpuparams, draft.cpuparams_batch):
                pool.n_threads = threads
                pool.poll = 0
        self.server = xllamacpp.Server(parameters)
        return {
            "version": f"xllamacpp {importlib.metadata.version('xllamacpp')}",
            "dtype": "float32 products with 8-bit activations",
            "note": f"the wheel's code uses {xllamacpp.get_system_info().strip(' |')}",
        }

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        wanted = {
            "prompt": request["prompt"],
            "max_tokens": request["max_tokens"],
            "temperature": request["temperature"],
            "seed": request["seed"],
            "cache_prompt": not request["fresh"],  # a continued conversation has its prefix cached
        }
        if request["temperature"] > 0:
            wanted |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        began = time.perf_counter()
        answer = self.server.handle_completions(wanted)
        seconds = time.perf_counter() - began
        if isinstance(answer, str | bytes):
            answer = json.loads(answer)
        if "error" in answer:
            return {"error": str(answer["error"])[:500]}
        choice, timings = answer["choices"][0], answer["timings"]
        return {
            "text": choice["text"],
            "seconds": seconds,
            "stopped": choice["finish_reason"] == "stop",
            "count": timings["predicted_n"],
            "first_seconds": min(seconds, timings["prompt_ms"] / 1e3),
            "first_tokens": 1,
        }
