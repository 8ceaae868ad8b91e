"""Hierarchies on paper: what is known of tiers, the latency formula, the search, and what-if files. Nothing runs."""
