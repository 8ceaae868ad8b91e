"""The decoder on an NVIDIA GPU: kernels in Triton whose bits do not depend on what else is in a pass."""
