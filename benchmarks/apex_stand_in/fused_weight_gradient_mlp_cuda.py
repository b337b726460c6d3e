"""Stands for the module of Apex by which Megatron's output layer adds its weight gradient to main_grad.

Megatron-LM fuses gradient accumulation by default, and megatron-core 0.19 then asks for Apex as soon as a layer of its
own is built, such as the output layer; layers of Transformer Engine need no Apex. The output layer is in no graph of a
decoder, so that its arithmetic does not matter to what is compared.
"""

from __future__ import annotations

import torch


def wgrad_gemm_accum_fp32(total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
    """Add the weight gradient to `main_grad`.

    Args:
        total_input: the layer's input, shape [tokens, input size].
        grad_output: the gradient of its output, shape [tokens, output size].
        main_grad: float32, shape [output size, input size].
    """
    main_grad.add_(torch.mm(grad_output.t(), total_input))


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
