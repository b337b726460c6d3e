"""`verify_isolation`: proves by perturbation that the documents of a packed micro-batch do not move each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.graphs.module_state import unchanged
from thdprof.runtime.isolation.passes import (
    CallModule,
    MicroBatch,
    NotReplayed,
    Passes,
    Subject,
    Watched,
    mixes_on_purpose,
    perturb_inputs,
    plan_runs,
    token_mask,
    unequal_shapes,
)
from thdprof.runtime.isolation.result import Isolation, Leak, Mode, ModeCheck, Region
from thdprof.runtime.padding import Boundaries, PackedSequence
from thdprof.training import TailPolicy

SPREADS_ALLOWED = 4.0
"""Of a module that does not repeat itself, what moves by at most so many of its own spreads counts as unmoved: the
spread is known from few passes."""
_REPEATS = 4
"""Unperturbed passes, besides the first, before a leak is reported or a spread is believed. One is enough for a module
that repeats itself and has no leak.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a subject is verified: the arguments of `verify_isolation` of the same names."""

    modes: Sequence[Mode] | None = None
    bucket: Bucket | None = None
    tail_policy: TailPolicy | None = None
    token_dim: int | None = None
    output_token_dim: int | None = None
    shared: Sequence[int] = ()
    gradients: bool = True
    tolerance: float = 0.0
    seed: int = 0


def verify_isolation(
    module: nn.Module,
    packed: PackedSequence,
    *tensors: torch.Tensor,
    call: CallModule | None = None,
    modes: Sequence[Mode] | None = None,
    bucket: Bucket | None = None,
    tail_policy: TailPolicy | None = None,
    token_dim: int | None = None,
    output_token_dim: int | None = None,
    shared: Sequence[int] = (),
    gradients: bool = True,
    generators: Sequence[torch.Generator] = (),
    tolerance: float = 0.0,
    seed: int = 0,
) -> Isolation:
    """Prove that no document of a packed micro-batch moves another one in `module`.

    Every document in turn gets other inputs and another output gradient. No output and no input gradient of any other
    document may then change, value for value, because the kernels do the same work on the same numbers. A module whose
    unperturbed passes differ among themselves is compared within four times its own spread instead. Padding and a tail
    that belong to no document are perturbed, but not watched. All pairs of N documents are covered, by N passes, or by
    2 * log2(N) where that is less. More passes are made only to name a leak.

    The micro-batch runs eagerly; eagerly with its boundaries padded to a bucket (the end repeated, after the tail
    policy); and, for a graphed module on a GPU, replayed. Give tensors that take gradients as in training: only those
    have a gradient in a replay. A module that has captured nothing yet captures its graphs for the proof, and drops
    them at the end.

    Everything runs in the module's present mode, under the present autocast. Afterwards random states (Python's,
    NumPy's, torch's), buffers, parameters' gradients and counters are as before. Forward hooks run; hooks of parameters
    and of their gradients' accumulation do not. One more copy of the gradients is held meanwhile.

    It cannot see what depends on another document's length alone (positions that count on across documents), nor what
    the weights hide: an attention whose output projection is still zero moves nothing. Experts with a capacity,
    auxiliary losses of routers and batch statistics mix documents on purpose: `notes` of the result says what to change
    for a proof. Dropless experts may round otherwise when other documents are routed otherwise: give a small
    `tolerance`.

    Args:
        module: any module; a graphed one is also replayed. Of a Megatron decoder under an installation, call
            `Installation.verify_isolation`.
        packed: the documents, from `thdprof.runtime.pack`; at least two, or one and padding.
        tensors: the module's tensor arguments, before `packed`. Integers, such as tokens, are replaced by others among
            them; their gradients are taken where a submodule embeds them.
        call: runs the module on tensors and a PackedSequence, and returns its output; None: `module(*tensors, packed)`.
        modes: the modes that must run, of "eager", "padded" and "replayed", for a true result; None: all that can.
        bucket: the bucket to pad to; None: the one that the graphed module chooses, else one with 4 documents more.
        tail_policy: how tokens after the last boundary are treated; None: as the graphed module does, else "none".
        token_dim: dimension of the first tensor that runs over tokens; None: that of the graphed module, else 0.
        output_token_dim: dimension of outputs that runs over tokens, if it has their size; else the first that has.
            None: `token_dim`.
        shared: positions of `tensors` that belong to no document although they have a dimension of that size.
        gradients: whether to compare input gradients, too.
        generators: CUDA generators, besides the default one, that the module draws from; a graphed module knows its
            own.
        tolerance: largest difference that counts as none, as a share of the tensor's largest absolute value.
        seed: seed of the values that replace a document's, and of output gradients.

    Returns:
        An object that is true where the documents stay apart in all modes that ran. Else its `leak` names the first
        leak, or its text says why nothing is proved.

    Raises:
        TypeError: an argument is of another type; or the module returns no tensor.
        ValueError: there is nothing to compare: fewer than two documents, no output over tokens, no tensor that can be
            perturbed, values that are infinite or no numbers; or the micro-batch is spread over ranks, or does not fit
            `bucket`.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}: give a torch module; call= may run it in any way")
    dispatched = tuple(part for part in module.modules() if isinstance(part, DispatchedModule))
    subject = Subject(
        module=module,
        call=call or (lambda given, metadata: module(*given, metadata)),
        dispatched=dispatched,
        generators=(*generators, *(g for one in dispatched for g in one.generators())),
        extra_state=lambda: [tensor for one in dispatched for tensor in one.changed_outside()],
    )
    settings = Settings(
        modes=modes,
        bucket=bucket,
        tail_policy=tail_policy,
        token_dim=token_dim,
        output_token_dim=output_token_dim,
        shared=shared,
        gradients=gradients,
        tolerance=tolerance,
        seed=seed,
    )
    return verify(subject, packed, tensors, settings)


