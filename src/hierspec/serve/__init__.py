"""A server: what OpenAI's clients speak, and a page that shows the hierarchy at work. Extra: hierspec[serve]."""
