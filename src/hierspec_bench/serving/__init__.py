"""Servers under load: ours, and others that speak OpenAI's protocol."""
