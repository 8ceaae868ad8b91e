"""Where weights come from: Hugging Face folders, GGUF files, the hub, the default model. All is checked before use."""
