"""`verify_isolation`: perturbs each part of a packed micro-batch, and finds documents elsewhere that it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.graphs.module_state import unchanged
from thdprof.runtime.padding import Boundaries, PackedSequence, boundaries_of, to_device

Mode = Literal["eager", "padded", "replayed"]
CallModule = Callable[[Sequence[torch.Tensor], PackedSequence], Any]


class Leak(NamedTuple):
    """A document that moved although only something else was perturbed."""

    mode: Mode
    """The mode in which it moved."""
    name: str
    """The tensor that moved, such as `outputs[0]` or `tensors[0].grad`."""
    source: str
    """What was perturbed, such as `document 0`, `the padding after document 0` or `the tail`."""
    document: int
    """The document that moved, counted from 0."""
    token_in_document: int
    """Its first token that moved, counted from its first."""
    moved: float
    """Largest absolute difference at that token; infinite where the value is no number any more."""

    def __str__(self) -> str:
        place = f"{self.name} of document {self.document} at its token {self.token_in_document}"
        return f"{self.mode}: {self.source} moved {place} by {self.moved:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Whether documents stay apart in a module; true where they do in all modes that ran."""

    documents: int
    """Number of documents with tokens."""
    checks: Mapping[Mode, str]
    """The modes that ran, and what was compared; none ran after the one with the leak."""
    leak: Leak | None
    """The first leak of an output, else of a gradient; None where there is none."""
    unseen: tuple[int, ...]
    """Documents whose own outputs or gradients did not move when they were perturbed: nothing is shown of them."""

    def __bool__(self) -> bool:
        return self.leak is None and not self.unseen

    def __str__(self) -> str:
        """The verdict in one line, then a line for each mode."""
        verdict = f"{self.documents} documents stay apart"
        if self.leak or self.unseen:
            unseen = f"nothing is shown: document {min(self.unseen, default=0)} itself did not move when perturbed"
            verdict = f"documents do not stay apart: {self.leak}" if self.leak else unseen
        return "\n  ".join([verdict, *(f"{mode}: {text}" for mode, text in self.checks.items())])


