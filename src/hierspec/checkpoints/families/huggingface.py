"""From a config.json to a decoder's configuration and back, using the data of its family."""

from dataclasses import replace
from typing import Any

from hierspec.checkpoints.config import BIASES, DecoderConfig
from hierspec.checkpoints.families.family import Family, Keys
from hierspec.checkpoints.rotary import rotary_from_huggingface, scaling_to_huggingface
from hierspec.checkpoints.values import check, integer, number
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import shown

# What transformers assumes for keys that neither config.json nor the family's defaults have.
_COMMON_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "head_dim": None,
    "sliding_window": None,
    "max_window_layers": 28,
}


def read_config(family: Family, given: Keys, generation: Keys) -> DecoderConfig:
    """Reads config.json, and the generation_config.json beside it, exactly as transformers understands them."""
    keys = {**_COMMON_DEFAULTS, **family.defaults, **given}
    activation = keys.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise HierspecError(f"The activation {shown(activation)} is not supported: only silu is.")
    if keys.get("quantization_config"):
        raise HierspecError("Quantised safetensors are not supported: give the float checkpoint or a GGUF file.")
    count, hidden = integer(keys, "num_hidden_layers"), integer(keys, "hidden_size")
    heads, vocabulary = integer(keys, "num_attention_heads"), integer(keys, "vocab_size")
    check(heads > 0, "num_attention_heads must be positive", heads)
    check(0 < count <= 10_000, "num_hidden_layers must lie between 1 and 10,000", count)
    if keys["head_dim"] is None and hidden % heads:
        raise HierspecError(
            f"The model's config does not add up: hidden size {hidden} is no multiple of {heads} heads."
        )
    switches = {field: getattr(family, field) for field in BIASES}
    biases = {
        field: bool(keys.get(switch)) if isinstance(switch, str) else switch for field, switch in switches.items()
    }
    return DecoderConfig(
        family=family.name,
        vocabulary=vocabulary,
        hidden=hidden,
        heads=heads,
        kv_heads=heads if keys["num_key_value_heads"] is None else integer(keys, "num_key_value_heads"),
        head_size=hidden // heads if keys["head_dim"] is None else integer(keys, "head_dim"),
        intermediate=integer(keys, "intermediate_size"),
        norm_eps=number(keys, "rms_norm_eps", 1e-6),
        context=integer(keys, "max_position_embeddings"),
        tied=bool(keys["tie_word_embeddings"]),
        rotary=rotary_from_huggingface(keys),
        layer_configs=tuple(
            replace(layer, qk_norm=family.qk_norm, **biases) for layer in family.read_layers(keys, count)
        ),
        bos_id=next(iter(_ids("bos_token_id", vocabulary, keys, generation)), None),
        eos_ids=_ids("eos_token_id", vocabulary, generation, keys),
        early_exit=_early_exit(keys, generation, count),
    )


def write_config(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """A config.json with which transformers, version 4 or 5, builds the same model."""
    eos_ids = list(config.eos_ids)
    written: dict[str, Any] = {
        "model_type": family.name,
        "architectures": [family.model_class],
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
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": None,  # a family's default may be outside a small vocabulary
    }
    if config.early_exit is not None:
        written["assistant_early_exit"] = config.early_exit
    for field in BIASES:
        switch = getattr(family, field)
        if isinstance(switch, str):
            written[switch] = getattr(config, field)
    written |= family.write_layers(config.layer_configs)
    if read_config(family, written, {}) != config:  # such as two window sizes, or a bias this family cannot have
        raise HierspecError(f"This configuration cannot be written as a Hugging Face {family.name} model.")
    return written


def _ids(key: str, vocabulary: int, *sources: Keys) -> tuple[int, ...]:
    """Token ids from the first source that has them, without those outside the vocabulary, which cannot occur."""
    value: Any = next((source[key] for source in sources if source.get(key) is not None), [])
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise HierspecError(f"The model's config is damaged: {key} must be an id or a list of ids.")
    return tuple(item for item in values if 0 <= item < vocabulary)


def _early_exit(keys: Keys, generation: Keys, count: int) -> int | None:
    """transformers' `assistant_early_exit`, from the generation settings or the config itself."""
    for source in (generation, keys):
        layer = source.get("assistant_early_exit")
        if isinstance(layer, int) and not isinstance(layer, bool) and 1 <= layer < count:
            return layer
    return None
