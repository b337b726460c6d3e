"""Fixtures of the tests of models of transformers and of TRL's trainer."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _few_threads():
    """Small models: more threads only cost time where tests run side by side."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
