"""Tensors whose values the host knows, wherever they lie, so that nobody needs to wait for a GPU to read them."""

from __future__ import annotations

from typing import Any, cast

import torch


class HostKnown(torch.Tensor):
    """A tensor, on any device, that carries its values on the host along.

    Reading a value (`item`, `tolist`, one entry by its number) never waits for a GPU. `cuda` and `squeeze` keep the
    values; every other operation gives an ordinary tensor, of which nobody claims to know the values.
    """

    plain: torch.Tensor
    """The same tensor without what the host knows."""
    _on_host: torch.Tensor
    _changes: int | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation gives what it gives of ordinary tensors."""
        del types
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def cuda(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As of every tensor; the values go along."""
        return self._after("cuda", None, *args, **kwargs)

    def squeeze(self, *dims: Any) -> torch.Tensor:
        """As of every tensor; the values go along."""
        return self._after("squeeze", "squeeze", *dims)

    def item(self) -> Any:
        """The only value, from the host if it is known there."""
        values = host_of(self)
        return (self.plain if values is None else values).item()

    def tolist(self) -> Any:
        """The values, from the host if they are known there."""
        values = host_of(self)
        return (self.plain if values is None else values).tolist()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """One entry of a vector lies on the host if it is known there; any other part lies where the tensor does."""
        values = host_of(self) if isinstance(index, int) and self.plain.dim() == 1 else None
        return (self.plain if values is None else values)[index]

    def _after(self, operation: str, on_host: str | None, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = getattr(self.plain, operation)(*args, **kwargs)
        values = host_of(self)
        if values is None:
            return cast(torch.Tensor, result)
        return known(result, values if on_host is None else getattr(values, on_host)(*args, **kwargs))


def known(tensor: torch.Tensor, on_host: torch.Tensor) -> HostKnown:
    """`tensor`, of which the host knows the values.

    Args:
        tensor: an ordinary tensor on any device; the result shares its memory.
        on_host: the same values on the host, same shape; nobody may change them from now on.
    """
    result = tensor.as_subclass(HostKnown)
    result.plain, result._on_host, result._changes = tensor, on_host, _changes_of(tensor)
    return result


def host_of(tensor: Any) -> torch.Tensor | None:
    """The values of `tensor` on the host; None if they are not known there, or `tensor` was changed in place."""
    if isinstance(tensor, HostKnown) and _changes_of(tensor.plain) == tensor._changes:
        return tensor._on_host
    return None


def plain(value: Any) -> Any:
    """`value` without what the host knows of it; anything but such a tensor as it is."""
    return value.plain if isinstance(value, HostKnown) else value


def _changes_of(tensor: torch.Tensor) -> int | None:
    """How often `tensor` was changed in place; None of one made in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version
