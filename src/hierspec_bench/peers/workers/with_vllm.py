"""vLLM in its own process's thread: plain, n-grams, suffixes. On a CPU in float32, for equality."""

import os
import time
from typing import Any


class Worker:
    def __init__(self) -> None:
        self.engine: Any = None

    def open(self, model: str, setting: dict[str, Any]) -> dict[str, Any]:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
        os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
        os.environ["OMP_NUM_THREADS"] = str(setting.get("threads", 2))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else it uses every core, whatever the threads
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        import vllm

        if self.engine is not None:
            raise RuntimeError("vLLM is opened once in a process")
        more: dict[str, Any] = {}
        if "method" in setting:
            more["speculative_config"] = {
                "method": setting["method"],
                "num_speculative_tokens": setting["draft_tokens"],
            }
            if setting["method"] == "ngram":
                more["speculative_config"]["prompt_lookup_max"] = setting.get("lookup_ngram", 3)
        if "gpu_memory" in setting:  # its share of the GPU's memory
            more["gpu_memory_utilization"] = setting["gpu_memory"]
        if setting.get("random"):  # random weights in the folder's configuration, which needs none
            more |= {"load_format": "dummy", "skip_tokenizer_init": True}
        dtype = setting.get("dtype", "float32")
        self.engine = vllm.LLM(
            model,
            dtype=dtype,
            max_model_len=int(setting.get("context", 4096)),
            max_num_seqs=int(setting.get("together", 1)),
            enable_prefix_caching=True,
            enforce_eager=bool(setting.get("eager", False)),
            disable_log_stats=False,  # otherwise it does not report the time of the first token
            **more,
        )
        return {"version": f"vllm {vllm.__version__}", "dtype": dtype, "weights": f"the file's, as {dtype}"}

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        import vllm

        sampling = vllm.SamplingParams(
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            seed=request["seed"],
            stop_token_ids=request["stop_ids"],
            detokenize=False,
        )
        if request["fresh"]:
            self.engine.reset_prefix_cache()
        prompts = [{"prompt_token_ids": prompt} for prompt in request.get("prompts", ())]
        began = time.perf_counter()
        if prompts:
            results = self.engine.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - began
            return {"counts": [len(each.outputs[0].token_ids) for each in results], "seconds": seconds}
        [result] = self.engine.generate([{"prompt_token_ids": request["prompt"]}], sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        answer: dict[str, Any] = {"tokens": list(result.outputs[0].token_ids), "seconds": seconds}
        latency = getattr(getattr(result, "metrics", None), "first_token_latency", None)
        if latency and 0 < latency <= seconds:
            answer |= {"first_seconds": latency, "first_tokens": 1}
        return answer
