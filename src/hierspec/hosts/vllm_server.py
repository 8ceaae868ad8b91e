"""The command that starts vLLM's own server with hierspec's proposer in it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hierspec.assembly.host import check_for_host
from hierspec.checkpoints.gguf_file import convert
from hierspec.checkpoints.load import find_source, known_config, load_checkpoint
from hierspec.core.errors import HierspecError
from hierspec.hosts.guest import check_guest_plan
from hierspec.hosts.vllm_options import check_version, read_plan

PROPOSER = "hierspec.hosts.vllm.Proposer"
DEFAULT_TOKENS = 8  # longest draft of a request: tokens that do not pay are left out anyway


@dataclass(frozen=True)
class VllmServer:
    """What `hierspec serve --engine vllm` was asked for."""

    model: str | None = None
    plan: str = "auto"
    tokens: int = DEFAULT_TOKENS  # num_speculative_tokens
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "auto"
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    further: tuple[str, ...] = ()  # options of vLLM's own

    def command(self) -> list[str]:
        """vLLM's command line. What cannot run there is refused here, before a minute of loading."""
        check_version()
        if self.tokens < 1:
            raise HierspecError(f"--speculative-tokens must be at least 1, not {self.tokens}.")
        config = known_config(self.model)
        plan = read_plan(self.plan, 32 if config is None else config.layers)
        check_guest_plan(plan)
        check_for_host(plan.fixed(), self.model or "the model", weights_here=True)
        speculative = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": self.tokens}
        plan_name = str(Path(self.plan).resolve()) if Path(self.plan).is_file() else self.plan
        command = [*_vllm(), "serve", vllm_model(self.model), "--host", self.host, "--port", str(self.port)]
        command += ["--dtype", self.dtype]
        command += ["--speculative-config", json.dumps(speculative)]
        command += ["--additional-config", json.dumps({"hierspec": {"plan": plan_name}})]
        if self.names:
            command += ["--served-model-name", *self.names]
        return [*command, *self.further]

    def environment(self) -> dict[str, str]:
        """Keys do not belong on a command line, where everybody on the machine can read them."""
        if len(self.keys) > 1:
            raise HierspecError("vLLM's server takes one API key; give one.")
        return {**os.environ, **({"VLLM_API_KEY": self.keys[0]} if self.keys else {})}

    def run(self) -> None:
        """Become vLLM's server: signals reach it as if it had been started itself."""
        command = self.command()
        os.execvpe(command[0], command, self.environment())


def vllm_model(model: str | None, dtype: torch.dtype = torch.float32) -> str:
    """What vLLM is given for a model: a folder or a hub name; for a GGUF file, its converted folder in the cache."""
    path = find_source(model)
    if path is not None and path.is_file():
        return str(convert(path, dtype))
    if path is None and model in (None, "default"):
        return str(load_checkpoint(None, dtype, as_stored=False).folder)
    if path is None and model == "default-ee":
        raise HierspecError("default-ee is a change to weights that vLLM cannot make; leave MODEL out for the default.")
    return str(model)


def _vllm() -> Sequence[str]:
    """The command, or its module if the installation has no command (the one for CPUs)."""
    beside = Path(sys.executable).with_name("vllm")
    if beside.is_file():
        return [str(beside)]
    found = shutil.which("vllm")
    return [found] if found else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
