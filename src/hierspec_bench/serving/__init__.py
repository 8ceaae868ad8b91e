"""Servers under load: ours, and others with OpenAI's API."""
