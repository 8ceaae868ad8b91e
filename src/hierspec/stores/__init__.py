"""Token databases: they draft tokens and never verify them. `registry.py` opens them by name."""

from hierspec.stores.registry import BUILT_IN, Home, check_history, open_store

__all__ = ["BUILT_IN", "Home", "check_history", "open_store"]
