"""Where another inference engine runs the target and hierspec drafts for it."""
