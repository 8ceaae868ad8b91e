"""Seed-OSS: Llama with biases on queries, keys and values, and a separate key for the bias on o_proj."""

from hierspec.checkpoints.families.family import GGUF_NAMES, Family, GgufFormat

SEED_OSS = Family(
    name="seed_oss",
    model_class="SeedOssForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
    },
    output_bias="attention_out_bias",
    gguf=GgufFormat("seed_oss", names=GGUF_NAMES.but({"post_attention_layernorm": "post_attention_norm"})),
)
