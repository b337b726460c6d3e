"""Training by a plan inside other people's training loops: Megatron-LM's scripts and Megatron-Bridge's recipes."""
