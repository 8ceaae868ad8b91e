"""Other engines that write text from the same weights, as baselines: each in its own environment and process."""

from hierspec_bench.peers.catalogue import KINDS, PeerKind, chosen_kinds
from hierspec_bench.peers.install import ENVIRONMENTS, build_of, install, python_of
from hierspec_bench.peers.opening import Peer, PeerAnswer, not_handed_on, open_peers
from hierspec_bench.peers.stepper import TransformersPeer, open_peer

__all__ = [
    "ENVIRONMENTS",
    "KINDS",
    "Peer",
    "PeerAnswer",
    "PeerKind",
    "TransformersPeer",
    "build_of",
    "chosen_kinds",
    "install",
    "not_handed_on",
    "open_peer",
    "open_peers",
    "python_of",
]
