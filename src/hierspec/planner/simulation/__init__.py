"""Hierarchies on recorded text: traces of what every tier would pick, costs of passes, and plans simulated on both."""
