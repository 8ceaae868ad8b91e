"""The decoder on an NVIDIA GPU: Triton kernels whose bits do not depend on what else is in a pass."""
