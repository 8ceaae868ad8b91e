"""Llama 2 and 3, SmolLM2 and the many models that call themselves llama."""

from hierspec.checkpoints.families.family import Family, GgufFormat

LLAMA = Family(
    name="llama",
    model_class="LlamaForCausalLM",
    defaults={"num_key_value_heads": None, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 2048},
    gguf=GgufFormat("llama", interleaved=True),
)
