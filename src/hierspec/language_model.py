"""A loaded model: text in, text out, under any plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from hierspec.checkpoints.load import Checkpoint, load_checkpoint
from hierspec.core.engine import Engine, Request
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Store, Tier
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.sampling import Sampling
from hierspec.generation import Generation, TextStep, Writer
from hierspec.models.cache import StaircasePool
from hierspec.models.decoder import Decoder
from hierspec.models.scorer import AnyDecoder, ModelScorer
from hierspec.progress import Progress, silent
from hierspec.stores import open_store
from hierspec.text.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]  # text, chat messages, or token ids

DEFAULT_PLAN = "lookup"
BACKENDS = ("auto", "compiled", "torch")
DEFAULT_KV_MEMORY = 4 << 30  # bytes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(
    source: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    kv_memory: int = DEFAULT_KV_MEMORY,
    progress: Progress | None = None,
) -> LanguageModel:
    """Load a model folder, a GGUF file or a hub name; with nothing given, the default model.

    dtype is float32, bfloat16, float16 or auto (float32 on a CPU, bfloat16 on a GPU); device is cpu, cuda or auto.
    backend is torch, compiled (CPU only: whole passes in one compiled function, the same bits at every width) or auto.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HierspecError("No CUDA GPU can be used here; choose device cpu.")
    if dtype == "auto":
        dtype = "bfloat16" if device.startswith("cuda") else "float32"
    if dtype not in _DTYPES:
        raise HierspecError(f"Unknown dtype {dtype!r}; choose auto, {', '.join(_DTYPES)}.")
    checkpoint = load_checkpoint(source, _DTYPES[dtype], progress)
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    decoder = open_decoder(checkpoint, device, backend, progress or silent)
    return LanguageModel(checkpoint.name, checkpoint.folder, tokenizer, decoder, dtype, kv_memory, backend)


def open_decoder(checkpoint: Checkpoint, device: str, backend: str, progress: Progress = silent) -> AnyDecoder:
    """The decoder that suits the checkpoint, the device and what is installed."""
    if backend not in BACKENDS:
        raise HierspecError(f"Unknown backend {backend!r}; choose {', '.join(BACKENDS)}.")
    reason = "it runs on a CPU only" if device != "cpu" else ""
    if backend != "torch" and not reason:
        try:
            from hierspec.models.cpu_decoder import CpuDecoder, unsuited
        except ImportError:
            reason = "it needs numba (pip install numba)"
        else:
            reason = unsuited(checkpoint.config, checkpoint.dtype)
            if not reason:
                progress("Compiling for this CPU (once)", 0, 0)
                decoder = CpuDecoder(checkpoint.config, checkpoint.weights, torch.get_num_threads())
                decoder.prepare()
                return decoder
    if backend == "compiled":
        raise HierspecError(f"The compiled backend cannot run {checkpoint.name} here: {reason}; use --backend torch.")
    return Decoder(checkpoint.config, checkpoint.weights, device)


