"""From a client's request to answers in the worker's batches, for any protocol."""
