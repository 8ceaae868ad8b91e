"""Responses, as OpenAI's newer clients speak."""
