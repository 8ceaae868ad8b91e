"""A whole forward pass as one compiled function on a CPU."""
