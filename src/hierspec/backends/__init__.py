"""How layers run. Each folder knows one device."""
