"""Random changes to bytes, JSON documents and tensors, for files that mean harm."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import torch

_EXTREMES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, 1e-320, 1e-9, 1e308, -1e308, float("nan"), float("inf"), 2**31, 2**63),
    *(
        -(2**63),
        10**30,
        10**400,
        10**4299,
        "",
        "x",
        "default",
        "none",
        "yarn",
        "llama3",
        "\ud800",
        "é\n\x00",
        "x" * 9999,
    ),
    *(
        [],
        {},
        [[]],
        [None],
        ["a"],
        [1, 2],
        [0.5],
        {"a": 1},
        {"name": "default"},
        {"rope_type": "yarn", "factor": 1e-300},
    ),
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": -7.213475204444817},
)


class Mutation:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.pick = chance.choice

    def bytes(self, content: bytes) -> bytes:
        changed = bytearray(content)
        for _ in range(self.pick((1, 1, 2, 8))):
            at = self.chance.randrange(len(changed) + 1) if self.chance.random() < 0.5 else self.chance.randrange(200)
            at = min(at, max(len(changed) - 8, 0))
            match self.chance.randrange(7):
                case 0:
                    changed[at : at + 1] = bytes([self.chance.randrange(256)])
                case 1:
                    del changed[at:]
                case 2:
                    changed[at:at] = self.chance.randbytes(self.pick((1, 8, 64)))
                case 3:
                    changed[at : at + 8] = self.pick(
                        (b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 1 << self.pick((16, 31, 40, 62))))
                    )
                case 4:
                    changed[at : at + 4] = b"\xff\xfe\xc0\x80"
                case 5:
                    del changed[at : at + self.pick((1, 8, 64))]
                case 6:
                    changed[at:at] = changed[at : at + 64]
        return bytes(changed)

    def json(self, content: Any) -> bytes:
        """One file in four is broken as text, the others say something else."""
        if self.chance.random() < 0.25:
            text = json.dumps(content)
            match self.chance.randrange(6):
                case 0:
                    return self.bytes(text.encode())
                case 1:
                    return b'{"a":' * 100_000 + b"1" + b"}" * 100_000
                case 2:
                    return b"[" * self.pick((500, 3000, 100_000))
                case 3:
                    return text.encode("utf-16")
                case 4:
                    return text.replace('"', '"\\ud800', 3).encode()
                case _:  # every key twice, the second time with another value
                    return (text[:-1] + ", " + json.dumps(self.tree(content))[1:]).encode()
        for _ in range(self.pick((1, 1, 1, 2, 3))):
            content = self.tree(content)
        return json.dumps(content).encode()

    def tree(self, content: Any) -> Any:
        """Another value somewhere in a JSON document."""
        if isinstance(content, (dict, list)) and content and self.chance.random() < 0.9:
            keys = list(content) if isinstance(content, dict) else list(range(len(content)))
            key = self.pick(keys)
            copy = content.copy()
            if self.chance.random() < 0.1:
                del copy[key]
            elif self.chance.random() < 0.1:
                copy[key] = content[self.pick(keys)]
            else:
                copy[key] = self.tree(content[key])
            return copy
        return self.pick(_EXTREMES)

    def tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        changed = dict(tensors)
        for name in self.chance.sample(list(changed), min(self.pick((1, 1, 3)), len(changed))):
            tensor = changed.pop(name)
            types = (torch.int8, torch.bool, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8)
            numbers = (float("nan"), float("inf"), -1.0, 3e38, 0.0, 1e9)
            match self.chance.randrange(8):
                case 0:
                    changed[name] = tensor.to(self.pick(types))
                case 1:
                    changed[name] = tensor.reshape(-1)
                case 2:
                    changed[name] = tensor[..., :0].clone()
                case 3:
                    changed[name] = torch.tensor(1.0)
                case 4:
                    changed[name] = torch.full(tensor.shape, self.pick(numbers)).to(
                        self.pick((torch.float32, tensor.dtype))
                    )
                case 5:
                    changed[
                        self.pick(("exit.²", "exit." + "9" * 5000, "feature.layers.7", "x", "exit.3")) + ".layer.a"
                    ] = tensor
                case 6:
                    changed[name] = torch.cat([tensor, tensor]) if tensor.ndim else tensor
                case 7:
                    pass  # it is gone
        return changed or {"x": torch.zeros(1)}

    def safetensors(self, content: bytes) -> bytes:
        """A file with a changed header over the same data."""
        length = int.from_bytes(content[:8], "little")
        header = self.json(json.loads(content[8 : 8 + length]))
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
