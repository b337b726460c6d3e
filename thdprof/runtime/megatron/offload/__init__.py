"""Activations of Megatron's layers in host memory."""
