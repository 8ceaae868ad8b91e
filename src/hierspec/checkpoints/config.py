"""What a decoder is made of: read from and written as a Hugging Face config.json, and its rotary frequencies."""

from dataclasses import dataclass
from typing import Any

from hierspec.checkpoints.rotary import Rotary, inverse_frequencies, rotary_from_huggingface, scaling_to_huggingface
from hierspec.checkpoints.values import check, integer, listed, number
from hierspec.core.errors import HierspecError

__all__ = [
    "ARCHITECTURES",
    "DecoderConfig",
    "Rotary",
    "expected_tensors",
    "from_huggingface",
    "inverse_frequencies",
    "to_huggingface",
]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")

# What transformers assumes where a config.json is silent; an absent key and a null are not the same there.
_COMMON_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "head_dim": None,
    "sliding_window": None,
    "max_window_layers": 28,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": None, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "sliding_window": 4096, "head_dim": 128},
    "smollm3": {
        "num_key_value_heads": 4,
        "bos_token_id": 128_000,
        "eos_token_id": 128_001,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
}
_CLASS_NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}


@dataclass(frozen=True)
class DecoderConfig:
    """Everything the decoder needs to know about one checkpoint, whichever family it comes from."""

    architecture: str  # one of ARCHITECTURES
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    norm_eps: float
    context: int
    tied: bool
    rotary: Rotary
    windows: tuple[int, ...]  # per layer: how many tokens a token sees, itself included; 0 = everything
    rotary_layers: tuple[bool, ...]  # SmolLM3 leaves some layers without rotary
    attention_bias: bool  # on q, k, v
    output_bias: bool  # on o_proj: llama's attention_bias has it, qwen2 has not
    mlp_bias: bool
    qk_norm: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    early_exit: int | None = None  # the exit that its maker drafts with (LayerSkip checkpoints)

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise _unsupported_architecture(self.architecture)
        for name in ("vocabulary", "hidden", "layers", "heads", "kv_heads", "head_size", "intermediate", "context"):
            check(getattr(self, name) > 0, f"{name} must be positive", getattr(self, name))
        heads = (self.heads, self.kv_heads)
        check(self.heads % self.kv_heads == 0, "heads must be a multiple of kv_heads", heads)
        check(self.head_size % 2 == 0, "the head size must be even", self.head_size)
        check(0 < self.norm_eps < 1, "the norm's epsilon must lie between 0 and 1", self.norm_eps)
        check(len(self.windows) == self.layers, "one window per layer is needed", len(self.windows))
        check(len(self.rotary_layers) == self.layers, "one rotary flag per layer is needed", len(self.rotary_layers))
        check(min(self.windows) >= 0, "a window cannot be negative", min(self.windows))


def from_huggingface(config: dict[str, Any], generation: dict[str, Any] | None = None) -> DecoderConfig:
    """Reads a config.json (and the generation_config.json beside it) exactly as transformers understands them."""
    if not isinstance(config, dict):
        raise HierspecError("The model's config.json must hold one JSON object.")
    architecture = config.get("model_type")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise _unsupported_architecture(architecture)
    config = {**_COMMON_DEFAULTS, **_DEFAULTS[architecture], **config}
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise HierspecError(f"The activation {activation!r} is not supported: hierspec knows silu only.")
    if config.get("quantization_config"):
        raise HierspecError("Quantised safetensors are not supported: give the float checkpoint or a GGUF file.")
    layers, hidden = integer(config, "num_hidden_layers"), integer(config, "hidden_size")
    heads, vocabulary = integer(config, "num_attention_heads"), integer(config, "vocab_size")
    check(heads > 0, "num_attention_heads must be positive", heads)
    check(0 < layers <= 10_000, "num_hidden_layers must lie between 1 and 10,000", layers)
    if config["head_dim"] is None and hidden % heads:
        raise HierspecError(
            f"The model's config does not add up: hidden size {hidden} is no multiple of {heads} heads."
        )
    rotary_layers = _rotary_layers(config, architecture, layers)
    attention_bias = architecture == "qwen2" or (architecture != "mistral" and bool(config.get("attention_bias")))
    bos_id, eos_ids = _special_ids(config, generation or {}, vocabulary)
    return DecoderConfig(
        architecture=architecture,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if config["num_key_value_heads"] is None else integer(config, "num_key_value_heads"),
        head_size=hidden // heads if config["head_dim"] is None else integer(config, "head_dim"),
        intermediate=integer(config, "intermediate_size"),
        norm_eps=number(config, "rms_norm_eps", 1e-6),
        context=integer(config, "max_position_embeddings"),
        tied=bool(config["tie_word_embeddings"]),
        rotary=rotary_from_huggingface(config),
        windows=_windows(config, architecture, rotary_layers),
        rotary_layers=rotary_layers,
        attention_bias=attention_bias,
        output_bias=attention_bias and architecture != "qwen2",
        mlp_bias=architecture in ("llama", "smollm3") and bool(config.get("mlp_bias")),
        qk_norm=architecture == "qwen3",
        bos_id=bos_id,
        eos_ids=eos_ids,
        early_exit=_early_exit(config, generation or {}, layers),
    )


