"""What a Megatron decoder is given: packed metadata, positions, groups, layouts."""
