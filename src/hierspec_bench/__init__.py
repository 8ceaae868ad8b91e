"""Plans side by side on the same prompts: equality first, then time."""
