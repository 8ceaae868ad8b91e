"""Compares plans on the same prompts: equality first, then time."""
