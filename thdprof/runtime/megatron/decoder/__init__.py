"""The input of a Megatron decoder under graphs: packed metadata, rotary positions, process groups, layouts."""
