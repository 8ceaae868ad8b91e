"""Reads untrusted safetensors files: tensors of the expected shapes and types, or an error in one sentence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load
from torch import Tensor

from hierspec.core.errors import HierspecError
from hierspec.core.text_files import refusal, shown, why

Shape = tuple[int, ...]
_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8")


@contextmanager
def opened(path: Path, remedy: str) -> Iterator[Any]:
    """The mapped file, as the safetensors package opens it."""
    with _damage_told(path, remedy), safe_open(path, framework="pt", device="cpu") as file:
        yield file


def loaded(path: Path, content: bytes, remedy: str) -> dict[str, Tensor]:
    """All tensors of a file's `content`."""
    with _damage_told(path, remedy):
        tensors: dict[str, Tensor] = load(content)
        return tensors


def check_stored(path: Path, file: Any, name: str, shape: Shape, remedy: str, integers: bool = False) -> None:
    """Checks a tensor of an opened file before it is read."""
    stored = file.get_slice(name)
    check_shape(path, name, tuple(stored.get_shape()), shape, remedy)
    kinds = _INTEGERS if integers else _FLOATS
    if stored.get_dtype() not in kinds:
        raise HierspecError(
            f"{path} stores {name} as {stored.get_dtype()}, which is not supported: {', '.join(kinds[:-1])} and "
            f"{kinds[-1]} are; {remedy}."
        )


def check_tensor(path: Path, name: str, tensor: Tensor | None, shape: Shape, remedy: str) -> Tensor:
    """Checks that a tensor exists, has this shape and holds floats; returns it."""
    if tensor is None:
        raise missing(path, name, shape, remedy)
    check_shape(path, name, tuple(tensor.shape), shape, remedy)
    if not tensor.is_floating_point():
        raise HierspecError(f"{path} does not fit the model: {name} should hold floats; {remedy}.")
    return tensor


def check_shape(path: Path, name: str, stored: Shape, expected: Shape, remedy: str) -> None:
    if stored != expected:
        raise HierspecError(
            f"{path} does not fit the model: {name} should be {list(expected)} and is {shown(list(stored))}; {remedy}."
        )


def missing(path: Path, name: str, shape: Shape, remedy: str) -> HierspecError:
    return HierspecError(f"{path} does not fit the model: the tensor {name} {list(shape)} is missing; {remedy}.")


def token_ids(path: Path, name: str, tensors: Mapping[str, Tensor], remedy: str) -> list[int]:
    """A tensor that must be a list of integers, as a list."""
    tensor = tensors.get(name)
    if tensor is None or tensor.ndim != 1 or tensor.is_floating_point() or tensor.is_complex():
        raise HierspecError(f"{path} does not fit the model: {name} should be a list of whole numbers; {remedy}.")
    values: list[int] = tensor.long().tolist()
    return values


@contextmanager
def _damage_told(path: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except HierspecError:
        raise
    except OSError as error:
        raise refusal(path, remedy)(why(error)) from error
    except Exception as error:  # many types, depending on which part of the file is damaged
        raise HierspecError(f"{path} is damaged, it is not a whole safetensors file: {remedy}.") from error
