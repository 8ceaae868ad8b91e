"""llama.cpp through llama-cpp-python, compiled for this processor, on a GGUF file: plain, prompt lookup.

The loop is ours, over llama.cpp's functions: when llama-cpp-python drafts, its own loop computes the logits of every
prompt token, which would make its lookup slower than necessary.
"""

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

_BATCH = 512


class Worker:
    def __init__(self) -> None:
        self.model: Any = None
        self.key: Any = None
        self.held: list[int] = []  # tokens in the KV cache

    def open(self, model: str, setting: dict[str, Any]) -> dict[str, Any]:
        threads, flash = int(setting.get("threads", 2)), bool(setting.get("flash"))
        context = int(setting.get("context", 4096))
        if self.key != (model, threads, flash, context):
            if self.model is not None:
                self.model.close()
            self.model, self.key, self.held = None, None, []
            self.model = llama_cpp.Llama(
                model,
                n_ctx=context,
                n_batch=_BATCH,
                n_ubatch=_BATCH,
                n_threads=threads,
                n_threads_batch=threads,
                flash_attn=flash,
                verbose=False,
            )
            self.key, self.context = (model, threads, flash, context), context
            self.batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
            self.memory = llama_cpp.llama_get_memory(self.model.ctx)
        self.lookup = None
        if "lookup_tokens" in setting:
            self.lookup = LlamaPromptLookupDecoding(setting.get("lookup_ngram", 2), setting["lookup_tokens"])
        used = llama_cpp.llama_print_system_info().decode().strip(" |")
        return {
            "version": f"llama-cpp-python {llama_cpp.__version__}",
            "dtype": "float32 products with 8-bit activations",
            "note": f"compiled for this processor; its code uses {used}",
        }

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt, most, stops = request["prompt"], request["max_tokens"], set(request["stop_ids"])
        if len(prompt) + most > self.context:
            return {"error": f"{len(prompt)} + {most} tokens are more than its context of {self.context}"}
        sampler = self._sampler(request["temperature"], request["seed"])
        began = time.perf_counter()
        self._cut(0 if request["fresh"] else min(_shared(self.held, prompt), len(prompt) - 1))
        fresh = prompt[len(self.held) :]
        for start in range(0, len(fresh), _BATCH):
            part = fresh[start : start + _BATCH]
            self._read(part, len(part) - 1)
        written = [self._pick(sampler, len(part) - 1)]
        first = time.perf_counter() - began
        while len(written) < most and written[-1] not in stops:
            draft = self._draft(prompt, written)[: most - len(written) - 1]
            self._read([written[-1], *draft], 0)
            start = len(written)
            for row in range(len(draft) + 1):
                written.append(self._pick(sampler, row))
                if written[-1] in stops or row == len(draft) or written[-1] != draft[row]:
                    break
            if len(written) - start <= len(draft):
                self._cut(len(prompt) + len(written) - 1)
        seconds = time.perf_counter() - began
        if sampler is not None:
            llama_cpp.llama_sampler_free(sampler)
        return {"tokens": written, "seconds": seconds, "first_seconds": first, "first_tokens": 1}

    def _draft(self, prompt: list[int], written: list[int]) -> list[int]:
        if self.lookup is None:
            return []
        tokens: list[int] = self.lookup(np.array(prompt + written, dtype=np.intc)).tolist()
        return tokens

    def _sampler(self, temperature: float, seed: int) -> Any:
        if temperature == 0:
            return None
        chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_temp(temperature))
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(seed & 0xFFFFFFFF))
        return chain

    def _pick(self, sampler: Any, row: int) -> int:
        """The token after row `row` of the batch."""
        if sampler is not None:
            return int(llama_cpp.llama_sampler_sample(sampler, self.model.ctx, row))
        logits = llama_cpp.llama_get_logits_ith(self.model.ctx, row)
        return int(np.ctypeslib.as_array(logits, (self.model.n_vocab(),)).argmax())

    def _read(self, tokens: list[int], wanted: int) -> None:
        """One pass over the tokens after those in the KV cache; logits from the token `wanted` on."""
        count, batch = len(tokens), self.batch
        batch.n_tokens = count
        ctypes.memmove(batch.token, (ctypes.c_int32 * count)(*tokens), 4 * count)
        ctypes.memmove(batch.pos, (ctypes.c_int32 * count)(*range(len(self.held), len(self.held) + count)), 4 * count)
        for row in range(count):
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = 0
            batch.logits[row] = row >= wanted
        if failed := llama_cpp.llama_decode(self.model.ctx, batch):
            self._cut(0)
            raise RuntimeError(f"llama_decode answered {failed}")
        self.held += tokens

    def _cut(self, length: int) -> None:
        """Drops the KV cache beyond a length."""
        if length < len(self.held) and not llama_cpp.llama_memory_seq_rm(self.memory, 0, length, -1):
            raise RuntimeError("this model's memory cannot be cut")
        del self.held[length:]


def _shared(one: list[int], other: list[int]) -> int:
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))
