"""All layers through torch, on any device: the reference for the other backends."""
