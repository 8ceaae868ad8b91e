"""transformers in this process, for `bench passes`: single passes cannot be timed through a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hierspec.core.errors import HierspecError
from hierspec.core.sampling import Sampling


class TransformersPeer:
    """Hugging Face transformers on the same folder, greedy: plain, or with its prompt lookup."""

    def __init__(self, folder: Path, dtype: str, device: str, stop_ids: frozenset[int], lookup: bool = False) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise HierspecError("transformers is not installed; run: pip install 'hierspec[bench]'") from error
        self.name = "transformers:lookup" if lookup else "transformers"
        self._options: dict[str, Any] = {"prompt_lookup_num_tokens": 10} if lookup else {}
        self._stop_ids = sorted(stop_ids)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = model.to(device).eval()

    def generate(self, prompt: list[int], sampling: Sampling) -> tuple[list[int], float]:
        import torch

        ids = torch.tensor([prompt], device=self._model.device)
        began = time.perf_counter()
        with torch.inference_mode():
            written = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.max_tokens,
                do_sample=False,
                eos_token_id=self._stop_ids or None,
                pad_token_id=0,
                **self._options,
            )
        tokens = written[0, len(prompt) :].tolist()
        return tokens, time.perf_counter() - began

    def stepper(self, context: list[int]) -> Callable[[int], None]:
        """Prefills the context; returns a function that runs one pass over one more token."""
        import torch
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        with torch.inference_mode():
            self._model(torch.tensor([context], device=self._model.device), past_key_values=cache, use_cache=True)

        def step(token: int) -> None:
            with torch.inference_mode():
                ids = torch.tensor([[token]], device=self._model.device)
                self._model(ids, past_key_values=cache, use_cache=True)
                cache.crop(-1)  # drop the token again

        return step


def open_peer(name: str, folder: Path, dtype: str, device: str, stop_ids: frozenset[int]) -> TransformersPeer:
    if name not in ("transformers", "transformers:lookup"):
        raise HierspecError(f"Unknown engine {name!r}; single passes are compared with transformers only.")
    return TransformersPeer(folder, dtype, device, stop_ids, lookup=name.endswith(":lookup"))
