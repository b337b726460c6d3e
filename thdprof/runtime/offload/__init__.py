"""Saved tensors in host memory between a forward and its backward."""
