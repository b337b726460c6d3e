"""Offloading of activations to host memory: the decision which tensors move, and the memory that this frees. No
torch.
"""
