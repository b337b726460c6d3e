"""Readers of bytes that formats share: parquet, Arrow, pickle, NPY headers."""
