"""Text at the edges: tokenizers, chat templates, streaming text, stop strings. Nothing here knows a model."""
