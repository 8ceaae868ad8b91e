"""Measuring what things cost here, to choose what is worth doing."""
