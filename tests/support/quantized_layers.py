"""Stands for Transformer Engine's quantization on a CPU: a global manager, and layers that quantize as its do."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import torch
from torch import nn

LARGEST = 8.0
"""The largest quantized number."""


class Manager:
    """Stands for FP8GlobalStateManager."""

    quantization_state = SimpleNamespace()
    made: list[str]
    """Every update, `forward` or `backward`, since `reset`."""

    @classmethod
    def reset(cls):
        cls.made = []
        cls.quantization_state = SimpleNamespace(
            skip_fp8_weight_update_tensor=None, fp8_tensors_recompute_buffer=[], states={True: [], False: []}
        )

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward=True):
        cls.made.append("forward" if forward else "backward")
        for state in cls.quantization_state.states[forward]:
            amax = state.amax_history.max(0).values
            state.amax_history.copy_(torch.roll(state.amax_history, -1, 0))
            state.amax_history[0].zero_()
            state.scale.copy_(torch.where(amax > 0, LARGEST / amax, state.scale))


class State:
    """Stands for DelayedScalingRecipeState: of an input and a weight, or of a gradient."""

    def __init__(self, number):
        self.scale, self.amax_history = torch.ones(number), torch.zeros(3, number)


class Stateless:
    """Stands for the state of current and blockwise scaling, of MXFP8 and of NVFP4: nothing stays between passes."""


class Workspace:
    """A quantized weight."""

    def __init__(self, data, inverse):
        self._data, self._scale_inv = data, inverse

    def get_metadata(self):
        return {"data": self._data, "scale_inv": self._scale_inv, "quantizer": None}


def quantized(x, state, position):
    """`x` in whole numbers, and what gives back its size; under delayed scaling the amax goes to the history."""
    if not hasattr(state, "scale"):
        scale = LARGEST / x.detach().abs().max()
        return torch.round(x.detach() * scale).clamp(-LARGEST, LARGEST), 1 / scale
    amax = state.amax_history[0][position]
    amax.copy_(torch.maximum(amax, x.detach().abs().max()))
    scale = state.scale[position]
    return torch.round(x.detach() * scale).clamp(-LARGEST, LARGEST), 1 / scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, layer, workspace):
        data, inverse = quantized(x, layer.fp8_meta["scaling_fwd"], 0)
        ctx.save_for_backward(data * inverse)
        ctx.layer, ctx.workspace, ctx.first = layer, workspace, layer.is_first
        return (data * inverse) @ (workspace._data * workspace._scale_inv).T

    @staticmethod
    def backward(ctx, grad):
        data, inverse = quantized(grad, ctx.layer.fp8_meta["scaling_bwd"], 0)
        x, w = ctx.saved_tensors[0], ctx.workspace
        if ctx.first:
            Manager.reduce_and_update_fp8_tensors(forward=False)
        return (data * inverse) @ (w._data * w._scale_inv), (data * inverse).T @ x, None, None


class QuantizedLinear(nn.Module):
    """A residual layer without bias, under delayed scaling: a step's first micro-batch quantizes its weight."""

    def __init__(self, size, *, capturing, delayed):
        super().__init__()
        self.delayed = delayed
        self.weight = nn.Parameter(torch.randn(size, size))
        self.fp8_meta, self._fp8_workspaces = {}, {}
        self.is_first_microbatch, self.is_first = True, False
        self._capturing = capturing

    def forward(self, x):
        if not self.fp8_meta:
            made = (State(2), State(1)) if self.delayed else (Stateless(), Stateless())
            self.fp8_meta |= dict(zip(("scaling_fwd", "scaling_bwd"), made, strict=True))
        if self.delayed and self.fp8_meta["scaling_fwd"] not in Manager.quantization_state.states[True]:
            for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
                Manager.quantization_state.states[forward].append(self.fp8_meta[key])
        skip = Manager.quantization_state.skip_fp8_weight_update_tensor if self._capturing() else None
        first, self.is_first_microbatch = self.is_first_microbatch, False
        workspace, state = self._fp8_workspaces.get("weight"), self.fp8_meta["scaling_fwd"]
        if first is None:  # quantized for this pass alone
            workspace = Workspace(*(t.clone() for t in quantized(self.weight, state, 1)))
        elif workspace is None:
            self._fp8_workspaces["weight"] = workspace = Workspace(
                *(t.clone() for t in quantized(self.weight, state, 1))
            )
        elif skip is not None:  # as the kernels do
            before = state.amax_history[0][1].clone() if self.delayed else None
            data, inverse = quantized(self.weight, state, 1)
            if before is not None:
                state.amax_history[0][1].copy_(torch.where(skip[0] == 1, before, state.amax_history[0][1]))
            workspace._data.copy_(torch.where(skip[0] == 1, workspace._data, data))
            workspace._scale_inv.copy_(torch.where(skip[0] == 1, workspace._scale_inv, inverse))
        elif first:
            for target, value in zip(
                (workspace._data, workspace._scale_inv), quantized(self.weight, state, 1), strict=True
            ):
                target.copy_(value)
        return x + _Product.apply(x, self.weight, self, workspace)


class Decoder(nn.Module):
    """Two quantized layers without dropout; its output depends on the document of every token."""

    def __init__(self, size, *, capturing=lambda: False, delayed=True):
        super().__init__()
        self.layers = nn.ModuleList([QuantizedLinear(size, capturing=capturing, delayed=delayed) for _ in range(2)])
        self.layers[0].is_first = True  # the last one in a backward

    def forward(self, x, packed):
        document = torch.searchsorted(packed.cu_seqlens[1:].contiguous(), torch.arange(len(x)), right=True)
        for layer in self.layers:
            x = layer(x)
        if torch.is_grad_enabled():
            Manager.reduce_and_update_fp8_tensors(forward=True)
        return x * (1 + document[:, None])

    def begin_step(self):
        """As Megatron's schedules mark the first micro-batch of a step."""
        for layer in self.layers:
            layer.is_first_microbatch = True

    def states(self):
        """Every scaling factor and history, and every quantized weight."""
        found = {}
        for number, layer in enumerate(self.layers):
            for key, state in layer.fp8_meta.items() if layer.delayed else ():
                found[f"{number} {key} scale"], found[f"{number} {key} amax"] = state.scale, state.amax_history
            for workspace in layer._fp8_workspaces.values():
                found[f"{number} data"], found[f"{number} inverse"] = workspace._data, workspace._scale_inv
        return found


def queue(*copies):
    """A queue of copies of scales, as recomputation keeps them."""
    return deque(copies)
