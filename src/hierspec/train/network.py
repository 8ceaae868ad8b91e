"""The decoder with gradients: whole batches of equal length, no KV cache. Tests compare it with transformers.

`Block` is one layer in the three parts that training needs separately: projections, attention, and what follows it.
Target, exit adapters, drafters and synthesis are all made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from hierspec.checkpoints.config import DecoderConfig
from hierspec.checkpoints.rotary import rotary_table

Rotation = tuple[Tensor, Tensor]  # cosines and sines [positions, head_size / 2]


class Block(nn.Module):
    """One decoder layer. Parameters have the canonical names within a layer."""

    def __init__(self, config: DecoderConfig, number: int) -> None:
        super().__init__()
        layer = config.layer_configs[number]
        self.config, self.window = config, layer.window
        self.rotates, self.qk_norm = layer.uses_rotary, layer.qk_norm
        queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size

        def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias)

        def norm(size: int) -> nn.RMSNorm:
            return nn.RMSNorm(size, eps=config.norm_eps)

        self.input_layernorm, self.post_attention_layernorm = norm(config.hidden), norm(config.hidden)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(config.hidden, queries, layer.attention_bias),
                "k_proj": linear(config.hidden, keys, layer.attention_bias),
                "v_proj": linear(config.hidden, keys, layer.attention_bias),
                "o_proj": linear(queries, config.hidden, layer.output_bias),
            }
        )
        if layer.qk_norm:
            self.self_attn["q_norm"], self.self_attn["k_norm"] = norm(config.head_size), norm(config.head_size)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(config.hidden, config.intermediate, layer.mlp_bias),
                "up_proj": linear(config.hidden, config.intermediate, layer.mlp_bias),
                "down_proj": linear(config.intermediate, config.hidden, layer.mlp_bias),
            }
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[batch, length, hidden] of whole texts, with causal attention."""
        q, k, v = self.project(x, rotation)
        mask = None
        if self.window and x.shape[1] > self.window:
            mask = causal(x.shape[1], x.device, self.window)
        return self.finish(x, attended(q, k, v, mask))

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, heads, length, head_size], rotated to their positions."""
        y = self.input_layernorm(x)
        parts = []
        for name in "qkv":
            part = self.self_attn[f"{name}_proj"](y).unflatten(-1, (-1, self.config.head_size))
            if name != "v":
                if self.qk_norm:
                    part = self.self_attn[f"{name}_norm"](part)
                if self.rotates:
                    part = _rotated(part, rotation)
            parts.append(part.transpose(1, 2))
        return parts[0], parts[1], parts[2]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Adds the result of attention [batch, heads, length, head_size] to x and runs the rest of the layer."""
        x = x + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        y = self.post_attention_layernorm(x)
        return x + self.mlp["down_proj"](functional.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class Network(nn.Module):
    """A whole checkpoint. `forward` gives hidden states after chosen layers."""

    def __init__(self, config: DecoderConfig, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(weights["model.embed_tokens.weight"].clone())
        # One parameter if they are tied.
        self.head = self.embedding if config.tied else nn.Parameter(weights["lm_head.weight"].clone())
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.norm.load_state_dict({"weight": weights["model.norm.weight"]})
        blocks = []
        for number in range(config.layers):
            block, start = Block(config, number), f"model.layers.{number}."
            block.load_state_dict(
                {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}
            )
            blocks.append(block)
        self.blocks: Sequence[Block] = nn.ModuleList(blocks)  # type: ignore[assignment]

    def frozen(self, device: torch.device | str, dtype: torch.dtype) -> Network:
        """Moves it to a device, without gradients, and returns it."""
        return self.to(device=device, dtype=dtype).requires_grad_(False).eval()

    def rotation(self, start: int, stop: int) -> Rotation:
        """Cosines and sines of the positions start .. stop."""
        table = rotary_table(self.config.rotary, self.config.head_size, stop)
        cos, sin = (torch.from_numpy(values[start:]).to(self.embedding.device) for values in table)
        return cos, sin

    def forward(self, tokens: Tensor, taps: Iterable[int]) -> dict[int, Tensor]:
        """Hidden states [batch, length, hidden] after as many layers as each of `taps` says (0: the embeddings)."""
        numbers = set(taps)
        x = functional.embedding(tokens, self.embedding)
        states = {0: x} if 0 in numbers else {}
        rotation = self.rotation(0, tokens.shape[1])
        for number, block in enumerate(self.blocks[: max(numbers)], 1):
            x = block(x, rotation)
            if number in numbers:
                states[number] = x
        return states


def compile_blocks(*modules: nn.Module) -> None:
    """Compiles the layers in these modules that are on a GPU: training steps then take 0.7 to 0.8 of their time."""
    blocks = [part for module in modules for part in module.modules() if isinstance(part, Block)]
    blocks = [block for block in blocks if next(block.parameters()).device.type == "cuda"]
    if blocks:
        # Code compiled for one run is of no use to the next in this process. Layers of equal shape share code: a
        # variant has about eight shapes, and torch stops compiling once it has seen as many as its limit.
        torch.compiler.reset()
        from torch._dynamo import config

        config.recompile_limit = 64
    for block in blocks:
        block.compile()


def as_written(device: torch.device) -> AbstractContextManager[object]:
    """Runs compiled layers uncompiled: for texts of many lengths, each of which would be compiled again."""
    return torch.compiler.set_stance("force_eager") if device.type == "cuda" else nullcontext()


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of queries [batch, heads, length, head_size], by the mask or causal."""
    if mask is None:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    # With a mask and grouped heads torch has only its slowest kernel, so keys are repeated.
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def causal(length: int, device: torch.device | str, window: int = 0) -> Tensor:
    """[length, length]: True where a position attends to another."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < window) if window else distance >= 0


def _rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary embedding of [batch, length, heads, head_size]; the two halves of a head are the two coordinates."""
    cos, sin = (table[None, :, None].to(x.dtype) for table in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
