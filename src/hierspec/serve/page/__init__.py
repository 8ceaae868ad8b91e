"""The page at /: what it is told, and its files."""
