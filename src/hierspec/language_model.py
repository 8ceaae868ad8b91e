"""A loaded model: text in, text out, under any plan."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hierspec.assembly.auto import AUTO, kept_plan, usual_plan
from hierspec.assembly.dtype import DtypeChoice, choose_dtype
from hierspec.assembly.measured_costs import CostBook
from hierspec.assembly.opening import open_decoder
from hierspec.assembly.paces import PaceBook
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.eagle import is_eagle
from hierspec.checkpoints.load import load_checkpoint
from hierspec.checkpoints.packs import Pack
from hierspec.core.engine import Engine
from hierspec.core.errors import HierspecError
from hierspec.core.hierarchy import Hierarchy, Tier
from hierspec.core.interfaces import Scorer, Store
from hierspec.core.plan import Plan, TierPlan
from hierspec.core.request import Request
from hierspec.core.sampling import Sampling
from hierspec.generation import Generation, TextStep, Writer
from hierspec.machine import peak_memory
from hierspec.paths import cache_folder
from hierspec.progress import Progress, silent
from hierspec.scorers.base import Decoder, ModelScorer, StateScorer
from hierspec.scorers.catalogue import PACKED_FEATURE, PACKED_SMALL, ScorerCatalogue
from hierspec.scorers.pool import StaircasePool
from hierspec.scorers.skipping import skipping_scorer
from hierspec.scorers.synthetic import Synthetics
from hierspec.stores import Home, open_store
from hierspec.text.tokenizer import Tokenizer

Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]  # text, chat messages, or token ids

DEFAULT_PLAN = AUTO
DEFAULT_KV_MEMORY = 4 << 30  # bytes
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
    stores is the folder of its databases on disk (default: one of the cache, by the model's name and vocabulary).
    pack is the folder of what was trained for it: exits, drafters (default: the one that ships, if any; "none": none).
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise HierspecError("No CUDA GPU can be used here; choose device cpu.")
    if dtype != "auto" and dtype not in _DTYPES:
        raise HierspecError(f"Unknown dtype {dtype!r}; choose auto, {', '.join(_DTYPES)}.")
    choice = DtypeChoice(dtype)

    def chosen(config: DecoderConfig) -> torch.dtype:
        nonlocal choice
        choice = DtypeChoice("bfloat16" if device.startswith("cuda") else "float32")
        if device == "cpu" and weights == "auto":
            choice = choose_dtype(config, backend, progress or silent)
        return _DTYPES[choice.dtype]

    checkpoint = load_checkpoint(source, chosen if dtype == "auto" else _DTYPES[dtype], progress, pack)
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    decoder = open_decoder(checkpoint, device, backend, weights, progress or silent)
    return LanguageModel(
        checkpoint.name, checkpoint.folder, tokenizer, decoder, choice.dtype, kv_memory, backend, weights,
        None if stores is None else Path(stores), checkpoint.pack, choice,
    )  # fmt: skip


def open_home(
    source: str | Path | None = None, stores: str | Path | None = None, progress: Progress | None = None
) -> tuple[Tokenizer, int, Home]:
    """A model's tokenizer, the size of its vocabulary, and where its databases lie, without the model itself."""
    checkpoint = load_checkpoint(source, torch.float32, progress)
    tokenizer = Tokenizer.from_folder(checkpoint.folder)
    return tokenizer, checkpoint.config.vocabulary, _home(checkpoint.name, tokenizer, stores)


def _home(name: str, tokenizer: Tokenizer, stores: str | Path | None) -> Home:
    hashed = tokenizer.vocabulary_hash
    own = f"{name.replace('/', '--')}-{hashed[:12]}"
    return Home(Path(stores) if stores is not None else cache_folder() / "stores" / own, hashed)


