"""What a GPU can do, what passes cost on it, and what plans make of that: one unattended run."""
