"""Offloading of activations to host memory: which tensors move, and the memory that this frees. No torch."""
