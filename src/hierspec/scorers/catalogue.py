"""Scorers that live on one checkpoint's states: the model itself, its exits, and what a pack adds to them.

Each is made once, so that the passes of several requests are batched.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.base import Decoder, Join, PassWriter, Shortlist
from hierspec.backends.torch.backend import TorchBackend
from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.eagle import Eagle3Branch, read_eagle
from hierspec.checkpoints.packs import FEATURE, SMALL, Branch, FeatureBranch, Pack
from hierspec.core.draft_tree import DraftTree
from hierspec.core.errors import HierspecError
from hierspec.scorers.base import Head, ModelScorer, StateScorer, WholeHead
from hierspec.scorers.drafters import AdapterScorer, BranchScorer, FeatureScorer, Layer, SmallScorer
from hierspec.scorers.eagle import EagleDecoder, EagleJoin, OwnHead
from hierspec.scorers.pool import StaircasePool
from hierspec.scorers.rounds import FeatureRounds
from hierspec.scorers.shortlist import DraftHead

PACKED_FEATURE, PACKED_SMALL = "feature", "small"  # as drafts: the pack's feature drafter and small model
_OTHERWISE = (
    "train one (hierspec train draft), give a pack that has one (--pack FOLDER), name the folder of {} as the draft "
    "in a plan file, or choose a plan without it, such as lookup"
)


class ScorerCatalogue:
    def __init__(self, name: str, decoder: Decoder, pool: StaircasePool, pack: Pack | None) -> None:
        self.name, self.decoder, self.pool, self.pack = name, decoder, pool, pack
        self._scorers: dict[tuple[object, ...], StateScorer] = {}
        self._shortlists: dict[tuple[str, bytes], Shortlist] = {}  # by the format of weights and the tokens
        self._rounds: dict[tuple[object, ...], FeatureRounds | None] = {}
        self._bytes = 0

    @cached_property
    def _writer(self) -> PassWriter | None:
        return self.decoder.backend.pass_writer(self.decoder)

    def whole(self, layers: int) -> ModelScorer:
        """The model itself, or its exit after this many layers, through the last norm and the whole head."""
        config = self.decoder.config
        if not 1 <= layers <= config.layers:
            raise HierspecError(f"exit_layer {layers} does not exist: {self.name} has {config.layers} layers.")
        key = ("whole", layers)
        if key not in self._scorers:
            self.pool.add_tap(layers)
            name = "target" if layers == config.layers else f"exit {layers}"
            head = WholeHead(self.decoder)
            self._scorers[key] = ModelScorer(name, self.decoder, self.pool, layers, head, writer=self._writer)
        scorer = self._scorers[key]
        assert isinstance(scorer, ModelScorer)
        return scorer

    def exit(
        self, layers: int, head: str = "auto", vocabulary: str = "auto", weights: str | None = None
    ) -> StateScorer:
        """An exit as a drafting tier: head is shared, adapter or auto; vocabulary is full, small or auto."""
        shared = self.whole(layers)
        if head == "auto":
            head = "adapter" if self.pack is not None and layers in self.pack.exits() else "shared"
        small = self.is_small(vocabulary)
        norm = None if self.pack is None else self.pack.exit_norm(layers)
        if head == "shared" and not small:
            if weights is not None:
                raise HierspecError(
                    f"Exit {layers} of {self.name} runs on the target's own weights; leave weights out of its tier, or "
                    "give a pack with an adapter."
                )
            if norm is None:
                return shared
        key = ("exit", layers, head, small, weights)
        if key not in self._scorers:
            kind = f"{head}, {self._size(small)}, {weights}"
            if head == "shared":
                norm = self.decoder.norm if norm is None else norm.to(self.decoder.norm)
                exit_head = self.head(norm, small, weights)
                scorer: StateScorer = ModelScorer(
                    shared.name, self.decoder, self.pool, layers, exit_head, kind, writer=self._writer
                )
            else:
                if self.pack is None:
                    raise HierspecError(
                        f'head = "adapter" needs a pack with an adapter for exit {layers}, and {self.name} has no '
                        'pack: give one (--pack FOLDER), or use head = "shared".'
                    )
                branch = self.pack.adapter(layers, self.decoder.config)
                if branch.config.layers > 1:
                    kind = f"{kind}, {branch.config.layers} layers"
                exit_head, layer = self.head(branch.norm, small, weights), self._layer(branch, weights)
                scorer = AdapterScorer(shared.name, self.decoder, self.pool, layers, exit_head, kind, layer=layer)
            self._scorers[key] = scorer
        return self._scorers[key]

    def feature(self, source: str, vocabulary: str = "auto", weights: str | None = None) -> FeatureScorer:
        """The pack's feature drafter, or the one in a folder with an EAGLE head."""
        packed = source == PACKED_FEATURE
        key = ("feature", source, self.is_small(vocabulary) if packed else vocabulary, weights)
        if key not in self._scorers:
            config = self.decoder.config
            branch: FeatureBranch | Eagle3Branch
            if not packed:
                branch = read_eagle(source, config)
            elif self.pack is not None and self.pack.has(FEATURE):
                branch = self.pack.feature(config)
            else:
                raise HierspecError(
                    f"{self.name} has no feature drafter: {_OTHERWISE.format('an EAGLE head or another model')}."
                )
            if isinstance(branch, Eagle3Branch):
                self._scorers[key] = self._eagle(branch, source, vocabulary, weights)
            else:
                self._scorers[key] = self._feature(branch, source, self.is_small(vocabulary), weights)
        scorer = self._scorers[key]
        assert isinstance(scorer, FeatureScorer)
        return scorer

    def _feature(self, branch: FeatureBranch, source: str, small: bool, weights: str | None) -> FeatureScorer:
        layers, last = self.decoder.config.layers, self.decoder.norm
        for tap in branch.taps:
            self.pool.add_tap(tap)
        norm = None if branch.norm is None else branch.norm.to(last)
        join = self._join(branch.fc, branch.fc_bias, weights)
        first = join if branch.first is None else self._join(branch.first, None, weights)
        # States at taps are normalised without weights: a norm of ones.
        first_norms = torch.stack([last, *(torch.ones_like(last) for _ in branch.taps)])
        own_norm = None if norm is None else norm[None]
        head, layer = self.head(norm, small, weights), self._layer(branch, weights)
        writer = None
        if isinstance(head, DraftHead):
            parts = (first, first_norms, join, own_norm), (head.shortlist, head.norm)
            writer = self.decoder.backend.draft_writer(self.decoder, layer.decoder, *parts)
        return FeatureScorer(
            "feature drafter",
            self.decoder,
            self.pool,
            layers,
            head,
            f"{source}, {self._size(small)}, {weights}",
            layer=layer,
            join=join,
            first=first,
            reads=(layers, *branch.taps),
            first_norms=first_norms,
            norm=own_norm,
            skips_first=branch.skips_first,
            writer=writer,
        )

    def _eagle(self, branch: Eagle3Branch, source: str, vocabulary: str, weights: str | None) -> FeatureScorer:
        if vocabulary != "auto" or weights not in (None, "auto"):
            which = "vocabulary" if vocabulary != "auto" else "weights"
            raise HierspecError(
                f"{source} is an EAGLE-3 head, which has its own vocabulary and runs as it is: leave {which} out."
            )
        target, norm = self.decoder, branch.norm
        assert norm is not None
        for tap in branch.taps:
            self.pool.add_tap(tap)
        named = {name: tensor.to(target.dtype) for name, tensor in self._named(branch).items()}
        device = target.backend.device
        decoder = EagleDecoder(TorchBackend(device), branch.config, named)
        weight, tokens, eps = branch.head.to(device, target.dtype), branch.tokens, branch.config.norm_eps
        head = OwnHead(weight, norm.to(weight), tokens, target.config.vocabulary, eps)
        first = EagleJoin(target, branch.fc)
        self._bytes += head.bytes + first.bytes
        return FeatureScorer(
            "EAGLE-3 head",
            target,
            self.pool,
            target.config.layers,
            head,
            f"{source}, {len(tokens)}",
            layer=self._with_pool(decoder),
            first=first,
            join=EagleJoin(target, None),
            reads=branch.taps,
            first_norms=None,
            norm=None,
            skips_first=True,
        )

    def small_model(self, vocabulary: str = "auto", weights: str | None = None) -> SmallScorer:
        """The pack's small model."""
        small = self.is_small(vocabulary)
        key = ("small", small, weights)
        if key not in self._scorers:
            if self.pack is None or not self.pack.has(SMALL):
                raise HierspecError(f"{self.name} has no small model: {_OTHERWISE.format('another model')}.")
            branch = self.pack.small(self.decoder.config)
            self._scorers[key] = SmallScorer(
                "small model",
                self.decoder,
                self.pool,
                0,
                self.head(branch.norm, small, weights),
                f"{self._size(small)}, {weights}",
                layer=self._layer(branch, weights),
            )
        scorer = self._scorers[key]
        assert isinstance(scorer, SmallScorer)
        return scorer

    def rounds(
        self, target: ModelScorer, drafter: FeatureScorer, greedy: DraftTree, sampled: DraftTree
    ) -> FeatureRounds | None:
        """The model and a feature drafter in one call that drafts and verifies; None if the backend has no such call.

        Drafts have the shape of these trees, at temperature 0 and above it.
        """
        if target.writer is None or drafter.writer is None or not isinstance(drafter.head, DraftHead):
            return None
        key = target.name, drafter.kind, greedy, sampled
        if key not in self._rounds:
            make, writers = self.decoder.backend.round_writer, (drafter.writer, target.writer)
            first, second = make(*writers, greedy), make(*writers, sampled)
            rounds = None if first is None or second is None else FeatureRounds(target, drafter, first, second)
            self._rounds[key] = rounds
        return self._rounds[key]

    def head(
        self, norm: Tensor | None, small: bool, weights: str | None = None, tokens: np.ndarray | None = None
    ) -> Head:
        """A head after this norm (None: no norm) that scores the draft vocabulary, or the whole one."""
        if tokens is None:
            tokens = self.tokens if small else np.arange(self.decoder.config.vocabulary, dtype=np.int32)
        if not small and norm is not None:
            return WholeHead(self.decoder, norm.to(self.decoder.norm))
        assert tokens is not None
        return DraftHead(self._shortlist(tokens, weights), None if norm is None else norm.to(self.decoder.norm))

    @cached_property
    def tokens(self) -> np.ndarray | None:
        """The draft vocabulary of the pack."""
        return None if self.pack is None else self.pack.draft_vocabulary()

    def weight_bytes(self) -> int:
        """Bytes of the weights beyond the checkpoint's own."""
        layers = sum(layer.decoder.weight_bytes for layer in self._layers())
        return layers + self._bytes + sum(shortlist.bytes for shortlist in self._shortlists.values())

    def bytes_held(self) -> int:
        """Bytes of keys, values and states of the added layers."""
        return sum(layer.pool.bytes_held() for layer in self._layers())

    def clear(self) -> None:
        for layer in self._layers():
            layer.pool.clear()

    def is_small(self, vocabulary: str) -> bool:
        if vocabulary == "small" and self.tokens is None:
            raise HierspecError(
                f'vocabulary = "small" needs a pack with a draft vocabulary, and {self.name} has none: give one '
                '(--pack FOLDER), or use vocabulary = "full".'
            )
        return vocabulary != "full" and self.tokens is not None

    def _size(self, small: bool) -> int:
        return len(self.tokens) if small and self.tokens is not None else self.decoder.config.vocabulary

    def format(self, weights: str | None, config: DecoderConfig | None = None) -> str:
        """The format of a drafter's weights: `weights` if given, else int8 if the backend has it."""
        backend, config = self.decoder.backend, config or self.decoder.config
        if weights is None and not backend.refuses(config, "int8"):
            return "int8"
        if weights in (None, "auto"):
            return str(self.decoder.embedding.dtype).removeprefix("torch.")
        if reason := backend.refuses(config, weights):
            raise HierspecError(f"This tier cannot have weights in {weights}: {reason}; leave weights out of the tier.")
        return weights

    def _shortlist(self, tokens: np.ndarray, weights: str | None) -> Shortlist:
        format = self.format(weights)
        key = format, tokens.tobytes()
        if key not in self._shortlists:
            self._shortlists[key] = self.decoder.backend.shortlist(self.decoder, tokens, format)
        return self._shortlists[key]

    def _layer(self, branch: Branch, weights: str | None) -> Layer:
        dtype, backend = self.decoder.embedding.dtype, self.decoder.backend
        named = {name: tensor.to(dtype) for name, tensor in self._named(branch).items()}
        return self._with_pool(backend.layers(branch.config, named, self.format(weights, branch.config)))

    def _named(self, branch: Branch) -> dict[str, Tensor]:
        """The tensors that a decoder of the branch's layers needs; it does not embed, nor normalise its output."""
        return {
            "model.embed_tokens.weight": torch.empty(0, branch.config.hidden, dtype=self.decoder.dtype),
            "model.norm.weight": self.decoder.norm if branch.norm is None else branch.norm,
            **branch.layer,
        }

    def _with_pool(self, decoder: Decoder) -> Layer:
        return Layer(decoder, StaircasePool(decoder, self.pool.budget))

    def _layers(self) -> list[Layer]:
        """The layers of all scorers made so far."""
        return [scorer.layer for scorer in self._scorers.values() if isinstance(scorer, BranchScorer)]

    def _join(self, matrix: Tensor, bias: Tensor | None, weights: str | None) -> Join:
        join = self.decoder.backend.join(self.decoder, matrix, bias, self.format(weights))
        self._bytes += join.bytes
        return join
