"""Megatron-Bridge's performance recipes, read as text and judged by the table of limits. Nothing of Bridge is run."""

from __future__ import annotations
