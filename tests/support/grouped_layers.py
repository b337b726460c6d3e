"""A stand-in for Transformer Engine's grouped linear layer, with which megatron-core's TEGroupedMLP runs on a CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn


class Products(torch.autograd.Function):
    """Products of the rows of every expert with its weight: one node for all weights, as Transformer Engine has it."""

    @staticmethod
    def forward(ctx, rows, splits, *weights):
        ctx.save_for_backward(rows, *weights)
        ctx.splits = splits
        return torch.cat([part @ weight.t() for part, weight in zip(rows.split(splits), weights, strict=True)])

    @staticmethod
    def backward(ctx, grad):
        rows, *weights = ctx.saved_tensors
        parts = list(zip(grad.split(ctx.splits), rows.split(ctx.splits), weights, strict=True))
        of_weights = [of_part.t() @ part for of_part, part, _ in parts]
        return torch.cat([of_part @ weight for of_part, _, weight in parts]), None, *of_weights


class GroupedLinear(nn.Module):
    """A weight for each expert, and products of the rows that it gets."""

    use_bias = False

    def __init__(self, num_gemms, input_size, output_size, *, config, **_):
        super().__init__()
        self.num_gemms, self.fuse_wgrad_accumulation = num_gemms, config.gradient_accumulation_fusion
        for number in range(num_gemms):
            weight = nn.Parameter(torch.randn(output_size, input_size) / input_size**0.5)
            weight.allreduce = True
            self.register_parameter(f"weight{number}", weight)

    def forward(self, rows, splits):
        return Products.apply(rows, splits, *self.parameters()), None

    def backward_dw(self):
        """Nothing is delayed."""


def grouped_mlp():
    """The spec of experts that run by TEGroupedMLP over the stand-in."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    return partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear))


def group_experts(layer_specs):
    """Let layers with experts be built with TEGroupedMLP over the stand-in."""
    for layer in layer_specs:
        of_experts = getattr(layer.submodules.mlp, "keywords", {}).get("submodules")
        if hasattr(of_experts, "experts"):
            of_experts.experts = grouped_mlp()


def lay(weights, how):
    """Put weights where DistributedDataParallel might: `own` memory, in order, reversed, unevenly, or with gaps."""
    size = weights[0].numel()
    gap = 64 if how == "gaps" else 0
    memory = weights[0].detach().new_zeros(len(weights) * (size + gap) + 16)
    if how == "own":
        return
    begin = 0
    for number, weight in enumerate(weights if how == "in order" else weights[::-1]):
        place = memory[begin : begin + size].view(weight.shape)
        place.copy_(weight.data)
        weight.data = place
        begin += size + gap + (8 if how == "unevenly" and number == 0 else 0)


def with_main_grads(layer, how):
    """Give the parameters of experts a `main_grad`, and mark them as DistributedDataParallel does."""
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        weights = list(linear.parameters())
        sums = [nn.Parameter(torch.zeros_like(w, dtype=torch.float32)) for w in weights]
        lay(sums, how)
        for weight, total in zip(weights, sums, strict=True):
            weight.main_grad, weight.grad_added_to_main_grad = total.detach(), False


def expert_layer(seed=0, **settings):
    """An MoELayer of 8 experts, 3 a token, hidden size 16, over the stand-in; `settings` go to its configuration."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(seed)
    values = {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "ffn_hidden_size": 24,
        "moe_ffn_hidden_size": 24,
        "num_moe_experts": 8,
        "moe_router_topk": 3,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.1,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "use_cpu_initialization": True,
    }
    config = TransformerConfig(**{**values, **settings})
    shared = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    submodules = MoESubmodules(experts=grouped_mlp(), shared_experts=partial(SharedExpertMLP, submodules=shared))
    layer = MoELayer(config, submodules, layer_number=1).train()
    nn.init.normal_(layer.router.weight)
    return layer
