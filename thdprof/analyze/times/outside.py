"""Times outside the decoder: embedding, output layer and loss of a micro-batch, and the optimizer's step."""

from __future__ import annotations

from thdprof.analyze.times.device import Device
from thdprof.analyze.times.gpus import Gpu
from thdprof.training import Model

LAUNCHES = 140.0
"""Launches outside the decoder in a micro-batch of Megatron's training loop, its reads of the GPU counted as such."""
_OF_ONE_END = 0.5
"""Share of them on the pipeline rank that makes most, where there are several: steps of two stages took as long as if
each made half (benchmarks/results/trainer-rows.md)."""
_LOSS_US_AN_ELEMENT = 17.4e-6
"""Cross entropy over the vocabulary, forward and backward, for one token and one entry: unfused, in fp32."""
_OPTIMIZER_MS_A_PARAMETER = 14e-9
"""Adam with clipping and zeroed gradients, for one parameter, on an H200."""


def outside_launches(model: Model, *, pipeline_size: int) -> float:
    """Launches outside the decoder of a micro-batch, without those of layers of multi-token prediction.

    Args:
        model: the model. A layer of multi-token prediction has an embedding, an output layer and a loss besides.
        pipeline_size: stages of the pipeline. Of several the first has the embedding and the last has the rest, and the
            launches are those of the one that has more.
    """
    return LAUNCHES * ((1.0 if pipeline_size == 1 else _OF_ONE_END) + model.mtp_num_layers)


def outside_ms(model: Model, gpu: Gpu, tokens: int) -> float:
    """GPU time of embedding, output layer and loss of a micro-batch, in milliseconds; 0 without a vocabulary.

    Args:
        model: the model.
        gpu: the GPU.
        tokens: tokens of the micro-batch on one context-parallel rank.
    """
    if model.vocab_size is None:
        return 0.0
    device = Device(gpu)
    entries = model.vocab_size // model.tensor_model_parallel_size
    hidden = model.hidden_size
    products = (
        device.product_us(tokens, entries, hidden)
        + device.product_us(tokens, hidden, entries)
        + device.product_us(entries, hidden, tokens, accumulates=model.gradient_accumulation_fusion)
    )
    heads = 1 + model.mtp_num_layers
    loss = device.memory_us(tokens * entries, 1 / _LOSS_US_AN_ELEMENT)
    embedding = device.memory_us(3 * tokens * hidden * 2e-6, 3.0) + device.memory_us(entries * hidden * 6e-6, 4.0)
    return (heads * (products + loss) + embedding) / 1000


def optimizer_ms(gpu: Gpu, parameters: float) -> float:
    """GPU time of a step of the optimizer over `parameters` of one rank, in milliseconds."""
    return parameters * _OPTIMIZER_MS_A_PARAMETER * 4.8 / gpu.memory_tbps