def verify(subject: Subject, packed: PackedSequence, tensors: Sequence[torch.Tensor], settings: Settings) -> Isolation:
    """`verify_isolation` of any subject; raises what that raises."""
    _check(subject, packed, tensors, settings)
    first = subject.dispatched[0] if subject.dispatched else None
    token_dim = settings.token_dim if settings.token_dim is not None else (first.token_dim if first else 0)
    if not -tensors[0].dim() <= token_dim < tensors[0].dim():
        raise ValueError(f"token_dim {token_dim}: the first tensor has shape {tuple(tensors[0].shape)}")
    policy = settings.tail_policy or (first.tail_policy if first else "none")
    batch = MicroBatch.describe(packed, tensors[0], token_dim, policy)
    regions = regions_of(batch.boundaries, batch.shape.n_tokens)
    documents = tuple(region for region in regions if region.kind == "document")
    if not documents or len(regions) < 2:
        raise ValueError(
            f"the micro-batch has {len(documents)} documents with tokens, and no padding: give at least two documents"
        )
    inputs = perturb_inputs(
        tensors, batch.shape.n_tokens, token_dim=token_dim, shared=settings.shared, seed=settings.seed
    )
    runs, skipped = plan_runs(subject, batch, settings.bucket, settings.modes or get_args(Mode), policy)
    checks: list[ModeCheck] = []
    leak: Leak | None = None
    with ExitStack() as stack:
        kept = unchanged(
            subject.module, tensors[0].device, subject.generators, subject.extra_state, subject.random_states
        )
        put_back = stack.enter_context(kept)
        for one in subject.dispatched:
            stack.enter_context(one.rehearsal())
        for way in runs:
            passes = Passes(
                module=subject.module,
                way=way,
                put_back=put_back,
                inputs=inputs,
                documents=documents,
                n_tokens=batch.shape.n_tokens,
                output_dim=token_dim if settings.output_token_dim is None else settings.output_token_dim,
                gradients=settings.gradients,
                seed=settings.seed,
            )
            try:
                check, leak = Search(passes, regions, settings.tolerance).check()
            except NotReplayed as error:
                skipped[way.mode] = str(error)
                continue
            checks.append(check)
            if leak is not None:
                break
    return Isolation(
        documents=len(documents),
        checks=tuple(checks),
        leak=leak,
        skipped=skipped,
        missing=tuple(mode for mode in settings.modes or () if mode in skipped),
        notes=mixes_on_purpose(subject.module),
    )


def _check(subject: Subject, packed: Any, tensors: Sequence[Any], settings: Settings) -> None:
    """Raise TypeError or ValueError for arguments that cannot be verified."""
    if not isinstance(packed, PackedSequence):
        raise TypeError(f"packed is a {type(packed).__name__}: give a PackedSequence, from thdprof.runtime.pack")
    if packed.host is None:
        raise TypeError("the PackedSequence was not made by thdprof.runtime.pack: its boundaries are not on the host")
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        names = ", ".join(type(tensor).__name__ for tensor in tensors) or "none"
        raise TypeError(f"the tensors are {names}: give the module's tensor arguments, and other arguments by call=")
    if tensors[0].dim() == 0:
        raise ValueError("the first tensor has no dimension: one of its dimensions must run over tokens")
    if packed.cp_size > 1 or any(one.token_shards > 1 for one in subject.dispatched):
        raise ValueError(
            f"the micro-batch is shared out among ranks (cp_size {packed.cp_size}): verify the model on one rank, "
            "without context or sequence parallelism"
        )
    unknown = [mode for mode in settings.modes or () if mode not in get_args(Mode)]
    if unknown or (settings.modes is not None and not settings.modes):
        raise ValueError(f"modes {list(settings.modes or ())}: give some of {', '.join(get_args(Mode))}, or None")
    wrong = [position for position in settings.shared if not 0 <= position < len(tensors)]
    if wrong:
        raise ValueError(f"shared {list(settings.shared)}: there are {len(tensors)} tensors, counted from 0")
    if settings.tolerance < 0:
        raise ValueError(f"tolerance {settings.tolerance}: must not be negative")


