"""A small GPTModel of megatron-core on a CPU, with experts and multi-token prediction, and what it trains on."""

from __future__ import annotations

import torch

from support.grouped_layers import group_experts
from support.layer_graphs import HIDDEN, LARGE, LAYERS, OVER, SMALL, TOKENS, Attention, Reduction
from thdprof.runtime.megatron import packed_seq_params

BOUNDS = [SMALL, LARGE, OVER, SMALL, SMALL, OVER, LARGE]
"""Boundaries of the micro-batches."""
VOCABULARY = 64


def model_of(*, overlaps=False, first_dense=False, predictions=None, pre_process=True, grouped=False, **settings):
    """A GPT of layers with experts, on the host; `predictions` layers of multi-token prediction are behind them.

    `grouped` experts run by TEGroupedMLP, others one after the other. With `overlaps` the schedule overlaps the
    experts' communication; `first_dense`: the first layer has no experts; without `pre_process` the model is the last
    stage of a pipeline.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=16,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        add_bias_linear=False,
        num_moe_experts=4,
        moe_layer_freq=[int(not (first_dense and n == 0)) for n in range(LAYERS)],
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.1,
        mtp_num_layers=predictions,
        **settings,
    )
    config.overlap_moe_expert_parallel_comm = overlaps  # whose check wants more ranks than there are
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    if grouped:
        group_experts(spec.layer_specs)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if predictions else None,
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        position_embedding_type="none",
        pre_process=pre_process,
    ).train()
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            torch.nn.init.normal_(parameter)  # tokens go to all experts
    return model


def micro_batches(masked=False):
    """Arguments of the model for each micro-batch, with a mask of padding among its tokens or without."""
    random = torch.Generator().manual_seed(3)
    for bounds in BOUNDS:
        tokens, labels = torch.randint(0, VOCABULARY, (2, 1, TOKENS), generator=random)
        params = packed_seq_params(bounds, max_seqlen=TOKENS, device="cpu")
        mask = {"padding_mask": torch.rand(1, TOKENS, generator=random) < 0.3} if masked else {}
        yield (tokens, torch.arange(TOKENS)[None], None), {"labels": labels, "packed_seq_params": params, **mask}


def train_two_at_a_time(model):
    """Losses and gradients of micro-batches of which two at a time are between forward and backward, and the order in
    which gradients were ready."""
    reduction = Reduction(model)
    reduction.zero(resets_flags=True)
    seen, held = [], []
    for args, kwargs in micro_batches():
        held.append(model(*args, **kwargs))
        seen.append(held[-1].detach().clone())
        if len(held) == 2:
            held.pop(0).sum().backward()
    held.pop().sum().backward()
    return [*seen, *(p.main_grad.clone() for p in model.parameters())], reduction.ready
