"""Tensors of the CPU that stand for those of a GPU."""

from __future__ import annotations

import torch

WAITS = ("repeat_interleave", "item", "nonzero", "tolist", "__bool__", "__int__", "cpu", "numpy")
"""Functions that wait for a GPU."""


class OnGpu(torch.Tensor):
    """A tensor of the CPU that stands for one of a GPU: reading its values is an error."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in WAITS and any(isinstance(arg, OnGpu) for arg in args):
            raise AssertionError(f"{func.__name__} waits for the GPU")
        return super().__torch_function__(func, types, args, kwargs or {})
