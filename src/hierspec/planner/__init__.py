"""Offline: measures tiers, predicts what plans would take, and chooses one. Nothing below imports it."""
