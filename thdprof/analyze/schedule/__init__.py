"""Rows to micro-batches, in the order in which training forms them."""
