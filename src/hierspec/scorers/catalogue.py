"""Scorers that live on one checkpoint's states: the model itself, its exits, and what a pack adds to them.

Each is made once, so that the passes of several requests are packed.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hierspec.backends.torch.decoder import TorchDecoder
from hierspec.checkpoints.eagle import Eagle3Branch, read_eagle
from hierspec.checkpoints.packs import FEATURE, SMALL, Branch, FeatureBranch, Pack
from hierspec.core.errors import HierspecError
from hierspec.scorers.base import Decoder, Head, ModelScorer, StateScorer, WholeHead
from hierspec.scorers.drafters import AdapterScorer, FeatureScorer, Join, Layer, SmallScorer, TorchJoin
from hierspec.scorers.eagle import EagleDecoder, EagleJoin, OwnHead
from hierspec.scorers.shortlist import DraftHead, Product, TorchProduct
from hierspec.scorers.staircase import StaircasePool

PACKED_FEATURE, PACKED_SMALL = "feature", "small"  # as drafts: the pack's feature drafter and small model
_OTHERWISE = (
    "train one (hierspec train draft), give a pack that has one (--pack FOLDER), name the folder of {} as the draft "
    "in a plan file, or choose a plan without it, such as lookup"
)


class ScorerCatalogue:
    def __init__(self, name: str, decoder: Decoder, pool: StaircasePool, pack: Pack | None) -> None:
        self.name, self.decoder, self.pool, self.pack = name, decoder, pool, pack
        self._scorers: dict[tuple[object, ...], StateScorer] = {}
        self._products: dict[tuple[int, bytes], Product] = {}  # by the kind of weights and the tokens
        self._layers: list[Layer] = []
        self._bytes = 0

    def whole(self, layers: int) -> ModelScorer:
        """The model itself, or its exit after so many layers, through the last norm and the whole head."""
        config = self.decoder.config
        if not 1 <= layers <= config.layers:
            raise HierspecError(f"exit_layer {layers} does not exist: {self.name} has {config.layers} layers.")
        key = ("whole", layers)
        if key not in self._scorers:
            self.pool.add_boundary(layers)
            name = "target" if layers == config.layers else f"exit {layers}"
            self._scorers[key] = ModelScorer(name, self.decoder, self.pool, layers, WholeHead(self.decoder))
        found = self._scorers[key]
        assert isinstance(found, ModelScorer)
        return found

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
                own = self.head(norm, small, weights)
                found: StateScorer = ModelScorer(shared.name, self.decoder, self.pool, layers, own, kind)
            else:
                if self.pack is None:
                    raise HierspecError(
                        f'head = "adapter" needs a pack with an adapter for exit {layers}, and {self.name} has no '
                        'pack: give one (--pack FOLDER), or use head = "shared".'
                    )
                branch = self.pack.adapter(layers, self.decoder.config)
                own = self.head(branch.norm, small, weights)
                layer = self._layer(branch, weights)
                found = AdapterScorer(shared.name, self.decoder, self.pool, layers, own, kind, layer=layer)
            self._scorers[key] = found
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
        found = self._scorers[key]
        assert isinstance(found, FeatureScorer)
        return found

    def _feature(self, branch: FeatureBranch, source: str, small: bool, weights: str | None) -> FeatureScorer:
        layers, last = self.decoder.config.layers, self.decoder.norm
        for tap in branch.taps:
            self.pool.add_boundary(tap)
        norm = None if branch.norm is None else branch.norm.to(last)
        join = self._join(branch.fc, branch.fc_bias, weights)
        return FeatureScorer(
            "feature drafter", self.decoder, self.pool, layers, self.head(norm, small, weights),
            f"{source}, {self._size(small)}, {weights}", layer=self._layer(branch, weights), join=join,
            first=join if branch.first is None else self._join(branch.first, None, weights),
            reads=(layers, *branch.taps),
            # States of taps are brought to one size and not weighed: a norm of ones.
            first_norms=torch.stack([last, *(torch.ones_like(last) for _ in branch.taps)]),
            norm=None if norm is None else norm[None], skips_first=branch.skips_first,
        )  # fmt: skip

    def _eagle(self, branch: Eagle3Branch, source: str, vocabulary: str, weights: str | None) -> FeatureScorer:
        if vocabulary != "auto" or weights not in (None, "auto"):
            which = "vocabulary" if vocabulary != "auto" else "weights"
            raise HierspecError(
                f"{source} is an EAGLE-3 head, which has its own vocabulary and runs as it is: leave {which} out."
            )
        target, norm = self.decoder, branch.norm
        assert norm is not None
        for tap in branch.taps:
            self.pool.add_boundary(tap)
        named = {name: tensor.to(target.dtype) for name, tensor in self._named(branch).items()}
        decoder = EagleDecoder(branch.config, named, target.device)
        weight, tokens, eps = branch.head.to(target.device, target.dtype), branch.tokens, branch.config.norm_eps
        head = OwnHead(weight, norm.to(weight), tokens, target.config.vocabulary, eps)
        first = EagleJoin(target, branch.fc)
        self._bytes += head.bytes + first.bytes
        return FeatureScorer(
            "EAGLE-3 head", target, self.pool, target.config.layers, head, f"{source}, {len(tokens)}",
            layer=self._kept(decoder), first=first, join=EagleJoin(target, None), reads=branch.taps, first_norms=None,
            norm=None, skips_first=True,
        )  # fmt: skip

    def small_model(self, vocabulary: str = "auto", weights: str | None = None) -> SmallScorer:
        """The pack's small model."""
        small = self.is_small(vocabulary)
        key = ("small", small, weights)
        if key not in self._scorers:
            if self.pack is None or not self.pack.has(SMALL):
                raise HierspecError(f"{self.name} has no small model: {_OTHERWISE.format('another model')}.")
            branch = self.pack.small(self.decoder.config)
            self._scorers[key] = SmallScorer(
                "small model", self.decoder, self.pool, 0, self.head(branch.norm, small, weights),
                f"{self._size(small)}, {weights}", layer=self._layer(branch, weights),
            )  # fmt: skip
        found = self._scorers[key]
        assert isinstance(found, SmallScorer)
        return found

    def head(
        self, norm: Tensor | None, small: bool, weights: str | None = None, tokens: np.ndarray | None = None
    ) -> Head:
        """A head behind this norm (None: nothing is normed) that scores the draft vocabulary, or all of it."""
        if tokens is None:
            tokens = self.tokens if small else np.arange(self.decoder.config.vocabulary, dtype=np.int32)
        if not small and norm is not None:
            return WholeHead(self.decoder, norm.to(self.decoder.norm))
        assert tokens is not None
        return DraftHead(self._product(tokens, weights), None if norm is None else norm.to(self.decoder.norm))

    @cached_property
    def tokens(self) -> np.ndarray | None:
        """The draft vocabulary of the pack."""
        return None if self.pack is None else self.pack.draft_vocabulary()

    def weight_bytes(self) -> int:
        """Of what was added to the checkpoint's own weights."""
        layers = sum(layer.decoder.weight_bytes for layer in self._layers)
        return layers + self._bytes + sum(product.bytes for product in self._products.values())

    def bytes_held(self) -> int:
        """Of keys, values and states of added layers."""
        return sum(layer.pool.bytes_held() for layer in self._layers)

    def clear(self) -> None:
        for layer in self._layers:
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

    def _kind(self, weights: str | None, reason: str) -> int:
        """How added weights are stored for the compiled backend: in 8 bits unless told otherwise, or unfit."""
        from hierspec.backends.cpu.packing import KINDS

        plain = "bfloat16" if self.decoder.embedding.dtype == torch.bfloat16 else "float32"
        if weights in ("int8", "int4") and reason:
            raise HierspecError(f"This tier cannot have weights in {weights}: {reason}; leave weights out.")
        return KINDS["int8" if weights is None and not reason else plain if weights in (None, "auto") else weights]

    def _compiled(self, weights: str | None) -> bool:
        if self.decoder.team is not None:
            return True
        if weights in ("int8", "int4"):
            raise HierspecError(
                f"Weights in {weights} need the compiled backend (a CPU); leave weights out of the tier."
            )
        return False

    def _product(self, tokens: np.ndarray, weights: str | None) -> Product:
        decoder, eps = self.decoder, self.decoder.config.norm_eps
        if not self._compiled(weights):
            key = (0, tokens.tobytes())
            if key not in self._products:
                self._products[key] = TorchProduct(decoder.head_weight, tokens, eps)
            return self._products[key]
        from hierspec.backends.cpu.heads import CpuProduct
        from hierspec.backends.cpu.packing import unsuited_to_low_bits
        from hierspec.backends.cpu.product import INT4, INT8

        assert decoder.team is not None
        kind = self._kind(weights, unsuited_to_low_bits(decoder.config))
        kind = INT8 if kind == INT4 else kind  # four bits are too few to tell the best token from the second best
        key = (kind, tokens.tobytes())
        if key not in self._products:
            self._products[key] = CpuProduct(decoder.head_weight, tokens, eps, kind, decoder.team)
        return self._products[key]

    def _layer(self, branch: Branch, weights: str | None) -> Layer:
        target, config, named = self.decoder, branch.config, self._named(branch)
        decoder: Decoder | None = None
        if self._compiled(weights) and "model.layers.0.input_layernorm.weight" in named:
            from hierspec.backends.cpu.decoder import CpuDecoder, unsuited
            from hierspec.backends.cpu.packing import pack_layers, unsuited_to_low_bits

            if not unsuited(config, target.embedding.dtype):
                assert target.team is not None
                kind = self._kind(weights, unsuited_to_low_bits(config))
                named = {name: tensor.to(target.embedding.dtype) for name, tensor in named.items()}
                packed = pack_layers(config, named, kind)
                decoder = CpuDecoder(config, named, target.team.threads, packed, target.team)
        if decoder is None:
            decoder = TorchDecoder(
                config, {name: tensor.to(target.dtype) for name, tensor in named.items()}, target.device
            )
        return self._kept(decoder)

    def _named(self, branch: Branch) -> dict[str, Tensor]:
        """What a decoder of the branch's layers needs: nothing is embedded there, and others norm what it gives."""
        return {
            "model.embed_tokens.weight": torch.empty(0, branch.config.hidden, dtype=self.decoder.dtype),
            "model.norm.weight": self.decoder.norm if branch.norm is None else branch.norm,
            **branch.layer,
        }

    def _kept(self, decoder: Decoder) -> Layer:
        layer = Layer(decoder, StaircasePool(decoder, self.pool.budget))
        self._layers.append(layer)
        return layer

    def _join(self, matrix: Tensor, bias: Tensor | None, weights: str | None) -> Join:
        target = self.decoder
        join: Join
        if self._compiled(weights):
            from hierspec.backends.cpu.heads import CpuJoin
            from hierspec.backends.cpu.packing import unsuited_to_low_bits

            kind = self._kind(weights, unsuited_to_low_bits(target.config))
            join = CpuJoin(target, matrix.to(target.embedding.dtype), bias, kind)
        else:
            join = TorchJoin(target, matrix, bias)
        self._bytes += join.bytes
        return join
