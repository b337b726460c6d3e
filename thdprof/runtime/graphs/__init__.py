"""CUDA graphs of one module: capture, slots and leases, and the module that replays them."""
