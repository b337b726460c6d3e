"""Activations of Megatron's layers in host memory between forward and backward."""
