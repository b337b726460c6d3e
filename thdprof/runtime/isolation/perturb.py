"""Other values for some tokens of a tensor: the same for every pass with the same seed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from thdprof.runtime.isolation.regions import Region


def other_values(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Values of the shape and dtype of `tensor`, none of which should equal the tensor's own at its place.

    Floating-point values are drawn with the mean and standard deviation of the tensor. Integers and booleans are drawn
    from the values in the tensor, so that tokens stay in their vocabulary and positions in their table.

    Returns:
        None for integers that are all equal.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        kind = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        values = tensor.detach().real.to(kind) if tensor.is_complex() else tensor.detach().to(kind)
        drawn = torch.randn(tensor.shape, generator=generator, dtype=kind).to(tensor.device)
        std, mean = values.std(correction=0), values.mean()
        usable = bool(torch.isfinite(std)) and bool(std > 0)
        return ((mean + std * drawn) if usable else drawn + 1).to(tensor.dtype)
    given = tensor.to(torch.int64)
    present: torch.Tensor = torch.unique(given)
    if present.numel() < 2:
        return None
    shift = torch.randint(1, present.numel(), tensor.shape, generator=generator).to(tensor.device)
    return present[(torch.searchsorted(present, given) + shift) % present.numel()].to(tensor.dtype)


def token_mask(regions: Iterable[Region], n_tokens: int, device: torch.device) -> torch.Tensor:
    """Which tokens lie in one of `regions`: bool, shape [n_tokens]."""
    mask = torch.zeros(n_tokens, dtype=torch.bool)
    for region in regions:
        mask[region.begin : region.end] = True
    return mask.to(device)


def along(mask: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """`mask`, shape [n_tokens], as a view that broadcasts over `tensor`, whose dimension `dim` is the tokens."""
    shape = [1] * tensor.dim()
    shape[dim] = len(mask)
    return mask.view(shape)


def token_dim_of(tensor: torch.Tensor, n_tokens: int, preferred: int) -> int | None:
    """The dimension of `tensor` that runs over tokens: `preferred` if it has their number, else the first that has.

    Returns:
        None where no dimension has their number.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size == n_tokens]
    if preferred < 0:
        preferred += tensor.dim()
    return preferred if preferred in dims else next(iter(dims), None)
