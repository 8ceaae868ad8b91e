"""Gives a model its own exits and drafts: synthesise its text, train them on it, measure their agreement."""
