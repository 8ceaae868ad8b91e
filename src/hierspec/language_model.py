"""A loaded model: text in, text out, under any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hierspec.assembly.ahead import start_compiling
from hierspec.assembly.assembler import Assembler
from hierspec.assembly.auto import AUTO, default_plan, saved_plan
from hierspec.assembly.drafts import DEFAULT_KV_MEMORY, LoadOptions, open_catalogue
from hierspec.assembly.dtype import DTYPES, DtypeChoice, DtypeChooser
from hierspec.assembly.measured_costs import CostBook
from hierspec.assembly.vocabulary import Vocabulary
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import Pack
from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy
from hierspec.core.interfaces import Store
from hierspec.core.plan import Plan
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.generation import Generation, Stream, Writer, sampling_with
from hierspec.machine import peak_memory
from hierspec.progress import Progress, silent
from hierspec.scorers.base import ModelScorer
from hierspec.scorers.catalogue import ScorerCatalogue
from hierspec.stores import Home
from hierspec.text.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]  # text, chat messages, or token ids
PlanLike = Plan | str | Path  # a plan, its name, or its TOML file

DEFAULT_PLAN = AUTO


def load(
    source: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    weights: str = "auto",
    kv_memory: int = DEFAULT_KV_MEMORY,
    stores: str | Path | None = None,
    pack: str | Path | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """Load a model folder, a GGUF file or a hub name; with nothing given, the default model.

    dtype is float32, bfloat16, float16 or auto (bfloat16 on a GPU; on a CPU float32, or bfloat16 where a short
    measurement, kept in the cache, shows it to be faster); device is cpu, cuda or auto.
    backend is torch, compiled (CPU only: whole passes in one compiled function, the same bits at every width),
    compiled-vectors (the same without matrix units, which compiled uses for bfloat16 where the CPU has them) or auto.
    weights is auto (as dtype says), int8 or int4 (compiled backend: another, faster model, exact in itself).
    kv_memory is the most bytes of KV cache and hidden states.
    stores is the folder of its databases on disk (default: one of the cache, by the model's name and vocabulary).
    pack is the folder of what was trained for it: exits, drafters (default: the one that ships, if any; "none": none).
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HierspecError("No CUDA GPU can be used here; choose device cpu.")
    if device == "cpu" and backend != "torch":
        start_compiling()
    dtypes = DtypeChooser(dtype, device, backend, weights, progress or silent)
    checkpoint = load_checkpoint(source, dtypes.choose if dtype == "auto" else DTYPES[dtype], progress, pack)
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    options = LoadOptions(dtypes.choice.dtype, device, backend, weights, kv_memory)
    catalogue = open_catalogue(checkpoint, options, progress or silent)
    return LanguageModel(catalogue, tokenizer, checkpoint.folder, options, stores, dtypes.choice)


class LanguageModel:
    """A model with its tokenizer, and everything that is kept between requests. Not for several threads at once."""

    def __init__(
        self,
        catalogue: ScorerCatalogue,
        tokenizer: Tokenizer,
        folder: Path,  # in Hugging Face's layout, also where the source was a GGUF file
        options: LoadOptions,
        stores: str | Path | None = None,
        choice: DtypeChoice | None = None,
    ) -> None:
        self.name, self.folder, self.tokenizer = catalogue.name, folder, tokenizer
        self.decoder, self.config = catalogue.decoder, catalogue.decoder.config
        self.dtype, self.backend, self.weights = options.dtype, options.backend, options.weights
        self.dtype_choice = choice or DtypeChoice(options.dtype)  # and why
        self.kv_memory = options.kv_memory
        self.stop_ids = frozenset((*tokenizer.stop_ids, *self.config.eos_ids))
        vocabulary = Vocabulary(self.name, tokenizer, self.config.vocabulary)
        costs = CostBook(str(folder), self.dtype, self.weights)
        self.assembler = Assembler(vocabulary, options, catalogue, stores, costs)
        # Tells it from other models where something measured of it is saved.
        trained = () if catalogue.pack is None else catalogue.pack.hashes.values()
        self.about = (self.name, str(folder), self.dtype, self.weights, self.decoder.products, *trained)

    def generate(
        self,
        prompt: Prompt,
        *,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        raw: bool = False,
        namespace: str = "",
        **changes: Any,
    ) -> Generation:
        """The whole answer. Fields of Sampling may be given by name: `generate("…", max_tokens=100)`.

        A text prompt is put into the model's chat template where it has one, unless `raw`. What is written in one
        namespace (a user, a tenant) is never used to draft for another.
        """
        [generation] = self.generate_many(
            [prompt], plan=plan, sampling=sampling, raw=raw, namespace=namespace, **changes
        )
        return generation

    def generate_many(
        self,
        prompts: Sequence[Prompt],
        *,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        raw: bool = False,
        namespace: str = "",
        **changes: Any,
    ) -> list[Generation]:
        """The same for several prompts in batched passes; each answer is what it would be alone."""
        sampling = sampling_with(sampling, changes)
        writers = [Writer(self.request(prompt, plan, sampling, raw, namespace), self.tokenizer) for prompt in prompts]
        by_request = {id(writer.request): writer for writer in writers}
        for request, step in Engine().run([writer.request for writer in writers]):
            by_request[id(request)].add(step)
        return [writer.finish() for writer in writers]

    def stream(
        self,
        prompt: Prompt,
        *,
        plan: PlanLike = DEFAULT_PLAN,
        sampling: Sampling | None = None,
        raw: bool = False,
        namespace: str = "",
        **changes: Any,
    ) -> Stream:
        """The answer step by step; `.generation` holds the whole of it afterwards."""
        request = self.request(prompt, plan, sampling_with(sampling, changes), raw, namespace)
        return Stream(Writer(request, self.tokenizer))

    def request(
        self, prompt: Prompt, plan: PlanLike, sampling: Sampling, raw: bool = False, namespace: str = ""
    ) -> Request:
        """A request for an engine of one's own."""
        hierarchy = self.hierarchy(self.plan(plan))
        request = Request(self.encode(prompt, raw), sampling, hierarchy, self.stop_ids, self.config.context, namespace)
        if hierarchy.synthetic and self.assembler.synthetics.know(request):
            request.cancel()  # writing it plainly took time and left states behind, which are not the new one's
            self.forget()
            return self.request(prompt, plan, replace(sampling, seed=request.seed), raw, namespace)
        return request

    def encode(self, prompt: Prompt, raw: bool = False) -> list[int]:
        """Token ids of a prompt, as `generate` would read it."""
        if isinstance(prompt, str):
            if raw or not self.tokenizer.has_chat_template:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if len(prompt) and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        return [int(token) for token in prompt]  # type: ignore[arg-type]

    def plan(self, plan: PlanLike) -> Plan:
        """A plan from its name or file, fitted to this model."""
        if plan == AUTO:
            plan = saved_plan(self.about) or default_plan(self.config, self.pack)
        elif not isinstance(plan, Plan) and (str(plan).endswith(".toml") or Path(plan).is_file()):
            plan = Plan.read(plan)
        if isinstance(plan, Plan):
            return plan.fitted(self.config.layers, self.config.early_exit)
        return Plan.named(str(plan), self.config.layers, self.config.early_exit)

    def hierarchy(self, plan: Plan) -> Hierarchy:
        """The plan with its names replaced by scorers and stores."""
        return self.assembler.hierarchy(plan)

    def scorer(self, layers: int) -> ModelScorer:
        """The model itself, or its exit after so many layers through the last norm and head."""
        return self.assembler.catalogue.whole(layers)

    @property
    def costs(self) -> CostBook:
        """What passes of this model's scorers cost."""
        return self.assembler.costs

    @property
    def pack(self) -> Pack | None:
        """What was trained for this model beside its weights."""
        return self.assembler.catalogue.pack

    @property
    def home(self) -> Home:
        """Where this model's databases are on disk."""
        return self.assembler.stores.home

    def add_store(self, store: Store) -> None:
        """Let plans name this store. Requests see it through its `begin`."""
        self.assembler.stores.add(store)

    def apart(self) -> LanguageModel:
        """The same model with stores as they were built, and nothing learnt about what is accepted."""
        other = copy(self)
        other.assembler = self.assembler.apart()
        return other

    def memory(self) -> dict[str, int]:
        """Bytes: of the weights, of what is cached for texts, and the most that the process had."""
        return {**self.assembler.memory(), "peak": peak_memory()}

    def forget(self) -> None:
        """Drop everything computed so far. The next answers take longer and are the same."""
        self.assembler.forget()

    def close(self) -> None:
        """Write what databases on disk have not yet written. The model can still be used."""
        self.assembler.stores.flush()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
