"""Serve a model to OpenAI's clients, curl and browsers. Requests of many users share forward passes.

It listens on this machine alone unless --host says otherwise; then give it API keys. Ctrl-C or SIGTERM stops it after
the answers that are being written.

examples:
  hierspec serve
  hierspec serve ./my-model --host 0.0.0.0 --port 8080 --api-key "$SECRET" --max-tokens 2048
  hierspec serve ./my-model --engine vllm --plan hd+
  curl http://127.0.0.1:8000/v1/chat/completions -H "Content-Type: application/json" \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": true}'
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hierspec.cli import options
from hierspec.cli.console import note
from hierspec.cli.files import InputFile
from hierspec.cli.parser import name, text
from hierspec.core.errors import HierspecError
from hierspec.core.text_files import read_text, refusal
from hierspec.sizes import parse_size

if TYPE_CHECKING:
    from hierspec.serve.settings import Key, Settings

_KEY_VARIABLE = "HIERSPEC_API_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_HIGHEST_PORT = 65535


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument("--host", type=text, default="127.0.0.1", metavar="ADDRESS", help="default 127.0.0.1")
    group.add_argument("--port", type=int, default=8000, metavar="N", help="default 8000; 0: any that is free")
    group.add_argument(
        "--served-name",
        type=name,
        action="append",
        default=[],
        metavar="NAME",
        help="what clients call the model (repeatable; default: its own name)",
    )
    group.add_argument(
        "--api-key",
        type=text,
        action="append",
        default=[],
        metavar="KEY",
        help=f"who has it may use the server (repeatable; also from {_KEY_VARIABLE})",
    )
    group.add_argument(
        "--without-key", action="store_true", help="let everybody who reaches --host use the server, without a key"
    )
    group.add_argument("--api-keys", type=InputFile, metavar="FILE", help="keys from a file, one NAME KEY a line")
    group.add_argument(
        "--cors-origin",
        type=text,
        action="append",
        default=[],
        metavar="URL",
        help="pages that may call it (repeatable)",
    )
    group.add_argument(
        "--engine",
        choices=("hierspec", "vllm"),
        default="hierspec",
        help="who runs the model: hierspec (default), or vLLM with hierspec's drafts in it",
    )
    group.add_argument(
        "--speculative-tokens", type=int, metavar="N", help="with --engine vllm: most drafted tokens a row (default 8)"
    )
    group.add_argument(
        "--vllm-option",
        type=text,
        action="append",
        default=[],
        metavar="OPTION",
        help="with --engine vllm: an option of its own server, such as --vllm-option=--tensor-parallel-size=2",
    )
    group.add_argument("--log-prompts", action="store_true", help="also log what is asked (default: never)")
    _add_limits(parser)
    options.add_plan(parser)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="where a request has none (default 1)"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="of an answer (default: what the context holds)")
    group.add_argument(
        "--max-prompt", type=int, metavar="N", help="tokens of a prompt (default: what the context holds)"
    )
    group.add_argument("--max-body", default="8M", metavar="SIZE", help="of a request (default 8M)")
    group.add_argument("--max-running", type=int, default=256, metavar="N", help="answers at once (default 256)")
    group.add_argument(
        "--most-running",
        type=int,
        default=64,
        metavar="N",
        help="of these, how many share forward passes while the others wait (default 64; 1: one after another)",
    )
    group.add_argument("--max-seconds", type=float, default=600.0, metavar="S", help="of an answer (default 600)")
    group.add_argument(
        "--drain-seconds", type=float, default=30.0, metavar="S", help="for running answers when stopped (default 30)"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.engine == "vllm":
        return _run_vllm(arguments)
    if arguments.speculative_tokens is not None or arguments.vllm_option:
        raise HierspecError("--speculative-tokens and --vllm-option belong to --engine vllm.")
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise HierspecError(f"The server needs {error.name}; install it with: pip install 'hierspec[serve]'") from error
    keys = _keys(arguments)
    options.at_least_one(arguments, "most-running")
    _check_address(arguments, keys)
    settings = _settings(arguments, keys)  # mistakes are reported before a model is loaded
    from hierspec.serve.listening import serve

    model = options.load_model(arguments)
    plan = options.chosen_plan(model, arguments)
    options.prepare(model, plan)
    own_name, *aliases = arguments.served_name or [model.name]
    with model:
        serve(model, replace(settings, model_name=own_name, aliases=tuple(aliases), plan=plan), note)
    return 0


def _run_vllm(arguments: argparse.Namespace) -> int:
    """Becomes vLLM's server, and does not return."""
    from hierspec.hosts.vllm_server import DEFAULT_TOKENS, VllmServer

    keys = _keys(arguments)
    _check_address(arguments, keys)
    if arguments.exit is not None or arguments.draft is not None:
        raise HierspecError("--exit and --draft do not reach vLLM; write a plan file and give it with --plan.")
    tokens = DEFAULT_TOKENS if arguments.speculative_tokens is None else arguments.speculative_tokens
    VllmServer(
        model=arguments.model,
        plan=str(arguments.plan),
        tokens=tokens,
        host=arguments.host,
        port=arguments.port,
        dtype=arguments.dtype,
        names=tuple(arguments.served_name),
        keys=tuple(key.secret for key in keys),
        further=tuple(arguments.vllm_option),
    ).run()
    return 0


def _check_address(arguments: argparse.Namespace, keys: tuple[Key, ...]) -> None:
    if not 0 <= arguments.port <= _HIGHEST_PORT:
        raise HierspecError(f"--port must be from 0 to {_HIGHEST_PORT}, not {arguments.port}.")
    if arguments.host not in _LOOPBACK and not keys and not arguments.without_key:
        raise HierspecError(
            f"Everybody who reaches {arguments.host} could use the server; give --api-key (or {_KEY_VARIABLE}), or say "
            "--without-key."
        )


def _settings(arguments: argparse.Namespace, keys: tuple[Key, ...]) -> Settings:
    from hierspec.serve.settings import Limits, Settings

    limits = Limits(
        body_bytes=parse_size(arguments.max_body),
        prompt_tokens=arguments.max_prompt,
        max_tokens=arguments.max_tokens,
        running_answers=arguments.max_running,
        answer_seconds=arguments.max_seconds,
        drain_seconds=arguments.drain_seconds,
    )
    return Settings(
        host=arguments.host,
        port=arguments.port,
        api_keys=keys,
        temperature=arguments.temperature,
        cors_origins=tuple(arguments.cors_origin),
        log_prompts=arguments.log_prompts,
        most_running=arguments.most_running,
        limits=limits,
    )


def _keys(arguments: argparse.Namespace) -> tuple[Key, ...]:
    """Of the options, the environment and the file. Those without a name get one that tells nothing of them."""
    from hierspec.serve.settings import Key

    entries = [*arguments.api_key]
    if from_environment := os.environ.get(_KEY_VARIABLE):
        entries.append(from_environment)
    if arguments.api_keys is not None:
        lines = read_text(arguments.api_keys, refusal(arguments.api_keys, "write one NAME KEY a line")).splitlines()
        entries += [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    keys = []
    for number, entry in enumerate(entries, 1):
        owner, space, secret = entry.partition(" ")
        keys.append(Key(owner, secret.strip()) if space else Key(f"key{number}", entry))
    return tuple(keys)
