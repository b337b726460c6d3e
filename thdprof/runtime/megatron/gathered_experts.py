"""Dropless experts that several ranks share, in fixed shapes, which a graph can hold.

Every rank gathers the tokens of all ranks of its expert-parallel group, multiplies the rows of its own experts
(`grouped_experts`), and gives each rank the sums for its tokens. How many rows a rank gets depends on the routing. A
graph has room for a fixed number of them. Every rank sees the whole routing, so that all of them notice where rows of
any rank have no room. Then nothing of the replay is used, and the micro-batch runs eagerly. An eager pass takes all
rows.

Rows behind the last expert's are not multiplied. Their memory may hold anything, so that no sum reads it.

Ranks with slices of every expert (expert-tensor parallelism) multiply all rows, of which there are always as many.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.utils import get_pg_size
from torch import distributed

from thdprof.runtime.megatron.grouped_experts import LocalDispatcher, Rows, move_hidden
from thdprof.runtime.replacing import attributes


class Room:
    """The rows that graphs have for the experts of a rank, and those that the forward replayed last would have needed.

    All layers of a rank share it: of their numbers the largest counts.
    """

    def __init__(self, factor: float, num_ranks: int, device: torch.device) -> None:
        """Room for `factor` times the even share of `num_ranks` ranks, which is a rank's tokens x top-k."""
        self._factor, self._is_warming_up, self._even = factor, False, 1
        self._noted = torch.zeros(num_ranks + 1, dtype=torch.int64, device=device)

    def rows(self, num_tokens: int, top_k: int) -> int:
        """The rows of a rank, of which each has `num_tokens` tokens."""
        return math.ceil(self._factor * num_tokens * top_k)

    @property
    def is_binding(self) -> bool:
        """Whether the pass that runs now becomes a graph, or warms up for one."""
        return self._is_warming_up or torch.cuda.is_current_stream_capturing()

    def binding(self) -> AbstractContextManager[None]:
        """A context whose passes warm up for a capture, and have the rows of its graph."""
        return attributes(self, _is_warming_up=True)

    def note(self, needed: torch.Tensor, rows: int, even: int) -> None:
        """Note, on the device, the rows that each rank `needed` in a layer where it has room for `rows`, and where
        `even` are the even share.
        """
        self._even = even
        found = torch.cat([needed, needed.max()[None] - rows])
        self._noted.copy_(torch.maximum(self._noted, found))

    def forget(self) -> None:
        """Forget all that was noted, before a forward is replayed."""
        self._noted.zero_()

    def read_load(self) -> tuple[float, bool]:
        """The most rows that a rank needed since `forget`, as a multiple of the even share, and whether all had room;
        it waits for the GPU.
        """
        *needed, excess = self._noted.tolist()
        return max(needed) / self._even, excess <= 0


class BoundedRows(Rows):
    """At most so many rows of one micro-batch, and one that is nobody's. A token has no row, or up to top-k."""

    def __init__(self, routed: torch.Tensor, number: int, top_k: int, *, reverse: bool) -> None:
        """The first `number` rows by `routed`, shape [tokens, experts of this rank], bool, with at most `top_k` true
        entries a token.
        """
        num_tokens, num_experts = routed.shape
        by_expert = routed.T.flip(0) if reverse else routed.T
        flat = by_expert.reshape(-1)
        self.reverse = reverse
        places = flat.argsort(descending=True, stable=True)[:number]
        self._nobodys = number = len(places)
        self.places = torch.nn.functional.pad(places, (0, 1))
        self.tokens = self.places % num_tokens
        self.ends = by_expert.sum(dim=1).cumsum(0).clamp(max=number).to(torch.int32)
        self.has_token = torch.arange(number + 1, device=routed.device) < self.ends[-1]
        """Whether each row is a token's, shape [rows], bool."""
        row = flat.cumsum(0, dtype=torch.int32) - 1
        self._row_of_place = torch.where(flat & (row < number), row, number)
        rows = self._row_of_place.view(num_experts, num_tokens).T.sort(dim=1).values
        self.token_rows = rows[:, : min(top_k, num_experts)].contiguous()

    def at_places(self, values: torch.Tensor) -> torch.Tensor:
        """For each place among experts x tokens the entry of `values`, of shape [rows]; 0 for one without a row."""
        found = values.index_select(0, self._row_of_place)
        return found.masked_fill_(self._row_of_place == len(values) - 1, 0)


