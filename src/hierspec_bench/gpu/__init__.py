"""What a GPU can do, what passes cost on it, and how plans perform: one unattended run."""
