"""Captured graphs of any torch module: the module that replays them, their bank, and capturing."""