def regions_of(boundaries: Boundaries, n_tokens: int) -> tuple[Region, ...]:
    """The regions of a micro-batch in the order of their tokens, those without a token left out."""
    valid, memory = np.asarray(boundaries.valid), np.asarray(boundaries.in_memory)
    found = []
    for number, (begin, end, length) in enumerate(zip(memory[:-1], memory[1:], np.diff(valid), strict=True)):
        middle = int(begin + length)
        found.append(Region(kind="document", number=number, begin=int(begin), end=middle))
        found.append(Region(kind="padding", number=number, begin=middle, end=int(end)))
    found.append(Region(kind="tail", number=len(valid) - 1, begin=int(memory[-1]), end=n_tokens))
    return tuple(region for region in found if region.begin < region.end)


def rounds(regions: Sequence[Region]) -> tuple[tuple[Region, ...], ...]:
    """Sets of regions to perturb at once, so that every ordered pair of regions is once apart: the one perturbed, the
    other not.

    Few regions are perturbed one by one. Of many, each round takes those whose position has a certain binary digit at a
    certain place: two positions differ in a digit, so that 2 * log2 of their number rounds are enough for all pairs.
    """
    digits = (len(regions) - 1).bit_length()
    if len(regions) <= 2 * digits:
        return tuple((region,) for region in regions)
    return tuple(
        tuple(region for position, region in enumerate(regions) if position >> place & 1 == digit)
        for place in range(digits)
        for digit in (0, 1)
    )


def moved_by_token(one: Watched, other: Watched) -> torch.Tensor:
    """Largest absolute difference at each token: shape [n_tokens]; infinite where one is no number and the other is.
    ValueError: the tensors have different shapes.
    """
    a, b = one.values, other.values
    if a.shape != b.shape or one.name != other.name:
        raise ValueError(unequal_shapes(one.name, a, b))
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    kind = torch.float32 if a.dtype in (torch.float32, torch.float16, torch.bfloat16) else torch.float64
    by_value = (a.to(kind) - b.to(kind)).abs().movedim(one.dim, 0)[..., None].flatten(1)
    if by_value.shape[1] == 0:
        return by_value.new_zeros(by_value.shape[0])
    return torch.nan_to_num(by_value, nan=torch.inf, posinf=torch.inf).amax(1)


