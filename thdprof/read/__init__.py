"""Readers of bytes, stores, and what is kept of reads; they know no upstream system."""
