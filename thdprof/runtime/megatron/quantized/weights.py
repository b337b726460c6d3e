"""Quantized weights at the addresses that graphs read.

Where parameters are in bf16, Transformer Engine's modules quantize them at the first micro-batch of a step, and keep
the result for the others in tensors of their own, their workspaces. Where parameters are quantized themselves
(`fp8_param_gather`), there are no workspaces, but what a backward reads is made from them on first use.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


def inner_tensors(quantized: Any) -> dict[str, torch.Tensor]:
    """The tensors of which a quantized one consists, by the attribute that holds each: data, transposes, scales."""
    own = {id(value) for value in quantized.get_metadata().values() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in vars(quantized).items() if id(value) in own}


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is Transformer Engine's, made of inner tensors."""
    return hasattr(tensor, "update_usage") and hasattr(tensor, "get_usages")


class Workspaces:
    """The workspaces of all modules inside one module, which every graph and every eager micro-batch share."""

    def __init__(self, module: nn.Module) -> None:
        """The workspaces inside `module`; its forward makes them when it first runs."""
        tables = {part: getattr(part, "_fp8_workspaces", None) for part in module.modules()}
        self._tables = {part: table for part, table in tables.items() if isinstance(table, dict)}
        self._kept: list[tuple[dict[str, Any], str, Any, Mapping[str, torch.Tensor]]] = []

    def keep(self, parts: Container[nn.Module]) -> None:
        """Keep the workspaces that graphs captured now read, and those that earlier graphs read.

        Args:
            parts: the modules that run inside graphs; others renew their workspaces themselves.

        Raises:
            RuntimeError: a workspace is not the one that graphs captured before read.
        """
        if not all(self._in_place(*entry) for entry in self._kept):
            raise RuntimeError("a quantized weight was made anew while graphs were captured that read the old one")
        self._kept = [
            (table, name, workspace, inner_tensors(workspace))
            for part, table in self._tables.items()
            for name, workspace in table.items()
            if workspace is not None and part in parts
        ]

    def put_back(self) -> bool:
        """Put the kept workspaces back in the place of others; whether there were others, so that they are stale."""
        stale = False
        for table, name, workspace, parts in self._kept:
            if not self._in_place(table, name, workspace, parts):
                stale = True
                table[name] = workspace
                for attribute, tensor in parts.items():
                    setattr(workspace, attribute, tensor)
        return stale

    @staticmethod
    def _in_place(table: dict[str, Any], name: str, workspace: Any, parts: Mapping[str, torch.Tensor]) -> bool:
        own = vars(workspace)
        return table.get(name) is workspace and all(own.get(attribute) is part for attribute, part in parts.items())

    def forget(self) -> None:
        """Forget what graphs read: they are gone."""
        self._kept = []


class QuantizedParameters:
    """The parameters of a module that are quantized themselves."""

    def __init__(self, module: nn.Module) -> None:
        """The quantized ones among the parameters of `module`."""
        self._parameters: list[Any] = [p for p in module.parameters() if is_quantized(p)]
        self._kept: list[tuple[Any, Mapping[str, torch.Tensor]]] = []

    def complete(self) -> None:
        """Make of every parameter what a backward reads, too, where the last optimizer step has made it stale.

        It is made in place where it was there before.
        """
        for parameter in self._parameters:
            if not all(parameter.get_usages().values()):
                parameter.update_usage(rowwise_usage=True, columnwise_usage=True)

    def keep(self) -> None:
        """Remember the tensors that graphs captured now read."""
        self._kept = [(parameter, inner_tensors(parameter)) for parameter in self._parameters]

    def changed(self) -> str:
        """How the parameters differ in memory from those that graphs read; "" if they do not."""
        for parameter, parts in self._kept:
            own = vars(parameter)
            if any(own.get(name) is not tensor for name, tensor in parts.items()):
                return (
                    f"the data of a quantized parameter of shape {tuple(parameter.shape)} moved in memory after its "
                    "graphs were captured"
                )
        return ""

    def forget(self) -> None:
        """Forget what graphs read: they are gone."""
        self._kept = []


class FirstMicrobatch:
    """The marks by which modules know the first micro-batch of a step, at which they quantize their weights.

    Megatron's schedules set them, and a module's forward, which a replay does not run, clears its own.
    """

    def __init__(self, module: nn.Module) -> None:
        """The marks inside `module`."""
        self._marked: dict[Any, None] = {
            part: None for part in module.modules() if hasattr(part, "is_first_microbatch")
        }
        self.in_graphs: set[nn.Module] = set()
        """The modules inside `module` that have run in `noticed`, those without a mark among them."""
        self._inside = frozenset(module.modules())

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Note the modules that run inside the block: it is a graph that will stand for them."""

        def runs(part: nn.Module, _: Any) -> None:
            if part in self._inside:
                self.in_graphs.add(part)

        handle = register_module_forward_pre_hook(runs)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> bool:
        """Clear the marks of the modules inside graphs, as their forward does; whether any was set."""
        first = False
        for part in self._marked:
            if part in self.in_graphs and part.is_first_microbatch:
                first, part.is_first_microbatch = True, False
        return first

    @contextmanager
    def held(self, *, first: bool | None) -> Iterator[None]:
        """Let a pass inside the block be that of a first or a later micro-batch, and put the marks back at its end.

        Args:
            first: which of the two; None: the pass quantizes weights for itself alone, and keeps none of them.
        """
        marks = [part.is_first_microbatch for part in self._marked]
        for part in self._marked:
            part.is_first_microbatch = first
        try:
            yield
        finally:
            for part, mark in zip(self._marked, marks, strict=True):
                part.is_first_microbatch = mark