class LanguageModel:
    """A model and everything it keeps between requests. Not for several threads at once."""

    def __init__(
        self, name: str, folder: Path, tokenizer: Tokenizer, decoder: AnyDecoder, dtype: str, kv_memory: int,
        backend: str = "auto",
    ) -> None:  # fmt: skip
        self.name = name
        self.folder = folder  # in Hugging Face's layout, also where the source was a GGUF file
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.dtype = dtype
        self.backend = backend
        self.config = decoder.config
        self.stop_ids = frozenset((*tokenizer.stop_ids, *decoder.config.eos_ids))
        self._pool = StaircasePool(decoder, kv_memory)
        self._scorers: dict[int, ModelScorer] = {}
        self._drafts: dict[str, LanguageModel] = {}
        self._draft_scorers: dict[str, ModelScorer] = {}
        self._stores: dict[str, Store] = {}

    def generate(
        self, prompt: Prompt, *, plan: Plan | str | Path = DEFAULT_PLAN, sampling: Sampling | None = None,
        raw: bool = False, **changes: Any,
    ) -> Generation:  # fmt: skip
        """The whole answer. Fields of Sampling may be given by name: `generate("…", max_tokens=100)`.

        A text prompt is put into the model's chat template where it has one, unless `raw`.
        """
        [generation] = self.generate_many([prompt], plan=plan, sampling=sampling, raw=raw, **changes)
        return generation

    def generate_many(
        self, prompts: Sequence[Prompt], *, plan: Plan | str | Path = DEFAULT_PLAN, sampling: Sampling | None = None,
        raw: bool = False, **changes: Any,
    ) -> list[Generation]:  # fmt: skip
        """The same for several prompts side by side, in packed passes; each answer is what it would be alone."""
        chosen = sampling_with(sampling, changes)
        writers = [Writer(self.request(prompt, plan, chosen, raw), self.tokenizer) for prompt in prompts]
        by_request = {id(writer.request): writer for writer in writers}
        for request, step in Engine().run([writer.request for writer in writers]):
            by_request[id(request)].add(step)
        return [writer.finish() for writer in writers]

    def stream(
        self, prompt: Prompt, *, plan: Plan | str | Path = DEFAULT_PLAN, sampling: Sampling | None = None,
        raw: bool = False, **changes: Any,
    ) -> Stream:  # fmt: skip
        """The answer step by step; `.generation` holds the whole of it afterwards."""
        return Stream(Writer(self.request(prompt, plan, sampling_with(sampling, changes), raw), self.tokenizer))

    def request(self, prompt: Prompt, plan: Plan | str | Path, sampling: Sampling, raw: bool = False) -> Request:
        """A request for an engine of one's own."""
        hierarchy = self.hierarchy(self.plan(plan))
        return Request(self.encode(prompt, raw), sampling, hierarchy, self.stop_ids, self.config.context)

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt, as `generate` would read it."""
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def plan(self, plan: Plan | str | Path) -> Plan:
        """A plan from its name or file."""
        if isinstance(plan, Plan):
            return plan
        if str(plan).endswith(".toml") or Path(plan).is_file():
            return Plan.read(plan)
        return Plan.named(str(plan), self.config.layers)

    def hierarchy(self, plan: Plan) -> Hierarchy:
        """The plan with its names replaced by scorers and stores."""
        tiers = [Tier(self.scorer(self.config.layers), 1, self._opened(plan.stores), plan.budget, plan.merge)]
        for tier in plan.tiers:
            stores = self._opened(tier.stores)
            tiers.append(Tier(self._judge(tier), tier.gather, stores, tier.budget, tier.merge, tier.candidates))
        return Hierarchy(tuple(tiers), plan.rule)

    def scorer(self, layers: int) -> ModelScorer:
        """The model itself, or its exit after so many layers."""
        if not 1 <= layers <= self.config.layers:
            raise HierspecError(f"exit_layer {layers} does not exist: {self.name} has {self.config.layers} layers.")
        if layers not in self._scorers:
            self._pool.add_boundary(layers)
            name = "target" if layers == self.config.layers else f"exit {layers}"
            self._scorers[layers] = ModelScorer(name, self.decoder, self._pool, layers)
        return self._scorers[layers]

    def draft(self, source: str) -> LanguageModel:
        """A second model with the same vocabulary, loaded once, on the same device."""
        if source not in self._drafts:
            other = load(
                source, dtype=self.dtype, device=str(self.decoder.device), backend=self.backend,
                kv_memory=self._pool.budget,
            )  # fmt: skip
            same_size = other.config.vocabulary == self.config.vocabulary
            if not same_size or not other.tokenizer.same_vocabulary(self.tokenizer):
                raise HierspecError(
                    f"The draft {source} has another vocabulary than {self.name}; choose a draft of the same family."
                )
            self._drafts[source] = other
        return self._drafts[source]

    def add_store(self, store: Store) -> None:
        """Let plans name this store. Requests see it through its `begin`."""
        self._stores[store.name] = store

    def forget(self) -> None:
        """Drop everything computed so far. The next answers take longer and are the same."""
        self._pool.clear()
        for draft in self._drafts.values():
            draft.forget()

    def _judge(self, tier: TierPlan) -> ModelScorer:
        if tier.draft is not None:
            if tier.draft not in self._draft_scorers:  # one object for all requests, so that their passes are packed
                draft = self.draft(tier.draft)
                scorer = replace(draft.scorer(draft.config.layers), name=f"draft {draft.name}")
                self._draft_scorers[tier.draft] = scorer
            return self._draft_scorers[tier.draft]
        assert tier.exit_layer is not None
        return self.scorer(tier.exit_layer)

    def _opened(self, names: tuple[str, ...]) -> tuple[Store, ...]:
        for name in names:
            if name not in self._stores:
                self._stores[name] = open_store(name)
        return tuple(self._stores[name] for name in names)


class Stream:
    """Iterate for the steps, once; leaving the loop cancels. `generation` holds what there is so far."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def __iter__(self) -> Iterator[TextStep]:
        for _, step in Engine().run([self._writer.request]):
            yield self._writer.add(step)
        self._writer.finish()  # raises what went wrong

    def cancel(self) -> None:
        """Stop before the next pass."""
        self._writer.request.cancel()

    @property
    def generation(self) -> Generation:
        return self._writer.finish()


def sampling_with(sampling: Sampling | None, changes: Mapping[str, Any]) -> Sampling:
    """A sampling with some fields changed; a wrong name is told with the nearest right one."""
    known = [field.name for field in fields(Sampling)]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise HierspecError(f"Unknown sampling option {name!r}{hint}; options are {', '.join(known)}.")
    return replace(sampling or Sampling(), **changes)
