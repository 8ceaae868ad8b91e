"""A decoder as data: sizes, rotary positions and one description per layer.

`families` reads it from config.json and GGUF files. Decoders, packing, training and test checkpoints read only this.
"""

from dataclasses import dataclass
from functools import cached_property

from hierspec.checkpoints.rotary import Rotary, inverse_frequencies
from hierspec.checkpoints.values import LARGEST, check

__all__ = ["BIASES", "DecoderConfig", "LayerConfig", "Rotary", "expected_tensors", "inverse_frequencies"]

# The linear layers that each bias field of LayerConfig covers.
BIASES = {
    "attention_bias": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output_bias": ("self_attn.o_proj",),
    "mlp_bias": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}


@dataclass(frozen=True)
class LayerConfig:
    """One layer: pre-norm attention with grouped heads, then a gated MLP with SiLU."""

    window: int = 0  # how many tokens a token attends to, itself included; 0 = all
    uses_rotary: bool = True  # queries and keys are rotated to their positions
    qk_norm: bool = False  # RMS norm of each query and key head, before the rotation
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o_proj
    mlp_bias: bool = False


_SAME_IN_ALL_LAYERS = ("qk_norm", *BIASES)


@dataclass(frozen=True)
class DecoderConfig:
    """Everything a decoder needs to know about one checkpoint, whichever family it comes from."""

    family: str  # name of its entry in `families`, which determines the config.json that is written
    vocabulary: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    norm_eps: float
    context: int
    tied: bool
    rotary: Rotary
    layer_configs: tuple[LayerConfig, ...]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    early_exit: int | None = None  # the exit its authors draft with (LayerSkip checkpoints)

    def __post_init__(self) -> None:
        for name in ("vocabulary", "hidden", "layers", "heads", "kv_heads", "head_size", "intermediate", "context"):
            size = getattr(self, name)
            check(0 < size <= LARGEST, f"{name} must be positive and at most {LARGEST}", size)
        heads = (self.heads, self.kv_heads)
        check(self.heads % self.kv_heads == 0, "heads must be a multiple of kv_heads", heads)
        check(self.head_size % 2 == 0, "the head size must be even", self.head_size)
        check(0 < self.norm_eps < 1, "the norm's epsilon must lie between 0 and 1", self.norm_eps)
        check(min(self.windows) >= 0, "a window cannot be negative", min(self.windows))
        for name in _SAME_IN_ALL_LAYERS:  # decoders stack these tensors over layers
            values = [getattr(layer, name) for layer in self.layer_configs]
            check(len(set(values)) == 1, f"{name} must be the same in all layers", values)

    @property
    def layers(self) -> int:
        return len(self.layer_configs)

    # Cached, because a forward pass reads them for every layer.
    @cached_property
    def windows(self) -> tuple[int, ...]:
        return tuple(layer.window for layer in self.layer_configs)

    @cached_property
    def rotary_layers(self) -> tuple[bool, ...]:
        return tuple(layer.uses_rotary for layer in self.layer_configs)

    @property
    def qk_norm(self) -> bool:
        return self.layer_configs[0].qk_norm

    @property
    def attention_bias(self) -> bool:
        return self.layer_configs[0].attention_bias

    @property
    def output_bias(self) -> bool:
        return self.layer_configs[0].output_bias

    @property
    def mlp_bias(self) -> bool:
        return self.layer_configs[0].mlp_bias


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every tensor the decoder needs, in the order of a forward pass."""
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    linears = {  # outputs, inputs
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, hidden)}
    for number, layer in enumerate(config.layer_configs):
        prefix = f"model.layers.{number}."
        biased = {name for field, names in BIASES.items() if getattr(layer, field) for name in names}
        expected[f"{prefix}input_layernorm.weight"] = (hidden,)
        for name, (outputs, inputs) in linears.items():
            expected[f"{prefix}{name}.weight"] = (outputs, inputs)
            if name in biased:
                expected[f"{prefix}{name}.bias"] = (outputs,)
        if layer.qk_norm:
            expected[f"{prefix}self_attn.q_norm.weight"] = (config.head_size,)
            expected[f"{prefix}self_attn.k_norm.weight"] = (config.head_size,)
        expected[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    expected["model.norm.weight"] = (hidden,)
    if not config.tied:
        expected["lm_head.weight"] = (config.vocabulary, hidden)
    return expected
