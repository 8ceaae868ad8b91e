"""Messages, as Anthropic's clients speak."""
