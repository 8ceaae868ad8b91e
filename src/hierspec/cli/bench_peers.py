"""--peers, --install-peers and --peer-settings of `hierspec bench`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hierspec.cli.console import hand_out, note, progress_bars
from hierspec.core.errors import HierspecError

if TYPE_CHECKING:
    from hierspec.core.sampling import Sampling
    from hierspec.language_model import LanguageModel
    from hierspec.progress import Progress
    from hierspec.prompts import BenchPrompt
    from hierspec_bench.peers import Peer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers", default="", metavar="NAMES",
        help="other programs beside us: transformers, openvino, llama.cpp, llama.cpp-native, vllm and "
        "their variants such as openvino:lookup (docs/peers.md), separated by commas, or all",
    )  # fmt: skip
    parser.add_argument(
        "--install-peers", nargs="?", const="all", metavar="NAMES",
        help="make a virtual environment for each of these peers in the cache and end (default: all); "
        "llama.cpp-native, compiled for this processor, only by name: --install-peers all,llama.cpp-native",
    )  # fmt: skip
    parser.add_argument(
        "--peer-settings", choices=("best", "again", "default"), default="best",
        help="search each peer's best setting on a few prompts, once (best, as usual) or anew (again); default: take "
        "its first that runs",
    )  # fmt: skip


def install(arguments: argparse.Namespace) -> int:
    """Environments for the peers named. One that cannot be made does not keep the others from being made."""
    from hierspec_bench.peers import ENVIRONMENTS
    from hierspec_bench.peers import install as install_one

    asked = [name.split(":")[0] for name in arguments.install_peers.split(",") if name]
    every = [name for name, environment in ENVIRONMENTS.items() if not environment.by_name_only]
    named = [name for name in asked if name != "all"]
    names = list(dict.fromkeys([*(every if "all" in asked else []), *named]))
    unknown = [name for name in names if name not in ENVIRONMENTS]
    if unknown:
        raise HierspecError(f"Unknown peer {unknown[0]!r}; those to install are {', '.join(ENVIRONMENTS)}, or all.")
    installed, failed = {}, {}
    with progress_bars() as progress:
        for name in names:
            try:
                install_one(ENVIRONMENTS[name], progress)
                installed[name] = list(ENVIRONMENTS[name].requirements)
            except HierspecError as error:
                failed[name] = str(error)
    for name, requirements in installed.items():
        note(f"{name}: {', '.join(requirements)}")
    for reason in failed.values():
        note(reason)
    hand_out({"kind": "peers", "installed": installed, "absent_peers": failed}, arguments.output)
    return 1 if failed else 0


@dataclass(frozen=True)
class Opened:
    """Peers that run, and why others do not."""

    peers: Sequence[Peer]
    absent: dict[str, str]


@contextmanager
def opened(
    arguments: argparse.Namespace, model: LanguageModel, prompts: Sequence[BenchPrompt],
    samplings: Sequence[Sampling], progress: Progress,
) -> Iterator[Opened]:  # fmt: skip
    """The peers asked for, loaded; closed at the end whatever happens."""
    if not arguments.peers:
        yield Opened((), {})
        return
    from hierspec.prompts import spread
    from hierspec_bench.peers import not_handed_on, open_peers
    from hierspec_bench.peers.search import PROMPTS

    if wrong := not_handed_on(samplings[0]):
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise HierspecError(f"Peers are told temperature and seed, not {names}: leave that out, or --peers.")
    few = [model.encode(prompt.turns[0]) for prompt in spread(list(prompts), PROMPTS)]
    most = samplings[0].max_tokens
    longest = max(sum(len(model.encode(turn)) + most for turn in prompt.turns) for prompt in prompts)
    temperature = min(sampling.temperature for sampling in samplings)
    source = Path(arguments.model) if arguments.model else None
    peers, absent = open_peers(
        arguments.peers, model, few, progress, settings=arguments.peer_settings, source=source,
        temperature=temperature, context=longest,
    )  # fmt: skip
    try:
        for name, reason in absent.items():
            note(f"{name} is absent: {reason}")
        yield Opened(peers, absent)
    finally:
        for peer in peers:
            peer.close()
