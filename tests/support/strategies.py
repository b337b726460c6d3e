"""Hypothesis strategies shared by the tests."""

from __future__ import annotations

from hypothesis import strategies as st

document_tokens = st.integers(min_value=1, max_value=60)
rows = st.lists(st.lists(document_tokens, min_size=1, max_size=9), min_size=1, max_size=25)
"""Packed rows: documents' tokens as training sees them."""
documents = st.lists(st.integers(min_value=0, max_value=90), min_size=1, max_size=120)
"""Documents before packing; some empty, some longer than `pack_sizes`."""
pack_sizes = st.integers(min_value=8, max_value=80)
seeds = st.integers(min_value=0, max_value=2**32 - 1)
caps = st.none() | st.integers(min_value=2, max_value=6)
