"""What can judge tokens, on any backend: the model, its exits, drafters on its states."""
