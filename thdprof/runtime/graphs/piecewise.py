"""Replays a pass in pieces inside autograd: work can be waited for, and can start, between the pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from thdprof.runtime import teardown
from thdprof.runtime.graphs.slots import Lease
from thdprof.runtime.padding import Boundaries


class ReplayPiece(torch.autograd.Function):
    """Replays one piece of a leased pass inside autograd. The pieces hang together by tokens, which hold no data.

    Parameters whose gradient goes to `main_grad`, and is complete after the piece's backward, are inputs of the piece.
    Its backward returns no gradient to them, because the replay has added it already. Autograd runs the hooks on their
    gradient accumulation right after that backward, before the one of the piece before: such nodes come first in its
    queue, on the same thread (checked in torch 2.11).
    """

    @staticmethod
    def forward(ctx: Any, lease: Lease, piece: int, before: torch.Tensor, *tensors: torch.Tensor) -> Any:
        """Replay the forward of `piece`; returns copies of the outputs after the last piece, else a token."""
        ctx.lease, ctx.piece, ctx.num_tensors = lease, piece, len(tensors)
        ctx.set_materialize_grads(False)
        captured = lease.captured
        with teardown.LAUNCH:
            captured.forward.each[piece].replay()
        if piece < len(captured.completed) - 1:
            return before.new_empty(0, dtype=torch.float32)
        outputs = lease.copied_outputs()
        ctx.mark_non_differentiable(*(o for o, d in zip(outputs, captured.differentiable, strict=True) if not d))
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Replay the backward of the piece; the one of piece 0 returns copies of the input gradients."""
        lease, piece = ctx.lease, ctx.piece
        captured = lease.captured
        if piece == len(captured.completed) - 1:
            lease.stage_output_grads(grads)
        inputs = lease.backward_piece(piece)
        if piece > 0:
            token = captured.outputs[0].new_empty(0, dtype=torch.float32)
            return (None, None, token, *[None] * ctx.num_tensors)
        return (None, None, None, *inputs, *[None] * (ctx.num_tensors - len(inputs)))


def replay_in_pieces(
    lease: Lease,
    boundaries: Boundaries,
    anchor: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    before_piece: Callable[[int], None],
) -> tuple[torch.Tensor, ...]:
    """Replay the forward of a pass in several pieces; returns copies of its outputs, which lead back to the pieces.

    Args:
        lease: the lease of a slot whose pass is in pieces.
        boundaries: the micro-batch's boundaries.
        anchor: a tensor of shape [] that takes a gradient, so that every piece has a backward.
        tensors: the micro-batch's tensors.
        before_piece: called with the number of each piece before its forward is queued.
    """
    lease.stage(tensors, boundaries)
    token, results = anchor, ()
    last = len(lease.captured.completed) - 1
    for piece in range(last + 1):
        before_piece(piece)
        inputs = tensors if piece == 0 else ()
        result = ReplayPiece.apply(lease, piece, token, *inputs, *lease.accumulated_in(piece))
        if piece < last:
            token = result
        else:
            results = result
    return results
