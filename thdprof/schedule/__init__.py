"""Turns a dataset's rows into micro-batches, in the order in which training forms them."""
