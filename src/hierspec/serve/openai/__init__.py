"""Chat and text completions, models and tokens, as clients of OpenAI's API and of vLLM speak."""
