"""Quantized matrix products (FP8, FP4): the state that Transformer Engine keeps beside weights, and replays.

`weights` holds quantized weights at the addresses that graphs read, `scales` the states of delayed scaling, `updates`
the updates of those states that run around a replay, and `quantization` joins them for one decoder.
"""
