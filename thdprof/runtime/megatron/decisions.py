"""Checks that all ranks of a model-parallel group decide alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from thdprof.dispatch import Bucket, FallbackReason

if TYPE_CHECKING:
    from thdprof.runtime.megatron.peers import Peers

_MODULUS = (1 << 61) - 1
_REASONS = tuple(FallbackReason)


class Decisions:
    """A running digest of every model chunk's decisions, in order; one all-reduce compares it between ranks."""

    def __init__(
        self, num_chunks: int, *, enabled: bool, across_context: bool = True, peers: Peers | None = None
    ) -> None:
        """No decisions yet.

        Args:
            num_chunks: model chunks of this rank.
            enabled: whether `check` compares the ranks.
            across_context: whether context-parallel ranks must decide alike, too.
            peers: ranks with other micro-batches that must decide alike, too; None: there are none.
        """
        self.digests = [0] * num_chunks
        """One digest for each chunk; equal on ranks that decided alike."""
        self._enabled, self._across_context, self._peers = enabled, across_context, peers

    def recorder(self, chunk: int) -> Callable[[Bucket | FallbackReason], None]:
        """The callback that records each decision of `chunk`."""

        def record(choice: Bucket | FallbackReason) -> None:
            self.digests[chunk] = (self.digests[chunk] * 1_000_003 + _code(choice)) % _MODULUS

        return record

    def check(self) -> None:
        """Compare the digest with those of the tensor-, context- and pipeline-parallel group's other ranks, if enabled.

        Ranks with other micro-batches that share captured collectives are compared, too, with all their chunks.

        Without `across_context`, the context-parallel group is left out: under dynamic context parallelism its ranks
        run micro-batches of different context-parallel sizes.

        Raises:
            RuntimeError: another rank took other decisions.
        """
        if not self._enabled:
            return
        self._check_peers()
        import torch
        from megatron.core import parallel_state

        group = parallel_state.get_model_parallel_group()
        context = parallel_state.get_context_parallel_group()
        # one chunk stands for all, which see the same micro-batches; max(d) == -max(-d) only if all digests d are equal
        here = torch.tensor([self.digests[0], -self.digests[0]], device="cuda")
        for ranks in (group, context) if self._across_context and context.size() > 1 else (group,):
            torch.distributed.all_reduce(here, op=torch.distributed.ReduceOp.MAX, group=ranks)
        most, least = here.tolist()
        if most != -least:
            raise RuntimeError(
                "ranks of one model-parallel group decided differently about the same micro-batches: give all of them "
                "the same boundaries and max_seqlen"
            )

    def _check_peers(self) -> None:
        """Compare the digests of all chunks with those of the ranks that share captured collectives.

        Raises:
            RuntimeError: another rank took other decisions.
        """
        if self._peers is None:
            return
        both = self._peers.largest([*self.digests, *(-digest for digest in self.digests)])
        most, least = both[: len(self.digests)], both[len(self.digests) :]
        if any(one != -other for one, other in zip(most, least, strict=True)):
            raise RuntimeError(
                f"ranks {', '.join(map(str, self._peers.ranks))} share captured collectives and decided differently: "
                "run all of their micro-batches through the installed decoders, as many on each rank"
            )


def _code(choice: Bucket | FallbackReason) -> int:
    if isinstance(choice, FallbackReason):
        return 1 + _REASONS.index(choice)
    return hash((choice.max_seqs, choice.max_seqlen, choice.n_tokens, choice.cp_size)) % _MODULUS
