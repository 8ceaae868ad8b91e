"""What can score tokens, on any backend: the model, its exits, drafters on its states."""
