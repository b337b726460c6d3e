"""Reads shards that were kept, and changes them, so that their use shows."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from numpy.typing import NDArray

from thdprof.read.dataset import Shard
from thdprof.read.engines import pack, unpack


def change_kept(database: Path, change: Callable[[NDArray], NDArray] = lambda lengths: lengths) -> list[int]:
    """Change the lengths of all shards; returns those that they had."""
    before: list[int] = []
    with closing(sqlite3.connect(database)) as opened, opened:
        for key, file, content in opened.execute("SELECT key, file, content FROM shards").fetchall():
            shard = unpack(content)
            before += shard.arrays[0].tolist()
            changed = pack(Shard((change(shard.arrays[0]), *shard.arrays[1:]), shard.facts))
            opened.execute("UPDATE shards SET content = ? WHERE key = ? AND file = ?", (changed, key, file))
    return before
