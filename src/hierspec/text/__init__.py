"""Between text and token ids: tokenizers, chat templates, streamed text, stop strings. Nothing here knows a model."""
