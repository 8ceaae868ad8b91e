"""The page at /: its data and its files."""
