"""A server: what OpenAI's and Anthropic's clients speak, over one model that many share."""
