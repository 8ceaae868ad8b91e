"""Gives a model tiers of its own: synthesise its text, train exits and drafts on it, measure what they agree on."""
