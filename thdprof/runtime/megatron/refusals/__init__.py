"""What of a Megatron configuration graphs cannot serve."""
