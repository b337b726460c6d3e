"""WatchedModule: a dispatched module whose watch counts its micro-batches as those of all other ranks do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from thdprof.dispatch import Bucket, FallbackReason, Shape
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.graphs.surroundings import Surroundings
from thdprof.runtime.graphs.watch.watch import Agreement, Watch

logger = logging.getLogger(__name__)


class WatchedModule(DispatchedModule):
    """A dispatched module of which some replayed micro-batches are verified; subclasses verify them."""

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[Bucket],
        *,
        surroundings: Surroundings | None = None,
        verify_every: int = 0,
        name: str = "",
        **options: Any,
    ) -> None:
        """A module that will be captured for `buckets`; the arguments are those of `GraphedModule`."""
        super().__init__(module, buckets, **options)
        self._surroundings = surroundings or Surroundings()
        self._watch = self._watch_of(verify_every, name)

    def _watch_of(self, verify_every: int, name: str) -> Watch | None:
        around = self._surroundings
        # a rank that communicates with none can refuse a bucket at once
        agreement = Agreement(communicates=around.communicates, agreed=around.agreed if around.communicates else None)
        if not verify_every or not self._buckets:
            return None
        if not agreement.is_possible:
            logger.warning(
                "no micro-batch is verified (graphs.verify): ranks communicate inside the module, and have no way to "
                "agree on which ones"
            )
            return None
        return Watch(
            verify_every,
            agreement=agreement,
            deterministic=around.deterministic,
            reducing=self._is_reducing,
            stats=lambda: self._stats,
            name=name,
        )

    def _is_reducing(self) -> bool:
        """Whether gradients that a backward adds to may be reduced while they are verified."""
        return False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run one micro-batch, replayed or eagerly; returns the module's own output.

        Raises:
            TypeError, ValueError, FallbackError: as `DispatchedModule.forward`.
            RuntimeError: the eager run of a verified micro-batch failed while other ranks communicated with it.
        """
        if self._watch is not None and not self._opening_ahead:
            self._watch.next_microbatch()
        return super().forward(*args, **kwargs)

    def unpacked(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `DispatchedModule.unpacked`. The watch counts the micro-batch, as it does on ranks to which it came with
        metadata: all of them must choose the same micro-batches.
        """
        if self._watch is not None:
            self._watch.next_microbatch()
        return super().unpacked(function, *args, **kwargs)

    def _run_alike_without_boundaries(self) -> None:
        super()._run_alike_without_boundaries()
        if self._watch is not None:
            self._watch.verifies(replays=False)  # after the agreement, as `_note_fallback` does on other ranks

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """As `DispatchedModule.rehearsal`; the micro-batches are not verified."""
        watch, self._watch = self._watch, None
        try:
            with super().rehearsal():
                yield
        finally:
            self._watch = watch

    def _note_fallback(self, reason: FallbackReason, shape: Shape) -> None:
        if self._watch is not None:
            self._watch.verifies(replays=False)  # ranks that replay it must know, before this one runs it
        super()._note_fallback(reason, shape)

    def recapture(self) -> None:
        """Drop all graphs; the next micro-batch captures anew. Needed after parameters moved in memory."""
        if self._watch is not None:
            self._watch.graphs_dropped()
        super().recapture()
