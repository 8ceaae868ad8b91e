"""From what a client asks to answers in the worker's batches, whatever the protocol."""
