"""A loaded model: text in, text out, under any plan."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from hierspec.assembly.ahead import start_compiling
from hierspec.assembly.assembler import Assembler
from hierspec.assembly.auto import AUTO, AutoPlan, default_plan
from hierspec.assembly.drafts import DEFAULT_KV_MEMORY, LoadOptions, open_catalogue
from hierspec.assembly.dtype import DTYPES, DtypeChoice, DtypeChooser
from hierspec.assembly.learnt import Learnt
from hierspec.assembly.measured_costs import CostBook
from hierspec.assembly.opening import runs_in_file_bits
from hierspec.assembly.vocabulary import Vocabulary
from hierspec.checkpoints.enlarged import load_enlarged
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import Pack
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy
from hierspec.core.interfaces import Store
from hierspec.core.logprobs import TokenLogprobs, token_logprobs
from hierspec.core.plan import Plan
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.core.scoring import score_tokens
from hierspec.generating import Generates
from hierspec.grammars.compiler import GrammarCompiler
from hierspec.machine import peak_memory
from hierspec.options import PlanLike, TemplateOptions
from hierspec.progress import Progress
from hierspec.progress_bar import progress_bar
from hierspec.prompt_ids import Prompt, prompt_ids
from hierspec.scorers.base import ModelScorer
from hierspec.scorers.catalogue import ScorerCatalogue
from hierspec.stores import Home, check_history
from hierspec.text.tokenizer import Tokenizer
from hierspec.turns import Turns


def load(
    source: str | Path | None = None,
    *,
    dtype: str = "auto",
    device: str = "auto",
    backend: str = "auto",
    weights: str = "auto",
    kv_memory: int = DEFAULT_KV_MEMORY,
    stores: str | Path | None = None,
    history: str | Path | None = None,
    pack: str | Path | None = None,
    enlarged: str = "",
    keep_learnt: bool = True,
    progress: Progress | bool | None = None,
) -> LanguageModel:
    """Load a model folder, a GGUF file or a hub name; with nothing given, the default model.

    dtype is float32, bfloat16, float16 or auto (bfloat16 on a GPU; on a CPU float32, or bfloat16 where a short
    measurement, kept in the cache, shows it to be faster); device is cpu, cuda or auto.
    backend is torch, compiled (CPU only: whole passes in one compiled function, the same bits at every width),
    compiled-vectors (the same without matrix units, which compiled uses for bfloat16 where the CPU has them) or auto.
    weights is auto (file where that is possible and no dtype is given, else as dtype says), file (compiled backend: a
    GGUF file's own bits, nothing is converted), float32 and the like (the same as dtype), int8 or int4 (compiled
    backend: another, faster model, exact in itself).
    kv_memory is the most bytes of KV cache and hidden states.
    stores is the folder of its databases on disk (default: one of the cache, by the model's name and vocabulary).
    history is where answers are remembered, for plans that use them: a file, or the URL of a Redis server that many
    processes share (redis://127.0.0.1:6379/0); by default in that folder, once a history was built.
    pack is the folder of what was trained for it: exits, drafters (default: the one that ships, if any; "none": none).
    enlarged is 1B, 8B, 32B or a list such as hidden=4096,heads=32,layers=32: the same function at the cost of such a
    model, in zeros, to measure with.
    keep_learnt is whether `close` keeps for the next process how often which drafts were accepted (counts, no text).
    progress is True for a bar on stderr, or a function that is called with (what, units done, units in all).
    """
    if source is not None and not isinstance(source, str | os.PathLike):
        raise HierspecError("load takes a model's folder, file or hub name; one that is already loaded cannot be used.")
    check_history(history)
    if weights in DTYPES:  # float32 and the like: another way to ask for a dtype
        if dtype not in ("auto", weights):
            raise HierspecError(f"dtype is {dtype} and weights are {weights}: give one of them.")
        dtype, weights = weights, "auto"
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HierspecError("No CUDA GPU can be used here; choose device cpu.")
    if device == "cpu" and backend != "torch":
        start_compiling()
    with progress_bar(progress) as shown:
        dtypes = DtypeChooser(dtype, device, backend, weights, shown)
        asked = dtypes.choose if dtype == "auto" else DTYPES[dtype]
        if enlarged:
            if weights == "file":
                raise HierspecError("An enlarged model has no bits of a GGUF file (weights file): use weights auto.")
            checkpoint = load_enlarged(source, enlarged, asked, device, shown, pack)
        else:
            # A GGUF file runs in its own quantisation wherever it can, unless something else was asked for.
            if_it_can = partial(runs_in_file_bits, device=device, backend=backend)
            as_stored = if_it_can if (weights, dtype) == ("auto", "auto") else weights == "file"
            checkpoint = load_checkpoint(source, asked, shown, pack, as_stored)
        if checkpoint.file is not None and not enlarged:
            why = "as asked" if weights == "file" else "since it is a GGUF file on a CPU"
            bits = f"with weights in the file's own bits, {why}: {checkpoint.weights}"
            weights, dtypes.choice = "file", DtypeChoice("float32", reason=bits)
        tokenizer = Tokenizer.from_folder(checkpoint.folder)
        options = LoadOptions(dtypes.choice.dtype, device, backend, weights, kv_memory)
        catalogue = open_catalogue(checkpoint, options, shown)
    return LanguageModel(
        catalogue,
        tokenizer,
        checkpoint.folder,
        options,
        stores,
        dtypes.choice,
        keep_learnt,
        checkpoint.file,
        enlarged,
        history,
    )


class LanguageModel(Generates):
    """A model with its tokenizer, and everything that is kept between requests. Threads may share it."""

    def __init__(
        self,
        catalogue: ScorerCatalogue,
        tokenizer: Tokenizer,
        folder: Path,  # in Hugging Face's layout, also where the source was a GGUF file
        options: LoadOptions,
        stores: str | Path | None = None,
        choice: DtypeChoice | None = None,
        keep_learnt: bool = True,
        file: Path | None = None,  # a GGUF file that its weights stay in; then the folder has none
        enlarged: str = "",  # the sizes that it was enlarged to
        history: str | Path | None = None,
    ) -> None:
        self.turns = Turns()
        self.name, self.folder, self.file, self.tokenizer = catalogue.name, folder, file, tokenizer
        self.decoder, self.config = catalogue.decoder, catalogue.decoder.config
        self.dtype, self.backend, self.weights = options.dtype, options.backend, options.weights
        self.dtype_choice = choice or DtypeChoice(options.dtype)  # the dtype, and why it was chosen
        self.kv_memory, self.enlarged = options.kv_memory, enlarged
        self.stop_ids = frozenset((*tokenizer.stop_ids, *self.config.eos_ids))
        vocabulary = Vocabulary(self.name, tokenizer, self.config.vocabulary)
        self.grammars = GrammarCompiler(tokenizer, self.config.vocabulary)
        costs = CostBook(str(folder), self.dtype, self.weights, *([enlarged] if enlarged else []))
        # Identifies the model in the names of saved measurements.
        trained = () if catalogue.pack is None else catalogue.pack.hashes.values()
        self.about = (self.name, str(folder), self.dtype, self.weights, self.decoder.products, *trained)
        self._auto = AutoPlan(self.about, default_plan(self.config, catalogue.pack, self.decoder.backend.device.type))
        learnt = Learnt(self.about, None if catalogue.pack is None else catalogue.pack.learnt(), keep_learnt)
        self.assembler = Assembler(vocabulary, options, catalogue, stores, costs, learnt, history)

    def request(
        self, prompt: Prompt, plan: PlanLike, sampling: Sampling, raw: bool = False, namespace: str = ""
    ) -> Request:
        """A request for an engine of your own. If threads share the model, run each `step` in a `turn` of it."""
        ids, chosen = self.encode(prompt, raw), self.plan(plan)
        with self.turn():
            return self._request(ids, chosen, sampling, namespace)

    def _request(self, ids: list[int], plan: Plan, sampling: Sampling, namespace: str) -> Request:
        if not isinstance(namespace, str):
            raise HierspecError("namespace must be a text, such as the name of a user; leave it out for none.")
        hierarchy, constraint = self.hierarchy(plan), None
        if sampling.grammar is not None:
            if hierarchy.synthetic:
                raise HierspecError("Synthetic tiers know no grammar; choose a plan without agrees, or no grammar.")
            stop_ids = (*self.tokenizer.stop_ids, *sorted(self.stop_ids.difference(self.tokenizer.stop_ids)))
            constraint = self.grammars.constraint(sampling.grammar, stop_ids, sampling.stop_ids)
        request = Request(ids, sampling, hierarchy, self.stop_ids, self.config.context, namespace, constraint)
        if hierarchy.synthetic and self.assembler.synthetics.know(request):
            request.cancel()  # plain decoding took time and left a KV cache: begin afresh without them
            self.forget()
            return self._request(ids, plan, replace(sampling, seed=request.seed), namespace)
        return request

    def encode(self, prompt: Prompt, raw: bool = False, **template: Unpack[TemplateOptions]) -> list[int]:
        """Token ids of a prompt, as `generate` would read it."""
        return prompt_ids(self.tokenizer, prompt, raw, template)

    def score(self, prompt: Prompt, top: int = 0, raw: bool = False) -> list[TokenLogprobs]:
        """Log-probabilities of a text: of every token after the first, and of the `top` most likely at its position."""
        text = self.encode(prompt, raw)
        if len(text) > self.config.context:
            raise HierspecError(f"The text has {len(text)} tokens but the model's context holds {self.config.context}.")
        if text and not 0 <= min(text) <= max(text) < self.config.vocabulary:
            raise HierspecError(
                f"The text holds a token id outside the model's vocabulary of {self.config.vocabulary}."
            )
        passes = score_tokens(self.scorer(self.config.layers), np.array(text, np.int32), 1)
        scores: list[TokenLogprobs] = []
        try:
            while True:
                with self.turn():  # one per pass: others who share the model need not wait for a long text
                    tokens, answer = next(passes, (None, None))
                if tokens is None or answer is None:
                    return scores
                assert answer.logits is not None
                if not np.isfinite(answer.logits.max(axis=1)).all():
                    raise HierspecError("The model's logits are not numbers; its weights may be damaged.")
                scores += [token_logprobs(row, int(each), top) for row, each in zip(answer.logits, tokens, strict=True)]
        finally:
            with self.turn():
                passes.close()

    def plan(self, plan: PlanLike) -> Plan:
        """A plan from its name or file, fitted to this model."""
        if not isinstance(plan, Plan | str | os.PathLike):
            raise HierspecError("plan must be a Plan, the name of one, or a TOML file.")
        if plan == AUTO:
            plan = self._auto.plan
        elif not isinstance(plan, Plan) and (str(plan).endswith(".toml") or os.path.isfile(plan)):
            plan = Plan.read(plan)
        if isinstance(plan, Plan):
            return plan.fitted(self.config.layers, self.config.early_exit)
        return Plan.named(str(plan), self.config.layers, self.config.early_exit)

    def hierarchy(self, plan: Plan) -> Hierarchy:
        """The plan with its names replaced by scorers and stores."""
        return self.assembler.hierarchy(plan)

    def scorer(self, layers: int) -> ModelScorer:
        """The model itself, or its exit after this many layers, through the last norm and head."""
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
    def vocabulary(self) -> Vocabulary:
        """The token ids that its draft models and databases must share."""
        return self.assembler.vocabulary

    @property
    def home(self) -> Home:
        """Where this model's databases are on disk."""
        return self.assembler.stores.home

    def add_store(self, store: Store) -> None:
        """Let plans name this store. Requests see it through its `begin`."""
        with self.turn():
            self.assembler.stores.add(store)

    def turn(self) -> AbstractContextManager[None]:
        """A turn at the model for this thread; others wait until it is over. `generate` and its kin take their own."""
        return self.turns.turn()

    def apart(self) -> LanguageModel:
        """The same model with stores as they were built, and nothing learnt about what is accepted."""
        other = copy(self)  # with the same turns: it has the same caches
        with self.turn():
            other.assembler = self.assembler.apart()
        return other

    def memory(self) -> dict[str, int]:
        """Bytes of the weights and of what is cached for texts, and the peak memory of the process."""
        return {**self.assembler.memory(), "peak": peak_memory()}

    def forget(self) -> None:
        """Drop everything computed so far. The next answers take longer, but are the same."""
        with self.turn():
            self.assembler.forget()

    def close(self) -> None:
        """Save unsaved entries of databases, and what was learnt. The model can still be used."""
        with self.turn():
            self.assembler.close()

    def __repr__(self) -> str:
        layers, products = self.config.layers, self.decoder.products
        return f"LanguageModel({self.name!r}, {layers} layers, {products}, backend {self.decoder.backend.name})"

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