class _SpreadProbabilities(torch.autograd.Function):
    """Probabilities of the rows, of those by place among experts x tokens; 0 for nobody's rows."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, rows: BoundedRows) -> torch.Tensor:
        ctx.rows = rows
        return probs.index_select(0, rows.places).masked_fill_(~rows.has_token, 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rows.at_places(grad), None


class _Exchange(torch.autograd.Function):
    """The tensors of all ranks, one behind the other (`gathers`), or this rank's part of their sum. A backward goes
    back.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, gathers: bool) -> torch.Tensor:
        ctx.group, ctx.gathers = group, gathers
        return _gather(tensor, group) if gathers else _add_up(tensor, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return _add_up(grad, ctx.group) if ctx.gathers else _gather(grad, ctx.group), None, None


def _gather(own: torch.Tensor, group: Any) -> torch.Tensor:
    everyones = own.new_empty(group.size() * own.shape[0], *own.shape[1:])
    distributed.all_gather_into_tensor(everyones, own.contiguous(), group=group)
    return everyones


def _add_up(partial: torch.Tensor, group: Any) -> torch.Tensor:
    """As a reduce-scatter does, with as many bytes, but always in the order of the ranks, and rounded once."""
    parts = torch.empty_like(partial, memory_format=torch.contiguous_format)
    distributed.all_to_all_single(parts, partial.contiguous(), group=group)
    return parts.view(group.size(), -1, *partial.shape[1:]).sum(dim=0)


class GatheringDispatcher(LocalDispatcher):
    """A token dispatcher of megatron-core's interface that gathers the tokens of all ranks that share the experts."""

    def __init__(self, layer: Any, room: Room) -> None:
        """Dispatches to the experts of `layer`, an MoELayer, which has `room` for them in graphs."""
        super().__init__(layer)
        self._room, self._group = room, layer.ep_group
        self._local = slice(layer.local_expert_indices[0], layer.local_expert_indices[-1] + 1)
        self._num_tokens = 0

    def dispatch_preprocess(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and probabilities of the rows of this rank's experts, from those of its own tokens."""
        room, group, self._shape = self._room, self._group, hidden.shape
        own = hidden.reshape(-1, hidden.shape[-1])
        routed_probs = torch.where(routing_map, probs, math.inf)  # which no probability is: one exchange for both
        self._num_tokens = len(own)
        if not room.is_binding:
            most = int(_gather(torch.tensor([len(own)], device=own.device), group).max())
            own = torch.nn.functional.pad(own, (0, 0, 0, most - len(own)))
            routed_probs = torch.nn.functional.pad(routed_probs, (0, 0, 0, most - len(routed_probs)), value=math.inf)
        rows = room.rows(len(own), self._top_k)
        everyones, all_probs = (_Exchange.apply(each, group, True) for each in (own, routed_probs))
        routed = all_probs.detach() != math.inf
        needed = routed.view(len(routed), group.size(), -1).sum(dim=(0, 2))
        if room.is_binding:
            room.note(needed, rows, len(own) * self._top_k)
        else:
            rows = max(rows, int(needed[group.rank()]))
        reverse = self._is_reversed()
        self._rows = bounded = BoundedRows(routed[:, self._local], rows, self._top_k, reverse=reverse)
        by_expert = all_probs[:, self._local].T
        places = (by_expert.flip(0) if reverse else by_expert).reshape(-1)
        return move_hidden(everyones, bounded, to_rows=True), _SpreadProbabilities.apply(places, bounded)

    def combine_postprocess(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of this rank's tokens, of the shape that they had, from those of the rows of all ranks."""
        rows, self._rows = self._rows, None
        sums: torch.Tensor = _Exchange.apply(move_hidden(hidden, rows, to_rows=False), self._group, False)
        return sums[: self._num_tokens].view(self._shape)


class SlicingDispatcher(LocalDispatcher):
    """A token dispatcher of megatron-core's interface whose ranks have a slice of every expert: expert-tensor
    parallelism. It gathers the tokens of the ranks that share the sequence, and adds up what their slices give.
    """

    def __init__(self, layer: Any) -> None:
        """Dispatches to the slices of the experts of `layer`, an MoELayer without expert parallelism."""
        super().__init__(layer)
        self._group, self._own_shape = layer.experts.tp_group, torch.Size()

    def dispatch_preprocess(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and probabilities of the rows of all ranks' tokens, from those of this rank's."""
        self._own_shape = hidden.shape
        routed_probs = torch.where(routing_map, probs, math.inf)
        own = hidden.reshape(-1, hidden.shape[-1])
        everyones, all_probs = (_Exchange.apply(each, self._group, True) for each in (own, routed_probs))
        return super().dispatch_preprocess(everyones, all_probs.detach() != math.inf, all_probs)

    def combine_postprocess(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of this rank's tokens, of the shape that they had, from what the slice gives for all rows."""
        sums: torch.Tensor = _Exchange.apply(super().combine_postprocess(hidden), self._group, False)
        return sums.view(self._own_shape)


def make_dispatcher(layer: Any, room: Room | None) -> LocalDispatcher:
    """The dispatcher of a layer with grouped experts, which has `room` for those that ranks share."""
    if room is not None:
        return GatheringDispatcher(layer, room)
    return SlicingDispatcher(layer) if get_pg_size(layer.experts.tp_group) > 1 else LocalDispatcher(layer)
