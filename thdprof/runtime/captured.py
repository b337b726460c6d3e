"""What is told of a capture, and the default of those who hear whether it succeeded everywhere."""

from __future__ import annotations

from dataclasses import dataclass

from thdprof.dispatch import Bucket


def alone(succeeded: bool) -> bool:
    """Whether a capture succeeded on every rank, for a rank that shares its collectives with no other."""
    return succeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What is told of one capture that succeeded."""

    bucket: Bucket
    """The shape that was captured."""
    seconds: float
    """Seconds that warm-up and capture took."""
    pool_bytes: int
    """Bytes by which the slot's memory pool grew."""

    def __str__(self) -> str:
        """For example `64 documents of 4096 tokens in 1.2 s, 345.0 MiB`."""
        bucket = self.bucket
        shared = f" on {bucket.cp_size} ranks" if bucket.cp_size > 1 else ""
        shape = f"{bucket.max_seqs} documents of {bucket.max_seqlen} tokens{shared}"
        return f"{shape} in {self.seconds:.1f} s, {self.pool_bytes / 2**20:,.1f} MiB"
