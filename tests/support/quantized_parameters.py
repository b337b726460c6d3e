"""Stands for Transformer Engine's quantized parameters on a CPU: a tensor whose values lie in inner tensors.

As on Hopper, a forward reads the data, and a backward their transpose, which is made anew after every gathering of
parameters, or by the first pass that needs it.
"""

from __future__ import annotations

import torch
from torch import nn

LARGEST = 8.0
"""The largest quantized number."""


class QuantizedTensor(torch.Tensor):
    """A tensor in whole numbers with one factor, which has no memory of its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data, transpose, factor, stale):
        shape, strides = data.shape, data.stride()
        made = torch.Tensor._make_wrapper_subclass(cls, shape, strides=strides, dtype=factor.dtype, device=data.device)
        made._data, made._transpose, made._scale_inv, made._stale = data, transpose, factor, stale
        made._amax = made._amax_columnwise = None
        return made

    @classmethod
    def of(cls, values):
        """`values`, quantized, without a transpose."""
        made = cls(torch.empty_like(values), None, torch.ones(()), True)
        made.quantize_(values)
        return made

    def detach(self):
        made = type(self)(self._data, self._transpose, self._scale_inv, self._stale)
        made._amax, made._amax_columnwise = self._amax, self._amax_columnwise
        return made

    def quantize_(self, values):
        """Renew the data in place, as an optimizer does; a transpose that is there is stale from then on."""
        factor = LARGEST / values.abs().max()
        self._data.copy_(torch.round(values * factor))
        self._scale_inv.copy_(1 / factor)
        self._stale = True

    def dequantize(self):
        return self._data * self._scale_inv

    def transposed(self):
        return self._transpose * self._scale_inv

    def get_metadata(self):
        return {"data": self._data, "data_transpose": self._transpose, "fp8_scale_inv": self._scale_inv, "quantizer": 0}

    def get_usages(self):
        return {"rowwise": True, "columnwise": self._transpose is not None and not self._stale}

    replaying = False
    """Whether passes stand for a graph's replay, which runs no Python and finds only what is there."""

    def update_usage(self, *, rowwise_usage, columnwise_usage):
        if columnwise_usage and not self.get_usages()["columnwise"] and not QuantizedTensor.replaying:
            self.create_transpose()

    def create_transpose(self):
        """Renew the transpose in place, as Megatron does after parameters are gathered."""
        if self._transpose is None:
            self._transpose = torch.empty_like(self._data.T.contiguous())
        self._transpose.copy_(self._data.T)
        self._stale = False

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func == torch.ops.aten.detach.default:
            return args[0].detach()
        raise NotImplementedError(f"{func} of a quantized tensor")


class FourBitTensor(QuantizedTensor):
    """As NVFP4 does, it keeps a factor of the whole tensor, too, once for the data and once for their transpose."""

    @classmethod
    def of(cls, values):
        """`values`, quantized, without a transpose."""
        made = cls(torch.empty_like(values), None, torch.ones(()), True)
        made._amax = torch.ones(())
        made.quantize_(values)
        return made

    def quantize_(self, values):
        super().quantize_(values)
        self._amax.copy_(values.abs().mean())
        self._scale_inv.div_(self._amax)

    def create_transpose(self):
        super().create_transpose()
        if self._amax_columnwise is None:
            self._amax_columnwise = self._amax.clone()
        self._amax_columnwise.copy_(self._amax)

    def get_metadata(self):
        return {
            "rowwise_data": self._data,
            "columnwise_data": self._transpose,
            "rowwise_scale_inv": self._scale_inv,
            "amax_rowwise": self._amax,
            "amax_columnwise": self._amax_columnwise,
        }

    def dequantize(self):
        return self._data * (self._scale_inv * self._amax)

    def transposed(self):
        return self._transpose * (self._scale_inv * self._amax_columnwise)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        weight.update_usage(rowwise_usage=True, columnwise_usage=True)
        ctx.save_for_backward(x, weight)
        return x @ weight.dequantize()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.transposed(), x.T @ grad


class QuantizedLinear(nn.Module):
    """A layer whose parameter is quantized itself."""

    def __init__(self, size, kind=QuantizedTensor):
        super().__init__()
        self.weight = nn.Parameter(kind.of(torch.randn(size, size)))
        self.main = self.weight.dequantize().clone()

    def forward(self, x):
        return _Product.apply(x, self.weight)

    def step(self, *, gathers):
        """A step of an optimizer that keeps the parameter's values in full precision.

        Args:
            gathers: whether the transpose is renewed with the data, as where parameters are gathered right after.
        """
        grad = self.weight.grad
        self.main -= 0.3 * grad / grad.abs().max()  # moves most of the whole numbers
        self.weight.grad = None
        stale = self.weight._stale
        self.weight.quantize_(self.main)
        if gathers:
            self.weight.create_transpose()
        else:
            assert not stale, "a pass before it needed the transpose"
