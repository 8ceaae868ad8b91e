"""Hierarchies on recorded text: traces of what every tier would say, what passes cost, and plans played on both."""
