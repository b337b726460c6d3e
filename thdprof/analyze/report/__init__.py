"""Reporters: they lay out an Analysis and compute nothing."""
