"""Chat and text completions, models and tokens, in the APIs of OpenAI and vLLM."""
