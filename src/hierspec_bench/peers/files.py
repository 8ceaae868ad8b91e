"""Model files in each engine's format, made from the same weights and kept in the cache."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hierspec.checkpoints.default import DEFAULT_NAME, default_model
from hierspec.checkpoints.families import to_huggingface
from hierspec.checkpoints.gguf_file import convert
from hierspec.checkpoints.packs import SMALL
from hierspec.core.errors import HierspecError
from hierspec.language_model import LanguageModel
from hierspec.paths import cache_folder, whole_file, whole_folder
from hierspec_bench.peers.catalogue import FILE

_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7}  # GGUF's codes
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_of(model: LanguageModel, source: Path | None = None) -> Path:
    """The GGUF file that the model was read from."""
    _check_not_enlarged(model)
    if model.file is not None:
        return model.file
    if source is not None and source.suffix == ".gguf":
        return source
    if model.name == DEFAULT_NAME:
        return default_model()
    raise HierspecError(f"{model.name} was not read from a GGUF file, which this engine needs.")


def float_folder(model: LanguageModel) -> Path:
    """The model's folder with weights, for engines that read folders; converted once if it has none."""
    _check_not_enlarged(model)
    return model.folder if model.file is None else convert(model.file, torch.float32)


def _check_not_enlarged(model: LanguageModel) -> None:
    if model.enlarged:
        raise HierspecError(f"{model.name} is in no file that other engines could read: leave out --enlarged.")


def with_weights(path: Path, weights: str) -> Path:
    """The GGUF file itself, or the same weights in another number format."""
    if weights == FILE:
        return path
    target = _folder() / f"{path.stem}-{_key(path)}.{weights}.gguf"
    if not target.is_file():
        gguf, reader = _reader(path)
        kinds = gguf.GGMLQuantizationType
        tensors = {}
        for tensor in reader.tensors:
            # The embedding, which is also the head, keeps its 8 bits beside 4-bit matrices.
            kind = "Q8_0" if weights == "Q4_0" and tensor.tensor_type == kinds.Q8_0 else weights
            tensors[tensor.name] = (gguf.dequantize(tensor.data, tensor.tensor_type), kind)
        _write(gguf, reader, tensors, target, weights)
    return target


def bits_of(path: Path) -> str:
    """The number formats in a GGUF file, most frequent first."""
    _, reader = _reader(path)
    counted = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
    return ", ".join(f"{count} matrices {kind}" for kind, count in counted.most_common())


def small_folder(model: LanguageModel) -> Path:
    """The pack's small model in Hugging Face's layout: its layers between the target's embedding and head."""
    branch, _, target = _small(model)
    if not target.with_suffix("").is_dir():
        from safetensors.torch import save_file

        tensors = {name: tensor.float().contiguous() for name, tensor in branch.layer.items()}
        tensors["model.norm.weight"] = branch.norm.float().contiguous()
        tensors["model.embed_tokens.weight"] = _embedding(model)
        with whole_folder(target.with_suffix("")) as folder:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "config.json").write_text(json.dumps(to_huggingface(branch.config)), encoding="utf-8")
            for name in ("tokenizer.json", "tokenizer_config.json"):
                if (model.folder / name).is_file():
                    (folder / name).write_bytes((model.folder / name).read_bytes())
    return target.with_suffix("")


def small_gguf(model: LanguageModel, source: Path) -> Path:
    """The pack's small model as a GGUF file, matrices in 8 bits."""
    branch, layers, target = _small(model)
    if not target.is_file():
        gguf, reader = _reader(source)
        heads = {"attn_q": model.config.heads, "attn_k": model.config.kv_heads}
        tensors: dict[str, tuple[np.ndarray, str]] = {}
        for name, tensor in branch.layer.items():
            _, _, layer, part = name.split(".", 3)
            kind = _LAYER_NAMES[part.removesuffix(".weight")]
            values = tensor.float().numpy()
            if kind in heads:  # GGUF interleaves the two halves that rotary embedding rotates together
                halves = values.reshape(heads[kind], 2, -1, values.shape[-1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
            tensors[f"blk.{layer}.{kind}.weight"] = values, "Q8_0"
        for tensor in reader.tensors:
            if tensor.name in ("token_embd.weight", "output.weight"):
                tensors[tensor.name] = gguf.dequantize(tensor.data, tensor.tensor_type), "Q8_0"
        tensors["output_norm.weight"] = branch.norm.float().numpy(), "F32"
        _write(gguf, reader, tensors, target, "Q8_0", {f"{_architecture(reader)}.block_count": layers})
    return target


def _small(model: LanguageModel) -> tuple[Any, int, Path]:
    pack = model.pack
    if pack is None or not pack.has(SMALL):
        raise HierspecError(f"There is no small model for {model.name}: its pack has none.")
    branch = pack.small(model.config)
    return branch, branch.config.layers, _folder() / f"{model.name}-small-{pack.hashes[SMALL][:12]}.gguf"


def _embedding(model: LanguageModel) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(float_folder(model) / "model.safetensors", framework="pt", device="cpu") as opened:
        tensor: torch.Tensor = opened.get_tensor("model.embed_tokens.weight").float().contiguous()
        return tensor


def _write(
    gguf: Any,
    reader: Any,
    tensors: Mapping[str, tuple[np.ndarray, str]],
    target: Path,
    weights: str,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """A GGUF file with the reader's fields and these tensors; vectors stay float32."""
    with whole_file(target) as temporary:
        writer = gguf.GGUFWriter(temporary, _architecture(reader))
        for name, field in reader.fields.items():
            if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
                continue
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, (changes or {}).get(name, field.contents()), kind, sub_type=inner)
        writer.add_file_type(_FILE_TYPES[weights])
        for name, (values, kind) in tensors.items():
            chosen = gguf.GGMLQuantizationType["F32" if values.ndim == 1 else kind]
            numbers = np.ascontiguousarray(values, dtype=np.float32)
            writer.add_tensor(name, gguf.quantize(numbers, chosen), raw_dtype=chosen)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _reader(path: Path) -> tuple[Any, Any]:
    try:
        import gguf
    except ImportError as error:
        raise HierspecError("This engine needs gguf to prepare its files; pip install gguf.") from error
    return gguf, gguf.GGUFReader(path)


def _architecture(reader: Any) -> str:
    return str(reader.fields["general.architecture"].contents())


def _folder() -> Path:
    return cache_folder() / "peer-files"


def _key(path: Path) -> str:
    state = path.stat()
    return hashlib.sha256(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:12]