class Search:
    """Looks for the first leak in one mode: unperturbed passes, what moves beyond them, and what moved it."""

    def __init__(self, passes: Passes, regions: Sequence[Region], tolerance: float) -> None:
        """Run the first unperturbed pass; ValueError where a value is infinite or no number, so that no movement shows.

        The `regions` are perturbed, and the documents among them watched. `tolerance` is the largest difference that
        counts as none, as a share of a tensor's largest absolute value.
        """
        self._passes, self._regions = passes, regions
        self._tensors = passes.run_perturbed(())
        self._spreads = [0.0 for _ in self._tensors]
        self._allowed = []
        for tensor in self._tensors:
            mask = self._mask(passes.documents, tensor.values)
            sizes = moved_by_token(tensor, tensor._replace(values=torch.zeros_like(tensor.values)))
            if not bool(torch.isfinite(sizes[mask]).all()):
                token = int(torch.nonzero(mask & ~torch.isfinite(sizes))[0])
                raise ValueError(
                    f"{tensor.name} is infinite or not a number at token {token}, before anything was perturbed: what "
                    "moves could not be seen; give inputs and weights as in training"
                )
            self._allowed.append(tolerance * float(sizes[mask].max()))

    def check(self) -> tuple[ModeCheck, Leak | None]:
        """What was compared in the mode, and the first leak in it."""
        self._repeat(1)
        if not self._is_deterministic():
            self._repeat(_REPEATS - 1)
        leak: Leak | None = None
        unseen = set[int]()
        for together in rounds(self._regions):
            moved, unmoved = self._perturb(together)
            if moved is not None and self._is_deterministic():  # is it the module itself that does not repeat?
                self._repeat(_REPEATS - 1)
                if not self._is_deterministic():
                    moved, unmoved = self._perturb(together)
            unseen |= unmoved
            if moved is not None and (leak is None or moved.what == "output"):
                leak = moved
                if moved.what == "output":  # rather than its mirror image among gradients
                    break
        named = None if leak is None else self._halve(leak)
        kinds = [tensor.what for tensor in self._tensors]
        check = ModeCheck(
            mode=self._passes.way.mode,
            bucket=self._passes.way.bucket,
            outputs=kinds.count("output"),
            gradients=kinds.count("gradient"),
            deterministic=self._is_deterministic(),
            spread=max(self._spreads),
            passes=self._passes.count,
            unseen=tuple(sorted(unseen)),
        )
        return check, named

    def _is_deterministic(self) -> bool:
        """Whether all unperturbed passes so far were equal over the documents' tokens."""
        return not any(self._spreads)

    def _mask(self, regions: Sequence[Region], like: torch.Tensor) -> torch.Tensor:
        return token_mask(regions, self._passes.n_tokens, like.device)

    def _run(self, together: Sequence[Region]) -> list[torch.Tensor]:
        """Largest difference at each token, for each tensor, of a pass in which `together` is perturbed."""
        now = self._passes.run_perturbed(together)
        return [moved_by_token(tensor, other) for tensor, other in zip(self._tensors, now, strict=True)]

    def _repeat(self, times: int) -> None:
        """Widen the spreads by further unperturbed passes."""
        for _ in range(times):
            for position, moved in enumerate(self._run(())):
                spread = float(moved[self._mask(self._passes.documents, moved)].max())
                self._spreads[position] = max(self._spreads[position], spread)

    def _limit(self, position: int) -> float:
        """Largest difference of the tensor at `position` that counts as unmoved."""
        return max(SPREADS_ALLOWED * self._spreads[position], self._allowed[position])

    def _perturb(self, together: Sequence[Region]) -> tuple[Leak | None, set[int]]:
        """The first movement outside `together` when that is perturbed, and the documents inside that did not move."""
        moved = self._run(together)
        watch = [document for document in self._passes.documents if document not in together]
        return self._find_leak(moved, together, watch), self._find_unmoved(moved, together)

    def _find_leak(
        self, by_tensor: Sequence[torch.Tensor], sources: Sequence[Region], watch: Sequence[Region]
    ) -> Leak | None:
        """The first movement of a document in `watch`: outputs before gradients, then by token; None without one."""
        for position, (tensor, moved) in enumerate(zip(self._tensors, by_tensor, strict=True)):
            beyond = self._mask(watch, moved) & (moved > self._limit(position))
            if not bool(beyond.any()):
                continue
            token = int(torch.nonzero(beyond)[0])
            region = next(r for r in watch if r.begin <= token < r.end)
            return Leak(
                mode=self._passes.way.mode,
                what=tensor.what,
                name=tensor.name,
                sources=tuple(sources),
                document=region.number,
                token=token,
                token_in_document=token - region.begin,
                tokens_moved=int(beyond[region.begin : region.end].sum()),
                moved=float(moved[token]),
                limit=self._limit(position),
            )
        return None

    def _find_unmoved(self, by_tensor: Sequence[torch.Tensor], perturbed: Sequence[Region]) -> set[int]:
        """Documents in `perturbed` of which no output moved, or no gradient although gradients are compared."""
        documents = [region for region in perturbed if region.kind == "document"]
        moving: dict[str, set[int]] = {tensor.what: set() for tensor in self._tensors}
        for position, (tensor, moved) in enumerate(zip(self._tensors, by_tensor, strict=True)):
            beyond = (moved > self._limit(position)).cpu()
            moving[tensor.what] |= {r.number for r in documents if bool(beyond[r.begin : r.end].any())}
        return {r.number for r in documents if not all(r.number in numbers for numbers in moving.values())}

    def _halve(self, leak: Leak) -> Leak:
        """The leak of the fewest sources that still move its document, by halving."""
        victims = [document for document in self._passes.documents if document.number == leak.document]
        smaller: Leak | None = leak
        while smaller is not None:
            leak, middle = smaller, len(smaller.sources) // 2
            halves = (leak.sources[:middle], leak.sources[middle:]) if middle else ()
            found = (self._find_leak(self._run(half), half, victims) for half in halves)
            smaller = next(filter(None, found), None)
        return self._perturb(leak.sources)[0] or leak
