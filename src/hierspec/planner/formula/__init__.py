"""Hierarchies on paper: figures of tiers, the latency formula, the search, and what-if files. Nothing runs."""