def to_huggingface(config: DecoderConfig) -> dict[str, Any]:
    """A config.json with which transformers, version 4 or 5, builds the same model."""
    architecture = config.architecture
    written: dict[str, Any] = {
        "model_type": architecture,
        "architectures": [f"{_CLASS_NAMES[architecture]}ForCausalLM"],
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.intermediate,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.context,
        "tie_word_embeddings": config.tied,
        "rope_theta": config.rotary.theta,
        "rope_scaling": scaling_to_huggingface(config.rotary),
        "bos_token_id": config.bos_id,
        "eos_token_id": _eos_to_huggingface(config.eos_ids),
        "pad_token_id": None,  # SmolLM3's default lies beyond a small vocabulary
    }
    if config.early_exit is not None:
        written["assistant_early_exit"] = config.early_exit
    if architecture in ("llama", "qwen3", "smollm3"):
        written["attention_bias"] = config.attention_bias
    if architecture in ("llama", "smollm3"):
        written["mlp_bias"] = config.mlp_bias
    sizes = sorted(set(config.windows) - {0})
    if architecture == "mistral":
        written["sliding_window"] = sizes[0] if sizes else None
    elif architecture != "llama":
        written["use_sliding_window"] = bool(sizes)
        written["sliding_window"] = sizes[0] if sizes else None
        written["layer_types"] = ["sliding_attention" if window else "full_attention" for window in config.windows]
    if architecture == "smollm3":
        written["no_rope_layers"] = [int(rotary) for rotary in config.rotary_layers]
    if from_huggingface(written) != config:  # for example two window sizes, or a bias this family cannot have
        raise HierspecError(f"This configuration cannot be written as a Hugging Face {architecture} model.")
    return written


def expected_tensors(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the decoder needs, in the order of a forward pass."""
    hidden, inner = config.hidden, config.intermediate
    queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, hidden)}
    linears = (  # name, outputs, inputs, has a bias
        ("self_attn.q_proj", queries, hidden, config.attention_bias),
        ("self_attn.k_proj", keys, hidden, config.attention_bias),
        ("self_attn.v_proj", keys, hidden, config.attention_bias),
        ("self_attn.o_proj", hidden, queries, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        expected[f"{prefix}input_layernorm.weight"] = (hidden,)
        for name, outputs, inputs, bias in linears:
            expected[f"{prefix}{name}.weight"] = (outputs, inputs)
            if bias:
                expected[f"{prefix}{name}.bias"] = (outputs,)
        if config.qk_norm:
            expected[f"{prefix}self_attn.q_norm.weight"] = (config.head_size,)
            expected[f"{prefix}self_attn.k_norm.weight"] = (config.head_size,)
        expected[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    expected["model.norm.weight"] = (hidden,)
    if not config.tied:
        expected["lm_head.weight"] = (config.vocabulary, hidden)
    return expected


def _rotary_layers(config: dict[str, Any], architecture: str, layers: int) -> tuple[bool, ...]:
    if architecture != "smollm3":
        return (True,) * layers
    flags = config.get("no_rope_layers")  # its name says the opposite: 1 marks a layer *with* rotary
    if flags is None:
        interval = integer({"no_rope_layer_interval": 4, **config}, "no_rope_layer_interval")
        check(interval > 0, "no_rope_layer_interval must be positive", interval)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(flags, list) or len(flags) < layers:
        raise HierspecError(f"The model's config is damaged: no_rope_layers must list all {layers} layers.")
    return tuple(bool(flag) for flag in flags[:layers])


def _windows(config: dict[str, Any], architecture: str, rotary_layers: tuple[bool, ...]) -> tuple[int, ...]:
    layers = len(rotary_layers)
    size = config["sliding_window"]
    window = 0 if size is None else integer(config, "sliding_window")
    if architecture == "llama":
        return (0,) * layers
    if architecture == "mistral":
        return (0 if size is None else _positive_window(window),) * layers
    used = bool(config.get("use_sliding_window")) and size is not None
    kinds = config.get("layer_types")
    if kinds is None:
        first = integer(config, "max_window_layers")
        slides = [
            not rotary if architecture == "smollm3" else layer >= first for layer, rotary in enumerate(rotary_layers)
        ]
        return tuple(_positive_window(window) if used and slide else 0 for slide in slides)
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise HierspecError(f"The model's config is damaged: layer_types must list all {layers} layers.")
    # Qwen forgets its window when it is switched off; SmolLM3 still applies it to layers listed as sliding.
    return tuple(_window_of(kind, window if used or architecture == "smollm3" else 0) for kind in kinds)


def _window_of(kind: object, window: int) -> int:
    if kind in ("full_attention", "attention"):
        return 0
    if kind == "sliding_attention":
        return _positive_window(window)
    raise HierspecError(f"Layers of type {kind!r} are not supported: only full_attention and sliding_attention are.")


def _positive_window(window: int) -> int:
    check(window > 0, "layers with a sliding window need a positive sliding_window", window)
    return window


def _special_ids(
    config: dict[str, Any], generation: dict[str, Any], vocabulary: int
) -> tuple[int | None, tuple[int, ...]]:
    """Ids outside the vocabulary can never be written, so they are left out."""

    def ids(key: str, *sources: dict[str, Any]) -> tuple[int, ...]:
        value: Any = next((source[key] for source in sources if source.get(key) is not None), [])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise HierspecError(f"The model's config is damaged: {key} must be an id or a list of ids.")
        return tuple(item for item in values if 0 <= item < vocabulary)

    bos = ids("bos_token_id", config, generation)
    return (bos[0] if bos else None), ids("eos_token_id", generation, config)


def _early_exit(config: dict[str, Any], generation: dict[str, Any], layers: int) -> int | None:
    """transformers' `assistant_early_exit`, which stands among the settings of generation or in the config itself."""
    for source in (generation, config):
        found = source.get("assistant_early_exit")
        if isinstance(found, int) and not isinstance(found, bool) and 1 <= found < layers:
            return found
    return None


def _eos_to_huggingface(eos_ids: tuple[int, ...]) -> int | list[int] | None:
    if len(eos_ids) == 1:
        return eos_ids[0]
    return list(eos_ids) or None


def _unsupported_architecture(found: object) -> HierspecError:
    return HierspecError(f"The architecture {found!r} is not supported: hierspec knows {listed(ARCHITECTURES)}.")