def verify_isolation(
    module: nn.Module,
    packed: PackedSequence,
    *tensors: torch.Tensor,
    call: CallModule | None = None,
    modes: Sequence[Mode] | None = None,
    token_dim: int | None = None,
    tolerance: float = 0.0,
) -> Isolation:
    """Find out whether a document of a packed micro-batch moves another one in `module`.

    Documents, padding and the tail get other inputs, one at a time, and a document another output gradient. No output
    and no input gradient of any other document may then change, value for value, or by more than four times what they
    differ by if nothing is perturbed. N documents take N + 4 passes a mode. Everything is then as it was before.

    It cannot see what only a document's length moves, or only several documents together, nor what weights hide, such
    as an output projection of zeros. Batch statistics, experts' capacity, routers' losses and FP8 mix them on purpose.

    Args:
        module: any module. Of a Megatron decoder under an installation, call `Installation.verify_isolation`.
        packed: the documents, from `thdprof.runtime.pack`; at least two, or one and padding.
        tensors: the module's tensor arguments, before `packed`. Integers, such as tokens, are replaced by others among
            them, and have no gradient. Replays have gradients only of tensors that take one.
        call: runs the module on tensors and a PackedSequence, and returns its output; None: `module(*tensors, packed)`.
            It adds arguments that all documents share, and sets generators that the module draws from on its own.
        modes: "eager"; "padded", with 4 empty documents more; "replayed", by a graphed module's graphs. None: the first
            two, and replayed on a GPU.
        token_dim: dimension over tokens; None: that of the graphed module, else 0. A tensor or output of another size
            there has them in its first dimension of their number.
        tolerance: largest difference that counts as none, as a share of the tensor's largest absolute value.

    Raises:
        TypeError: an argument is of another type.
        ValueError: nothing can be compared, values are not finite, no graph can be replayed, or ranks share tokens.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: give a torch module; call= may run it in any way")
    if not isinstance(packed, PackedSequence) or packed.host is None:
        raise TypeError("packed has no boundaries on the host: make it with pack, or Megatron's with packed_seq_params")
    if not tensors or not all(isinstance(tensor, torch.Tensor) and tensor.dim() for tensor in tensors):
        raise TypeError("give the module's tensor arguments after packed, and other arguments by call=")
    graphed = [part for part in module.modules() if isinstance(part, DispatchedModule)]
    if packed.cp_size > 1 or any(one.options.token_shards > 1 for one in graphed):
        raise ValueError("ranks share the micro-batch: verify on one, without context or sequence parallelism")
    has_graphs = bool(graphed) and not any(one.why_no_rehearsal for one in graphed)
    chosen = modes or get_args(Mode)[: 3 if has_graphs and tensors[0].is_cuda else 2]
    if not {*chosen} <= {*get_args(Mode)[: 3 if has_graphs else 2]}:
        raise ValueError(f"modes {[*chosen]}: give eager, padded, or, for a module with graphs to replay, replayed")
    passes = _Passes(graphed, packed, tensors, token_dim)
    passes.call = call or (lambda given, metadata: module(*given, metadata))
    checks, unseen, leak = dict[Mode, str](), set[int](), None
    with ExitStack() as stack:
        generators = [generator for one in graphed for generator in one.generators()]
        changed = lambda: [tensor for one in graphed for tensor in one.changed_outside()]  # noqa: E731
        passes.put_back = stack.enter_context(unchanged(module, tensors[0].device, generators, changed))
        for one in graphed:
            stack.enter_context(one.rehearsal())
        for mode in chosen:
            if leak is None:
                checks[mode], leak, unmoved = passes.check(mode, tolerance)
                unseen |= unmoved
    return Isolation(documents=len(passes.documents), checks=checks, leak=leak, unseen=tuple(sorted(unseen)))


class _Passes:
    """Passes over a micro-batch. Region 2n is document n, 2n + 1 the padding after it, or at the end the tail."""

    call: CallModule
    put_back: Callable[[], None]

    def __init__(
        self, graphed: list[DispatchedModule], packed: PackedSequence, tensors: Sequence[torch.Tensor], dim: int | None
    ) -> None:
        self._graphed, self._tensors = graphed, tensors
        dim = dim if dim is not None else graphed[0].options.token_dim if graphed else 0
        if not -tensors[0].dim() <= dim < tensors[0].dim():
            raise ValueError(f"token_dim {dim}: the first tensor has shape {tuple(tensors[0].shape)}")
        self._dim, self._n_tokens, self._device = dim % tensors[0].dim(), tensors[0].shape[dim], tensors[0].device
        own = boundaries_of(packed, self._n_tokens, graphed[0].options.tail_policy if graphed else "none")
        valid, memory = np.asarray(own.valid), np.asarray(own.in_memory)
        padded = None if own.padded is None else np.append(memory, memory[[-1] * 4])
        more = Boundaries(valid=np.append(valid, valid[[-1] * 4]), padded=padded)
        metadata = packed if graphed else to_device(packed, own, self._n_tokens, self._device)
        longer = to_device(packed, more, self._n_tokens, torch.device("cpu") if graphed else self._device)
        self._metadata: dict[Mode, PackedSequence] = {"eager": metadata, "padded": longer, "replayed": metadata}
        lengths = np.diff(valid)
        sizes = [*np.stack([lengths, np.diff(memory) - lengths], 1).ravel(), 0, self._n_tokens - memory[-1]]
        self._regions = torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes)).to(self._device)
        self._real, self._tail = self._regions % 2 == 0, len(sizes) - 1
        self.documents = torch.unique(self._regions[self._real]).tolist()
        if not self.documents or len(torch.unique(self._regions)) < 2:
            raise ValueError("there is nothing to keep apart: give two documents or more, or one and padding")
        self._others = [None if self._find_dim(t) is None else _draw_others(t) for t in tensors]
        if all(others is None for others in self._others):
            raise ValueError(f"no tensor has different values over {self._n_tokens} tokens: give inputs as in training")

    def _find_dim(self, tensor: torch.Tensor) -> int | None:
        dims = [dim for dim, size in enumerate(tensor.shape) if size == self._n_tokens and tensor.numel()]
        return self._dim if self._dim in dims else next(iter(dims), None)

    def _by_token(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of `tensor` whose first dimension runs over tokens."""
        return tensor.movedim(self._find_dim(tensor) or 0, 0)

    def check(self, mode: Mode, tolerance: float) -> tuple[str, Leak | None, set[int]]:
        """What was compared in `mode`, the first leak, and the documents that did not move when they were perturbed."""
        base, spread = self._run(mode, None), 0.0
        limits = {name: tolerance * float(values[self._real].abs().max()) for name, values in base.items()}

        def perturb(region: int | None) -> dict[str, torch.Tensor]:  # the largest difference at each token
            sizes = {name: (values - base[name]).abs().amax(1) for name, values in self._run(mode, region).items()}
            return {name: torch.nan_to_num(values, nan=torch.inf, posinf=torch.inf) for name, values in sizes.items()}

        def find_leak(source: int, moved: Mapping[str, torch.Tensor]) -> Leak | None:
            for name, sizes in moved.items():
                tokens = torch.nonzero(self._real & (self._regions != source) & (sizes > limits[name]))
                if len(tokens):
                    token, hit = int(tokens[0]), int(self._regions[tokens[0]])
                    place = token - int(torch.nonzero(self._regions == hit)[0])
                    kind = "the padding after " if source % 2 else ""
                    what = "the tail" if source == self._tail else f"{kind}document {source // 2}"
                    return Leak(mode, name, what, hit // 2, place, float(sizes[token]))
            return None

        for _ in range(3):
            for name, sizes in perturb(None).items():
                differs = float(sizes[self._real].max())
                if differs == torch.inf:
                    raise ValueError(f"{name} is infinite or no number before anything is perturbed: give usual inputs")
                spread, limits[name] = max(spread, differs), max(limits[name], 4 * differs)
        leaks, unmoved, kinds = list[Leak](), set[int](), [name[:7] for name in base]  # outputs, tensors
        for region in torch.unique(self._regions).tolist():
            moved = perturb(region)
            if find_leak(region, moved):  # also in another pass? some modules seldom repeat themselves
                moved = perturb(region)
            leaks += filter(None, [find_leak(region, moved)])
            beyond = {name: (sizes > limits[name])[self._regions == region] for name, sizes in moved.items()}
            moving = {name[:7] for name, where in beyond.items() if bool(where.any())}
            unmoved |= {region // 2} if region in self.documents and moving != {*kinds} else set()
        text = f"outputs: {kinds.count('outputs')}, gradients: {kinds.count('tensors')}, "
        text += f"largest difference between unperturbed passes: {spread:.3g}"
        return text, min(leaks, key=lambda leak: leak.name[:7] != "outputs", default=None), unmoved

    def _run(self, mode: Mode, region: int | None) -> dict[str, torch.Tensor]:
        """Outputs and input gradients, shape [n_tokens, values], where `region` has other values."""
        replays, given, sources = mode == "replayed", list[torch.Tensor](), dict[str, torch.Tensor]()
        inside = self._regions == (-1 if region is None else region)
        self.put_back()
        with torch.inference_mode(mode=False), torch.enable_grad(), ExitStack() as stack:
            for number, (tensor, others) in enumerate(zip(self._tensors, self._others, strict=True)):
                own = tensor.detach().clone()
                if others is not None:
                    self._by_token(own)[inside] = self._by_token(others)[inside]
                own.requires_grad_(tensor.requires_grad if replays else others is not None and own.is_floating_point())
                if own.requires_grad and others is not None:
                    sources[f"tensors[{number}].grad"] = own
                given.append(own.clone() if own.requires_grad else own)  # a module may change inputs in place
            for one in self._graphed if not replays else ():
                stack.enter_context(one.only(None))
            counts = [one.stats().replays.total() for one in self._graphed]
            leaves = [
                leaf for leaf in tree_leaves(self.call(given, self._metadata[mode])) if isinstance(leaf, torch.Tensor)
            ]
            for one, count in zip(self._graphed, counts, strict=True):
                if replays and one.stats().replays.total() == count:
                    reasons = ", ".join(map(str, one.stats().fallbacks)) or "the graphed module is not called"
                    raise ValueError(f"the micro-batch cannot be replayed: {reasons}; leave replayed out of modes")
            found = {f"outputs[{n}]": leaf for n, leaf in enumerate(leaves) if self._find_dim(leaf) is not None}
            if not found:
                raise ValueError(f"no output runs over the {self._n_tokens} tokens: give call=, which returns one")
            heads = [leaf for leaf in found.values() if leaf.requires_grad]
            if heads and sources:
                generator, grads = torch.Generator(self._device).manual_seed(0), list[torch.Tensor]()
                for head in heads:
                    grads.append(torch.randn(head.shape, generator=generator, device=self._device).to(head.dtype))
                    self._by_token(grads[-1])[~self._real] = 0
                    self._by_token(grads[-1])[inside] *= -1
                made = torch.autograd.grad(heads, [*sources.values()], grads, allow_unused=True, materialize_grads=True)
                found.update(zip(sources, made, strict=True))
        flat = {name: self._by_token(tensor.detach())[..., None].flatten(1) for name, tensor in found.items()}
        return {name: values.to(torch.promote_types(values.dtype, torch.float32)) for name, values in flat.items()}


def _draw_others(tensor: torch.Tensor) -> torch.Tensor | None:
    """Other values of the tensor's mean and deviation, or of its own integers; None for integers that are all equal."""
    generator = torch.Generator().manual_seed(0)
    if tensor.is_floating_point():
        deviation, mean = torch.std_mean(tensor.detach().float(), correction=0)
        drawn = torch.randn(tensor.shape, generator=generator).to(tensor.device)
        return (mean + deviation * drawn if 0 < float(deviation) < torch.inf else drawn).to(tensor.dtype)
    present, places = torch.unique(tensor, return_inverse=True)
    shift = torch.randint(1, max(2, len(present)), tensor.shape, generator=generator).to(tensor.device)
    return present[(places + shift) % len(present)] if len(present) > 1 else None
