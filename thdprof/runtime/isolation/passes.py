"""Passes of a module over one micro-batch, with the inputs and output gradients of some documents replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.runtime.isolation.compare import Watched, told_of_shapes
from thdprof.runtime.isolation.perturb import along, other_values, token_dim_of, token_mask
from thdprof.runtime.isolation.regions import Region

Run = Callable[[Sequence[torch.Tensor]], Any]
"""The type of a function that runs the module on tensors, and returns its output."""


class NotReplayed(Exception):
    """A micro-batch that was to be replayed ran eagerly; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One tensor argument, and the values that replace it where a region is perturbed."""

    values: torch.Tensor
    """The caller's values."""
    others: torch.Tensor | None
    """Other values; None where all documents share the tensor, or it holds one integer only."""
    dim: int
    """The dimension that runs over tokens; 0 where `others` is None."""

    def with_others(self, mask: torch.Tensor) -> torch.Tensor:
        """A new tensor: the other values at the tokens in `mask`, the caller's elsewhere."""
        if self.others is None:
            return self.values.detach().clone()
        return torch.where(along(mask, self.values, self.dim), self.others, self.values.detach())


def inputs_of(
    tensors: Sequence[torch.Tensor], n_tokens: int, *, token_dim: int, shared: Sequence[int], seed: int
) -> tuple[Input, ...]:
    """The tensor arguments with their other values.

    Args:
        tensors: the tensors; dimension `token_dim` of the first runs over tokens.
        n_tokens: tokens of the micro-batch.
        token_dim: see above; of the other tensors, it is preferred where several dimensions could be the tokens'.
        shared: positions of tensors that belong to no document.
        seed: seed of the other values.

    Raises:
        ValueError: no tensor can be perturbed.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for position, tensor in enumerate(tensors):
        dim = token_dim_of(tensor, n_tokens, token_dim)
        others = None if dim is None or position in shared else other_values(tensor, generator)
        found.append(Input(values=tensor, others=others, dim=0 if dim is None or others is None else dim))
    if all(one.others is None for one in found):
        raise ValueError(
            f"none of the {len(tensors)} tensors can be perturbed: they are shared, do not run over the {n_tokens} "
            "tokens, or hold one integer only; give tensors as in training"
        )
    return tuple(found)


@dataclass(kw_only=True)
class Passes:
    """Runs passes in one mode. All passes begin from the same random states, buffers and output gradients."""

    module: nn.Module
    """The module, in whose embeddings gradients of integer inputs are found."""
    run: Run
    """Runs the module in this mode."""
    put_back: Callable[[], None]
    """Puts random states and buffers back."""
    inputs: Sequence[Input]
    """The tensor arguments."""
    documents: Sequence[Region]
    """The documents; output gradients are zero at all other tokens, as a loss mask makes them."""
    n_tokens: int
    """Tokens of the micro-batch."""
    output_dim: int
    """The preferred dimension of outputs that runs over tokens."""
    gradients: bool
    """Whether to run backward passes."""
    as_given: bool
    """Whether inputs take a gradient only where the caller's do, as a graph was captured; else all that can do."""
    seed: int
    """Seed of the output gradients."""
    count: int = 0
    """Number of passes so far."""
    _output_grads: dict[int, Input] = field(default_factory=dict)

    def perturbed(self, regions: Sequence[Region]) -> list[Watched]:
        """The compared tensors of a pass in which inputs and output gradients of `regions` have other values.

        Raises:
            ValueError: no output runs over tokens, or one has another shape than in an earlier pass.
            TypeError: the module returns no tensor.
            NotReplayed: the pass was to be replayed, and ran eagerly.
        """
        self.count += 1
        self.put_back()
        tensors = self._inputs(regions)
        with torch.inference_mode(mode=False), torch.set_grad_enabled(self.gradients or self.as_given):
            # in training, inputs are made by other modules: a module may then change them in place
            given = [tensor.clone() if tensor.requires_grad else tensor for tensor in tensors]
            integers = {} if self.as_given or not self.gradients else self._integers(given)
            with embedded(self.module, integers) as embeddings:
                leaves = [leaf for leaf in tree_flatten(self.run(given))[0] if isinstance(leaf, torch.Tensor)]
            outputs = self._over_tokens(leaves)
            watched = [
                Watched(what="output", name=f"outputs[{position}]", values=leaves[position].detach(), dim=dim)
                for position, dim in outputs.items()
            ]
            if not self.gradients:
                return watched
            return watched + self._gradients(
                leaves, outputs, [*self._leaves_of_gradient(tensors), *embeddings], regions
            )

    def _inputs(self, regions: Sequence[Region]) -> list[torch.Tensor]:
        device = self.inputs[0].values.device
        mask = token_mask(regions, self.n_tokens, device)
        tensors = []
        with torch.inference_mode(mode=False), torch.no_grad():
            for one in self.inputs:
                tensor = one.with_others(mask.to(one.values.device))
                can = one.others is not None and (tensor.is_floating_point() or tensor.is_complex())
                tensors.append(tensor.requires_grad_(one.values.requires_grad if self.as_given else can))
        return tensors

    def _integers(self, tensors: Sequence[torch.Tensor]) -> dict[int, tuple[str, torch.Tensor, int]]:
        """The integer tensors over tokens by their addresses, each with its name and its dimension over tokens."""
        return {
            tensor.data_ptr(): (f"tensors[{position}] embedded, .grad", tensor, one.dim)
            for position, (tensor, one) in enumerate(zip(tensors, self.inputs, strict=True))
            if one.others is not None and not (tensor.is_floating_point() or tensor.is_complex())
        }

    def _over_tokens(self, leaves: Sequence[torch.Tensor]) -> dict[int, int]:
        """Position of every output that runs over tokens, and its dimension that does."""
        if not leaves:
            raise TypeError("the module returned no tensor: give call=, a function that returns its outputs as tensors")
        dims = {position: token_dim_of(leaf, self.n_tokens, self.output_dim) for position, leaf in enumerate(leaves)}
        found = {position: dim for position, dim in dims.items() if dim is not None}
        if not found:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise ValueError(
                f"no output has a dimension of the micro-batch's {self.n_tokens} tokens, but shape {shapes}: give "
                "call=, a function that returns values of every token, such as losses before they are averaged"
            )
        return found

    def _leaves_of_gradient(self, tensors: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor, int]]:
        return [
            (f"tensors[{position}].grad", tensor, one.dim)
            for position, (tensor, one) in enumerate(zip(tensors, self.inputs, strict=True))
            if tensor.requires_grad and one.others is not None
        ]

    def _gradients(
        self,
        leaves: Sequence[torch.Tensor],
        outputs: dict[int, int],
        sources: Sequence[tuple[str, torch.Tensor, int]],
        regions: Sequence[Region],
    ) -> list[Watched]:
        differentiable = {position: dim for position, dim in outputs.items() if leaves[position].requires_grad}
        if not differentiable or not sources:
            return []
        grads = [
            self._output_grad(position, leaves[position], dim).with_others(self._mask(regions, leaves[position]))
            for position, dim in differentiable.items()
        ]
        found = torch.autograd.grad(
            [leaves[p] for p in differentiable], [tensor for _, tensor, _ in sources], grads, allow_unused=True
        )
        return [
            Watched(
                what="gradient", name=name, values=tensor.new_zeros(tensor.shape) if grad is None else grad, dim=dim
            )
            for (name, tensor, dim), grad in zip(sources, found, strict=True)
        ]

    def _mask(self, regions: Sequence[Region], like: torch.Tensor) -> torch.Tensor:
        return token_mask(regions, self.n_tokens, like.device)

    def _output_grad(self, position: int, output: torch.Tensor, dim: int) -> Input:
        """The gradient of an output, the same in all passes, and its other values: both zero outside documents."""
        if position not in self._output_grads:
            generator = torch.Generator().manual_seed(self.seed + 1 + position)
            real = along(self._mask(self.documents, output), output, dim)
            drawn = [torch.randn(output.shape, generator=generator, dtype=torch.float32) for _ in range(2)]
            given, others = (d.to(output.device, output.dtype) * real for d in drawn)
            self._output_grads[position] = Input(values=given, others=others, dim=dim)
        made = self._output_grads[position]
        if made.values.shape != output.shape:
            raise ValueError(told_of_shapes(f"outputs[{position}]", made.values, output))
        return made


@contextmanager
def embedded(
    module: nn.Module, integers: Mapping[int, tuple[str, torch.Tensor, int]]
) -> Iterator[list[tuple[str, torch.Tensor, int]]]:
    """Find, while the block runs the module, what its embeddings make of integer inputs, which cannot have gradients.

    Args:
        module: the module.
        integers: integer inputs by their addresses, each with a name and its dimension over tokens.

    Yields:
        A list that fills in the block: for each integer input the name, the differentiable tensor that the first
        submodule made of it, with the input's dimensions before its own, and the dimension over tokens.
    """
    found: list[tuple[str, torch.Tensor, int]] = []

    def hook(owner: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not isinstance(output, torch.Tensor) or not output.requires_grad:
            return
        for value in (*args, *kwargs.values()):
            name, tensor, dim = integers.get(value.data_ptr() if isinstance(value, torch.Tensor) else 0, _NO_INPUT)
            leads = tensor.shape == value.shape == output.shape[: tensor.dim()] if name else False
            if leads and all(name != other for other, _, _ in found):
                found.append((name, output, dim))

    handles = [part.register_forward_hook(hook, with_kwargs=True) for part in module.modules()] if integers else []
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


_NO_INPUT = ("", torch.empty(0), 0)
