"""Hugging Face transformers: plain, prompt lookup, assisted, early exit."""

import time
from typing import Any

import torch
import transformers


class _FirstToken(transformers.generation.streamers.BaseStreamer):
    """Records when the first new tokens arrived, and how many there were."""

    def __init__(self) -> None:
        self.calls, self.at, self.count = 0, 0.0, 0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call passes the prompt
            self.at, self.count = time.perf_counter(), int(value.numel())

    def end(self) -> None:
        pass


class Worker:
    def __init__(self) -> None:
        self.model: Any = None
        self.assistant: Any = None
        self.key: tuple[str, str] | None = None

    def open(self, model: str, setting: dict[str, Any]) -> dict[str, Any]:
        torch.set_num_threads(int(setting.get("threads", 2)))
        dtype = setting.get("dtype", "float32")
        self.device, self.cache = setting.get("device", "cpu"), None
        if self.key != (model, dtype):
            self.model = self._random(model, dtype) if setting.get("random") else self._read(model, dtype)
            self.key = model, dtype
        if setting.get("cache") == "static":
            # With a static cache `generate` compiles its passes on a GPU; a new cache would cause another compilation.
            self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=setting["context"])
        self.options: dict[str, Any] = {}
        if "lookup_tokens" in setting:
            self.options["prompt_lookup_num_tokens"] = setting["lookup_tokens"]
            self.options["max_matching_ngram_size"] = setting.get("lookup_ngram", 2)
        if "exit" in setting:
            self.options["assistant_early_exit"] = setting["exit"]
        if "assistant" in setting:
            self.assistant = self.assistant or self._read(setting["assistant"], dtype)
            self.assistant.generation_config.num_assistant_tokens = setting.get("draft_tokens", 5)
            self.assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self.assistant.generation_config.assistant_confidence_threshold = setting.get("confidence", 0.4)
            self.options["assistant_model"] = self.assistant
        if "exit" in setting:
            self.model.generation_config.num_assistant_tokens = setting.get("draft_tokens", 5)
        version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        return {"version": version, "dtype": dtype, "weights": f"the file's, as {dtype}"}

    def _read(self, folder: str, dtype: str) -> Any:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        return model.to(self.device).eval()

    def _random(self, folder: str, dtype: str) -> Any:
        """A model with the folder's configuration and random weights: it costs as much."""
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device(self.device):
            return transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        ids = torch.tensor([request["prompt"]], device=self.device)
        options: dict[str, Any] = {**self.options, "repetition_penalty": 1.0}
        if request["temperature"] > 0:
            torch.manual_seed(request["seed"])
            options |= {"do_sample": True, "temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
        else:
            options["do_sample"] = False
        options["streamer"] = first = _FirstToken()
        began = time.perf_counter()
        with torch.inference_mode():
            if self.cache is not None:
                self.cache.reset()
                options["past_key_values"] = self.cache
            written = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=request["max_tokens"],
                eos_token_id=request["stop_ids"] or None,
                pad_token_id=0,
                **options,
            )
        seconds = time.perf_counter() - began
        answer: dict[str, Any] = {"tokens": written[0, ids.shape[1] :].tolist(), "seconds": seconds}
        if first.count:
            answer |= {"first_seconds": first.at - began, "first_tokens": first.count}
        return answer
