"""The kinds of graphs of a Megatron decoder: chunks, Megatron's layers, Transformer Engine's layers."""
