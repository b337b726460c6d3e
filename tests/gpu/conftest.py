"""Fixtures of the tests that need a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def plans(tmp_path_factory):
    """Gives the file of a plan of short micro-batches, for which Transformer Engine has deterministic kernels."""
    from support.gpu_plans import Plans

    return Plans(tmp_path_factory.mktemp("plans"))
