"""Graphs of a CPU: they record every operation of a block, and replay it on the same tensors as a CUDA graph would."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from support.random_states import CountedGenerator, FakeDefault


class _Recorder(TorchDispatchMode):
    """Runs operations, and keeps each with its arguments and results."""

    def __init__(self, operations):
        super().__init__()
        self.operations = operations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class RecordedGraph:
    """Stands for torch.cuda.CUDAGraph."""

    made: ClassVar[list[RecordedGraph]] = []
    """Every graph since the fixture began."""

    def __init__(self):
        self.operations, self.replays, self.generators = [], 0, []
        self.increments = []
        self.made.append(self)

    def register_generator_state(self, generator):
        self.generators.append(generator)

    def capture(self):
        return _Recorder(self.operations)

    def replay(self):
        self.replays += 1
        for state, inside in self.increments:
            state.replay(inside)
        with torch.no_grad():
            for func, args, kwargs, result in self.operations:
                again = tree_leaves(func(*args, **kwargs))
                used = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if _is_tensor(t)}
                for new, static in zip(again, tree_leaves(result), strict=True):
                    if _is_tensor(static) and static.untyped_storage().data_ptr() not in used:
                        static.copy_(new)

    def reset(self):
        self.operations.clear()


def _is_tensor(value):
    return isinstance(value, torch.Tensor)


class _Capture:
    """Stands for torch.cuda.graph."""

    def __init__(self, graph, *, pool, stream, capture_error_mode):
        self._graph, self._recorder = graph, graph.capture()

    def __enter__(self):
        generators = [*self._graph.generators, torch.cuda.default_generators[0]]  # torch registers the last one itself
        states = [g.state() for g in generators if isinstance(g, CountedGenerator)]
        self._states = [s for i, s in enumerate(states) if not any(s is other for other in states[:i])]
        for state in self._states:
            state.record()
        CountedGenerator.recording = bool(self._states)
        self._recorder.__enter__()

    def __exit__(self, *error):
        self._recorder.__exit__(*error)
        CountedGenerator.recording = False
        self._graph.increments = [(state, state.recorded()) for state in self._states]


def put_in_place(monkeypatch):
    """Let captures and replays run on a CPU."""
    from support.unpinned_staging import UnpinnedStaging
    from thdprof.runtime.graphs import capture, slots

    RecordedGraph.made.clear()
    stream = SimpleNamespace(device=torch.device("cuda", 0), wait_stream=lambda other: None)
    event = SimpleNamespace(record=lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    for name, stand_in in {
        "CUDAGraph": RecordedGraph,
        "graph": _Capture,
        "graph_pool_handle": lambda: (0, 0),
        "synchronize": lambda *_: None,
        "default_generators": defaultdict(FakeDefault),
        "Stream": lambda *_: stream,
        "Event": lambda *_: event,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: stream,
        "set_stream": lambda _: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(capture, "pool_bytes", lambda *_: 0)
    monkeypatch.setattr(slots, "StagingBuffer", UnpinnedStaging)
