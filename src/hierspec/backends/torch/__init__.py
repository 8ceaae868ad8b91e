"""Every layer through torch, on any device: what the other backends are compared with."""
