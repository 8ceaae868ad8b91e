"""A family as data: how its files describe layers and name tensors."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from hierspec.checkpoints.config import LayerConfig

Keys = Mapping[str, Any]  # keys of a config.json, or of a GGUF file without the architecture's prefix
Layers = tuple[LayerConfig, ...]
_LAYER = "model.layers."


@dataclass(frozen=True)
class TensorNames:
    """Maps canonical tensor names, those of Hugging Face's Llama, to the names in files of one format."""

    layer: str = _LAYER  # prefix before a layer's number
    parts: Mapping[str, str] = field(default_factory=dict)  # parts that are missing here have canonical names

    def __call__(self, canonical: str) -> str:
        part, kind = canonical.rsplit(".", 1)  # kind: weight or bias
        start = ""
        if part.startswith(_LAYER):
            number, part = part.removeprefix(_LAYER).split(".", 1)
            start = f"{self.layer}{number}."
        return f"{start}{self.parts.get(part, part)}.{kind}"

    def but(self, parts: Mapping[str, str]) -> "TensorNames":
        """The same except for these parts."""
        return TensorNames(self.layer, {**self.parts, **parts})


HUGGINGFACE_NAMES = TensorNames()
GGUF_NAMES = TensorNames(
    "blk.",
    {
        "model.embed_tokens": "token_embd",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "model.norm": "output_norm",
        "lm_head": "output",
    },
)


def full_attention(keys: Keys, count: int) -> Layers:
    """Every token attends to all before it, in every layer."""
    return (LayerConfig(),) * count


@dataclass(frozen=True, eq=False)
class GgufFormat:
    """How GGUF files store the models of a family."""

    architecture: str | None = None  # general.architecture; None: GGUF files of this family are not supported
    names: TensorNames = GGUF_NAMES
    interleaved: bool = False  # the rows of the two halves of each query and key head alternate
    read_layers: Callable[[Keys, int], Layers] = full_attention  # windows and rotary of each layer
    # Distinguishes families that share an architecture, by keys and tensor names.
    matches: Callable[[Keys, Container[str]], bool] = lambda keys, tensors: True


@dataclass(frozen=True, eq=False)
class Family:
    """One `model_type`. Defaults are those of Llama, so that a family states only what differs."""

    name: str  # model_type in config.json
    model_class: str  # its entry in `architectures` of config.json
    defaults: Keys  # what transformers assumes for keys missing in config.json; a null is not a missing key
    # For each bias: the key of config.json that enables it, or True or False for the whole family.
    attention_bias: str | bool = "attention_bias"
    output_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = "mlp_bias"
    qk_norm: bool = False
    read_layers: Callable[[Keys, int], Layers] = full_attention  # windows and rotary of each layer
    write_layers: Callable[[Layers], dict[str, Any]] = lambda layers: {}  # the keys that read_layers reads
    names: TensorNames = HUGGINGFACE_NAMES  # in safetensors
    gguf: GgufFormat = GgufFormat()
    tiny: Keys = field(default_factory=dict)  # keys that show the family's special features at the size of a test