class LanguageModel:
    """A model and everything it keeps between requests. Not for several threads at once."""

    def __init__(
        self, name: str, folder: Path, tokenizer: Tokenizer, decoder: Decoder, dtype: str, kv_memory: int,
        backend: str = "auto", weights: str = "auto", stores: Path | None = None, pack: Pack | None = None,
        choice: DtypeChoice | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.folder = folder  # in Hugging Face's layout, also where the source was a GGUF file
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.dtype = dtype
        self.dtype_choice = choice or DtypeChoice(dtype)  # and why
        self.backend = backend
        self.weights = weights
        self.config = decoder.config
        self.stop_ids = frozenset((*tokenizer.stop_ids, *decoder.config.eos_ids))
        self.kv_memory = kv_memory
        self._pool = StaircasePool(decoder, kv_memory)
        self._catalogue = ScorerCatalogue(name, decoder, self._pool, pack)
        self._drafts: dict[tuple[str, str], LanguageModel] = {}  # by source and weights
        self._draft_scorers: dict[tuple[str, str | None, bool], StateScorer] = {}
        self._stores_folder = stores
        self._stores: dict[str, Store | None] = {}  # by name; None where there is none and need not be
        self._added: dict[str, Store] = {}  # those that came through add_store
        self._lasting = True  # whether a history may be written to the disk
        self.costs = CostBook(str(folder), dtype, weights)
        # What tells it from other models where something is kept that was measured of it.
        self.about = (
            name,
            str(folder),
            dtype,
            weights,
            decoder.products,
            *(() if pack is None else pack.hashes.values()),
        )
        self._paces = PaceBook(self.costs)
        self._skipping: dict[tuple[int, ...], ModelScorer] = {}  # by the layers left out
        self._synthetics = Synthetics()

    def generate(
        self, prompt: Prompt, *, plan: Plan | str | Path = DEFAULT_PLAN, sampling: Sampling | None = None,
        raw: bool = False, namespace: str = "", **changes: Any,
    ) -> Generation:  # fmt: skip
        """The whole answer. Fields of Sampling may be given by name: `generate("…", max_tokens=100)`.

        A text prompt is put into the model's chat template where it has one, unless `raw`. What is written in one
        namespace (a user, a tenant) never helps to guess for another.
        """
        [generation] = self.generate_many(
            [prompt], plan=plan, sampling=sampling, raw=raw, namespace=namespace, **changes
        )
        return generation

    def generate_many(
        self, prompts: Sequence[Prompt], *, plan: Plan | str | Path = DEFAULT_PLAN, sampling: Sampling | None = None,
        raw: bool = False, namespace: str = "", **changes: Any,
    ) -> list[Generation]:  # fmt: skip
        """The same for several prompts side by side, in packed passes; each answer is what it would be alone."""
        chosen = sampling_with(sampling, changes)
        writers = [Writer(self.request(prompt, plan, chosen, raw, namespace), self.tokenizer) for prompt in prompts]
        by_request = {id(writer.request): writer for writer in writers}
        for request, step in Engine().run([writer.request for writer in writers]):
            by_request[id(request)].add(step)
        return [writer.finish() for writer in writers]

    def stream(
        self, prompt: Prompt, *, plan: Plan | str | Path = DEFAULT_PLAN, sampling: Sampling | None = None,
        raw: bool = False, namespace: str = "", **changes: Any,
    ) -> Stream:  # fmt: skip
        """The answer step by step; `.generation` holds the whole of it afterwards."""
        request = self.request(prompt, plan, sampling_with(sampling, changes), raw, namespace)
        return Stream(Writer(request, self.tokenizer))

    def request(
        self, prompt: Prompt, plan: Plan | str | Path, sampling: Sampling, raw: bool = False, namespace: str = ""
    ) -> Request:
        """A request for an engine of one's own. What one namespace writes never helps to guess for another."""
        hierarchy = self.hierarchy(self.plan(plan))
        request = Request(self.encode(prompt, raw), sampling, hierarchy, self.stop_ids, self.config.context, namespace)
        if hierarchy.synthetic and self._synthetics.know(request):
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

    def plan(self, plan: Plan | str | Path) -> Plan:
        """A plan from its name or file."""
        if isinstance(plan, Plan):
            return plan
        if plan == AUTO:
            return kept_plan(self.about) or usual_plan(self.config, self.pack)
        if str(plan).endswith(".toml") or Path(plan).is_file():
            return Plan.read(plan)
        return Plan.named(str(plan), self.config.layers, self.config.early_exit)

    def hierarchy(self, plan: Plan) -> Hierarchy:
        """The plan with its names replaced by scorers and stores."""
        inner = [self.scorer(self.config.layers), *(self._judge(tier) for tier in plan.tiers)]
        judges: list[Scorer] = [inner[0], *self._synthetics.scorers(plan.tiers, inner[1:])]
        settings: list[Plan | TierPlan] = [plan, *plan.tiers]
        tiers = []
        for level, (judge, own) in enumerate(zip(judges, settings, strict=True)):
            gather, candidates = (own.gather, own.candidates) if isinstance(own, TierPlan) else (1, 1)
            pace = self._paces.pace(plan, level, inner)
            tiers.append(Tier(judge, gather, self._opened(own.stores), own.budget, own.merge, candidates, pace))
        return Hierarchy(tuple(tiers), plan.rule)

    def scorer(self, layers: int) -> ModelScorer:
        """The model itself, or its exit after so many layers through the last norm and head."""
        return self._catalogue.whole(layers)

    @property
    def pack(self) -> Pack | None:
        """What there is for this model beside its weights."""
        return self._catalogue.pack

    def draft(self, source: str, weights: str | None = None) -> LanguageModel:
        """A second model with the same vocabulary, loaded once, on the same device.

        It only guesses, so its weights may be in few bits also where the target's are not.
        """
        weights = weights or self.weights
        if (source, weights) not in self._drafts:
            other = load(
                source, dtype=self.dtype, device=str(self.decoder.backend.device), backend=self.backend,
                weights=weights, kv_memory=self._pool.budget,
            )  # fmt: skip
            same_size = other.config.vocabulary == self.config.vocabulary
            if not same_size or not other.tokenizer.same_vocabulary(self.tokenizer):
                raise HierspecError(
                    f"The draft {source} has another vocabulary than {self.name}; choose a draft of the same family."
                )
            self._drafts[source, weights] = other
        return self._drafts[source, weights]

    @cached_property
    def home(self) -> Home:
        """Where this model's databases on disk lie."""
        return _home(self.name, self.tokenizer, self._stores_folder)

    def apart(self) -> LanguageModel:
        """The same model with stores of its own that know nothing yet, and nothing learnt about their guesses."""
        other = copy(self)
        other._stores = dict(self._added)  # what was added by hand is not ours to make anew
        other._paces, other._lasting = PaceBook(self.costs), False
        return other

    def close(self) -> None:
        """Write what databases on disk have not yet written. The model can still be used."""
        for store in self._stores.values():
            if store is not None:
                store.flush()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def add_store(self, store: Store) -> None:
        """Let plans name this store. Requests see it through its `begin`."""
        self._stores[store.name] = self._added[store.name] = store

    def memory(self) -> dict[str, int]:
        """Bytes: of the weights, of keys, values and states kept for texts, and the most that the process had."""
        drafts = [draft.memory() for draft in self._drafts.values()]
        weights = self.decoder.weight_bytes + self._catalogue.weight_bytes() + sum(draft["weights"] for draft in drafts)
        texts = self._pool.bytes_held() + self._catalogue.bytes_held() + sum(draft["texts"] for draft in drafts)
        return {"weights": weights, "texts": texts, "peak": peak_memory()}

    def forget(self) -> None:
        """Drop everything computed so far. The next answers take longer and are the same."""
        self._pool.clear()
        self._catalogue.clear()
        for scorer in self._skipping.values():
            scorer.forget()
        for draft in self._drafts.values():
            draft.forget()

    def _judge(self, tier: TierPlan) -> StateScorer:
        exits = self._catalogue
        if tier.exit_layer is not None:
            return exits.exit(tier.exit_layer, tier.head, tier.vocabulary, tier.weights)
        if tier.skip_layers:
            skipped = tuple(sorted(tier.skip_layers))
            if skipped not in self._skipping:
                self._skipping[skipped] = skipping_scorer(self.decoder, skipped, self._pool.budget)
            return self._skipping[skipped]
        assert tier.draft is not None
        if tier.draft == PACKED_FEATURE or is_eagle(tier.draft):
            return exits.feature(tier.draft, tier.vocabulary, tier.weights)
        if tier.draft == PACKED_SMALL:
            return exits.small_model(tier.vocabulary, tier.weights)
        small = exits.is_small(tier.vocabulary)
        key = tier.draft, tier.weights, small
        if key not in self._draft_scorers:  # one object for all requests, so that their passes are packed
            draft = self.draft(tier.draft, tier.weights)
            scorer = replace(draft.scorer(draft.config.layers), name=f"draft {draft.name}")
            if small:  # of the target's draft vocabulary: the ids are the same
                head = draft._catalogue.head(draft.decoder.norm, True, tokens=exits.tokens)
                scorer = replace(scorer, head=head, kind="small vocabulary")
            self._draft_scorers[key] = scorer
        return self._draft_scorers[key]

    def _opened(self, names: tuple[str, ...]) -> tuple[Store, ...]:
        for name in names:
            if name not in self._stores and name.removesuffix("?") not in self._stores:
                self._stores[name] = open_store(name, self.home, self._lasting)
        found = [self._stores.get(name.removesuffix("?"), self._stores.get(name)) for name in names]
        return tuple(store for store in found if store is not None)


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
