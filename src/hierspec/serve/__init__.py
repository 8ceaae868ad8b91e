"""A server with the APIs of OpenAI and Anthropic, and a page that shows the hierarchy at work. Extra:
hierspec[serve]."""
