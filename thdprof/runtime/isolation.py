"""`verify_isolation`: proves by perturbation that the documents of a packed micro-batch do not move each other.

A pass runs the module over one micro-batch in one mode, with the values of some documents replaced. All passes begin
from the same random states, buffers and output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from thdprof.dispatch import Bucket, Dispatcher, advice
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.graphs.module_state import unchanged
from thdprof.runtime.options import GraphOptions
from thdprof.runtime.padding import Boundaries, PackedSequence, boundaries_of, pad_cu_seqlens, shape_of, to_device
from thdprof.words import write_count

Mode = Literal["eager", "padded", "replayed"]
"""How a micro-batch ran: eagerly; eagerly with its boundaries padded to a bucket; or through captured graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Neighbouring tokens of a micro-batch that belong to one document, or to none."""

    kind: Literal["document", "padding", "tail"]
    """Whether these are a document's tokens, the padding after a document, or the tail after the last one."""
    number: int
    """The document, counted from 0; of padding, the document that it follows; of a tail, the number of documents."""
    begin: int
    """The first token, counted from the micro-batch's first."""
    end: int
    """One more than the last token."""

    def __str__(self) -> str:
        names = {"document": f"document {self.number}", "padding": f"the padding after document {self.number}"}
        return names.get(self.kind, "the tail after the last document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """One document that moved although only others were perturbed."""

    mode: Mode
    """The mode in which it moved."""
    what: Literal["output", "gradient"]
    """Whether an output moved, or an input's gradient."""
    name: str
    """The tensor that moved, such as `outputs[0]` or `tensors[0].grad`."""
    sources: tuple[Region, ...]
    """What was perturbed: a document, padding, the tail; several where none of them alone moves the document."""
    document: int
    """The document that moved, counted from 0."""
    token: int
    """The first token that moved, counted from the micro-batch's first."""
    token_in_document: int
    """The same token, counted from its document's first."""
    tokens_moved: int
    """Number of tokens of that document that moved."""
    moved: float
    """Largest absolute difference at the first token that moved; infinite where the value is no number any more."""
    limit: float
    """Largest absolute difference that would have counted as none; 0 where values must be equal."""

    def __str__(self) -> str:
        names = ", ".join(map(str, self.sources[:4])) + (", ..." if len(self.sources) > 4 else "")
        together = " together" if len(self.sources) > 1 else ""
        allowed = f", more than {self.limit:.3g}" if self.limit else ""
        return (
            f"{self.mode}: {names}{together} moved {self.name} of document {self.document} at its token "
            f"{self.token_in_document} (token {self.token} of the micro-batch) by {self.moved:.3g}{allowed}; "
            f"{self.tokens_moved} of the document's tokens moved"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCheck:
    """What was compared in one mode."""

    mode: Mode
    """How the micro-batch ran."""
    bucket: Bucket | None
    """The bucket to which boundaries were padded; None for `eager`."""
    outputs: int
    """Number of output tensors that were compared: those that run over tokens."""
    gradients: int
    """Number of input gradients that were compared; 0 where no input takes a gradient."""
    deterministic: bool
    """Whether unperturbed passes repeated each other value for value, so that no value of another document may move."""
    spread: float
    """Largest absolute difference between unperturbed passes, over all compared tensors; 0 if deterministic."""
    passes: int
    """Number of forward passes, with their backward passes where gradients are compared."""
    unseen: tuple[int, ...]
    """Documents whose own outputs or gradients did not move when perturbed: nothing is proved of them."""

    def __str__(self) -> str:
        to = "" if self.bucket is None else f", {self.bucket.max_seqs} documents"
        how = "value for value" if self.deterministic else f"within their own spread, {self.spread:.3g}"
        grads = write_count(self.gradients, "gradient") if self.gradients else "no gradient"
        return f"{self.mode}{to}: {write_count(self.outputs, 'output')} and {grads}, {how}, {self.passes} passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Whether the documents of a micro-batch stay apart in a module; true where they do in every wanted mode."""

    documents: int
    """Number of documents with tokens."""
    checks: tuple[ModeCheck, ...]
    """The modes that ran, in their order; none after the one with the leak."""
    leak: Leak | None
    """The first leak; None where there is none."""
    skipped: Mapping[Mode, str]
    """The modes that did not run, and why."""
    missing: tuple[Mode, ...]
    """The modes of `skipped` that the caller named."""
    notes: tuple[str, ...]
    """Parts of the module that mix documents on purpose, each with what to change for a proof."""

    @property
    def unseen(self) -> tuple[int, ...]:
        """Documents of which nothing is proved, because their own values did not move in some mode."""
        return tuple(sorted({number for check in self.checks for number in check.unseen}))

    def __bool__(self) -> bool:
        return bool(self.checks) and self.leak is None and not self.missing and not self.unseen

    def __str__(self) -> str:
        """The verdict in one line, then a line for each mode and note."""
        lines = [self._verdict()]
        lines += [f"  {check}" for check in self.checks]
        lines += [f"  {mode}: did not run: {reason}" for mode, reason in self.skipped.items()]
        if self.leak is not None:
            lines += [f"  the module mixes documents on purpose: {note}" for note in self.notes]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.leak is not None:
            return f"documents do not stay apart: {self.leak}"
        if self.missing or not self.checks:
            return f"not proved: {' and '.join(self.missing) or 'every mode'} did not run"
        if self.unseen:
            return (
                f"not proved: document {self.unseen[0]} itself did not move when it was perturbed "
                f"({len(self.unseen)} of {self.documents} documents)"
            )
        return f"{self.documents} documents stay apart"


SPARE_SEQS = 4
"""Documents without tokens by which boundaries are padded where no plan names a bucket."""
SPREADS_ALLOWED = 4.0
"""Of a module that does not repeat itself, what moves by at most so many of its own spreads counts as unmoved: the
spread is known from few passes."""
_REPEATS = 4
"""Unperturbed passes, besides the first, before a leak is reported or a spread is believed. One is enough for a module
that repeats itself and has no leak.
"""

Run = Callable[[Sequence[torch.Tensor]], Any]
CallModule = Callable[[Sequence[torch.Tensor], PackedSequence], Any]
"""Runs what is verified on tensors and metadata, and returns its output."""
_NO_INPUT = ("", torch.empty(0), 0)


class NotReplayed(Exception):
    """A micro-batch that was to be replayed ran eagerly; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A module, its call, and the modules in it that decide whether a micro-batch is replayed."""

    module: nn.Module
    """The module whose buffers and gradients are kept."""
    call: CallModule
    """Runs the module. Metadata is on the host for modules in `dispatched`, else on the device of the tensors."""
    dispatched: tuple[DispatchedModule, ...] = ()
    generators: Sequence[torch.Generator] = ()
    """Generators, besides torch's default ones, that the module draws from."""
    random_states: Sequence[Callable[[], object]] = ()
    """Functions that set further random states to what they are now."""
    extra_state: Callable[[], Sequence[torch.Tensor]] = tuple

    @classmethod
    def from_module(
        cls, module: nn.Module, call: CallModule | None = None, generators: Sequence[torch.Generator] = ()
    ) -> Subject:
        """Any module, graphed or not; the arguments are those of `verify_isolation`, whose TypeError it raises."""
        if not isinstance(module, nn.Module):
            raise TypeError(f"module is a {type(module).__name__}: give a torch module; call= may run it in any way")
        dispatched = tuple(part for part in module.modules() if isinstance(part, DispatchedModule))
        return cls(
            module=module,
            call=call or (lambda given, metadata: module(*given, metadata)),
            dispatched=dispatched,
            generators=(*generators, *(g for one in dispatched for g in one.generators())),
            extra_state=lambda: [tensor for one in dispatched for tensor in one.changed_outside()],
        )


@dataclass(frozen=True, slots=True)
class Settings:
    """How a subject is verified: the arguments of `verify_isolation` of the same names."""

    modes: Sequence[Mode] | None = None
    token_dim: int | None = None
    gradients: bool = True
    tolerance: float = 0.0
    seed: int = 0


def verify_isolation(
    module: nn.Module,
    packed: PackedSequence,
    *tensors: torch.Tensor,
    call: CallModule | None = None,
    modes: Sequence[Mode] | None = None,
    token_dim: int | None = None,
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

    The micro-batch runs eagerly; eagerly with its boundaries padded to the bucket that the graphed module chooses, else
    by 4 documents without tokens; and, for a graphed module on a GPU, replayed. Give tensors that take gradients as in
    training: only those have a gradient in a replay. A module that has captured nothing yet captures its graphs for the
    proof, and drops them at the end.

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
            them; their gradients are taken where a submodule embeds them. A tensor that belongs to no document although
            it has a dimension of that size, such as a rotary table, is an argument for `call` to add.
        call: runs the module on tensors and a PackedSequence, and returns its output; None: `module(*tensors, packed)`.
        modes: the modes that must run, of "eager", "padded" and "replayed", for a true result; None: all that can.
        token_dim: dimension of the first tensor that runs over tokens; None: that of the graphed module, else 0. Other
            tensors and outputs run over tokens in the same dimension if it has their size, else in the first that has.
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
            perturbed, values that are infinite or no numbers; or the micro-batch is spread over ranks.
    """
    settings = Settings(modes, token_dim, gradients, tolerance, seed)
    return verify(Subject.from_module(module, call, generators), packed, tensors, settings)


def verify(subject: Subject, packed: PackedSequence, tensors: Sequence[torch.Tensor], settings: Settings) -> Isolation:
    """`verify_isolation` of any subject; raises what that raises."""
    _check(subject, packed, tensors, settings)
    batch = MicroBatch(subject, packed, tensors, settings)
    runs, skipped = batch.plan_runs()
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
            try:
                check, leak = Search(batch, way, put_back).check()
            except NotReplayed as error:
                skipped[way.mode] = str(error)
                continue
            checks.append(check)
            if leak is not None:
                break
    return Isolation(
        documents=len(batch.documents),
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
    if packed.cp_size > 1 or any(one.options.token_shards > 1 for one in subject.dispatched):
        raise ValueError(
            f"the micro-batch is shared out among ranks (cp_size {packed.cp_size}): verify the model on one rank, "
            "without context or sequence parallelism"
        )
    unknown = [mode for mode in settings.modes or () if mode not in get_args(Mode)]
    if unknown or (settings.modes is not None and not settings.modes):
        raise ValueError(f"modes {list(settings.modes or ())}: give some of {', '.join(get_args(Mode))}, or None")
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


class ModeRun(NamedTuple):
    """How one mode runs a micro-batch."""

    mode: Mode
    bucket: Bucket | None
    """The bucket of `padded` and `replayed`."""
    run: Run


class MicroBatch:
    """One packed micro-batch, and how a subject runs it in each mode."""

    def __init__(
        self, subject: Subject, packed: PackedSequence, tensors: Sequence[torch.Tensor], settings: Settings
    ) -> None:
        """The micro-batch of the arguments of `verify`; ValueError where there is nothing to compare."""
        self.subject, self.settings, self._packed = subject, settings, packed
        options = subject.dispatched[0].options if subject.dispatched else GraphOptions()
        self.dim = options.token_dim if settings.token_dim is None else settings.token_dim
        if not -tensors[0].dim() <= self.dim < tensors[0].dim():
            raise ValueError(f"token_dim {self.dim}: the first tensor has shape {tuple(tensors[0].shape)}")
        self._first, self.n_tokens = tensors[0], tensors[0].shape[self.dim]
        self._policy = options.tail_policy
        self._boundaries = boundaries_of(packed, self.n_tokens, self._policy)
        self.regions = regions_of(self._boundaries, self.n_tokens)
        self.documents = tuple(region for region in self.regions if region.kind == "document")
        if not self.documents or len(self.regions) < 2:
            raise ValueError(
                f"the micro-batch has {len(self.documents)} documents with tokens, and no padding: give at least two "
                "documents"
            )
        self.inputs = perturb_inputs(tensors, self.n_tokens, token_dim=self.dim, seed=settings.seed)
        self._shape = shape_of(packed, self._boundaries, self.n_tokens)

    def plan_runs(self) -> tuple[list[ModeRun], dict[Mode, str]]:
        """How the subject runs in the wanted modes, and why it cannot in others."""
        runs, skipped = list[ModeRun](), dict[Mode, str]()
        dispatched, shape = self.subject.dispatched, self._shape
        target: Bucket | str = Bucket(shape.n_seqs + SPARE_SEQS, shape.max_seqlen, shape.n_tokens)
        if dispatched:
            choice = Dispatcher(dispatched[0].buckets).decide(shape)
            target = choice if isinstance(choice, Bucket) else advice(choice, shape, dispatched[0].buckets)
        for mode in self.settings.modes or get_args(Mode):
            if mode == "eager":
                runs.append(ModeRun(mode, None, self._run_eagerly(self._packed)))
            elif not isinstance(target, Bucket):
                skipped[mode] = target
            elif mode == "padded":
                runs.append(ModeRun(mode, target, self._run_eagerly(self._padded(target))))
            elif reason := self._find_obstacle():
                skipped[mode] = reason
            else:
                runs.append(ModeRun(mode, target, self._run_replayed))
        return runs, skipped

    def _find_obstacle(self) -> str:
        """Why the micro-batch cannot be replayed; "" if it can."""
        if not self.subject.dispatched:
            return "the module has no graphs: give a graphed module, or call verify_isolation of an Installation"
        if not self._first.is_cuda:
            return "the inputs are not on a GPU"
        return next((one.why_no_rehearsal for one in self.subject.dispatched if one.why_no_rehearsal), "")

    def _padded(self, bucket: Bucket) -> PackedSequence:
        """The metadata with boundaries on the host, padded to `bucket` by repeated end entries."""
        valid, memory = (
            None if host is None else pad_cu_seqlens(np.asarray(host), max_seqs=bucket.max_seqs, n_tokens=self.n_tokens)
            for host in (self._boundaries.valid, self._boundaries.padded)
        )
        assert valid is not None
        return replace(
            self._packed,
            cu_seqlens=torch.from_numpy(valid),
            max_seqlen=bucket.max_seqlen,
            host=valid,
            cu_seqlens_padded=None if memory is None else torch.from_numpy(memory),
            host_padded=memory,
        )

    def _run_eagerly(self, packed: PackedSequence) -> Run:
        """Runs the module eagerly with the boundaries of `packed`."""
        subject, moved = self.subject, packed
        if not subject.dispatched:
            boundaries = boundaries_of(packed, self.n_tokens, self._policy)
            moved = to_device(packed, boundaries, self.n_tokens, self._first.device)

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            with ExitStack() as stack:
                for one in subject.dispatched:
                    stack.enter_context(one.only(None))
                return subject.call(tensors, moved)

        return run

    def _run_replayed(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Runs the module as training does, and makes sure that it was replayed."""
        dispatched = self.subject.dispatched
        before = [one.stats().replays.total() for one in dispatched]
        outputs = self.subject.call(tensors, self._packed)
        for one, replays in zip(dispatched, before, strict=True):
            if one.stats().replays.total() == replays:
                reasons = list(one.stats().fallbacks)
                raise NotReplayed(
                    advice(reasons[-1], self._shape, one.buckets)
                    if reasons
                    else "the module did not run its graphed part"
                )
        return outputs

    def mask(self, regions: Sequence[Region], like: torch.Tensor) -> torch.Tensor:
        """Whether each token is in one of `regions`: bool, shape [n_tokens], on the device of `like`."""
        mask = torch.zeros(self.n_tokens, dtype=torch.bool)
        for region in regions:
            mask[region.begin : region.end] = True
        return mask.to(like.device)


def mixes_on_purpose(module: nn.Module) -> tuple[str, ...]:
    """Parts of a module that let documents move each other by design, each with what to change for a proof."""
    notes: dict[str, None] = {}
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    for name, part in module.named_modules():
        if isinstance(part, batch_norms) and part.training:
            notes[f"{name or type(part).__name__} takes its statistics from all documents: verify in eval mode"] = None
        config: Any = getattr(part, "config", None)
        if getattr(config, "moe_expert_capacity_factor", None) is not None:
            notes[
                "which tokens an expert drops depends on all documents: verify with moe_expert_capacity_factor None"
            ] = None
        loss: Any = getattr(config, "moe_aux_loss_coeff", None)
        if getattr(config, "num_moe_experts", None) and any(loss if isinstance(loss, list) else [loss]):
            notes[
                "the router's auxiliary loss counts the tokens of all documents, and moves gradients: verify with "
                "moe_aux_loss_coeff 0"
            ] = None
    return tuple(notes)


def other_values(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor | None:
    """Values of the shape and dtype of `tensor`, none of which should equal the tensor's own at its place.

    Floating-point values are drawn with the mean and standard deviation of the tensor. Integers and booleans are drawn
    from the values in the tensor, so that tokens stay in their vocabulary and positions in their table. None for
    integers that are all equal.
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


def broadcast_mask(mask: torch.Tensor, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """`mask`, shape [n_tokens], as a view that broadcasts over `tensor`, whose dimension `dim` is the tokens."""
    shape = [1] * tensor.dim()
    shape[dim] = len(mask)
    return mask.view(shape)


def token_dim_of(tensor: torch.Tensor, n_tokens: int, preferred: int) -> int | None:
    """The dimension of `tensor` with the number of tokens: `preferred` if it has it, else the first, or None."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size == n_tokens]
    if preferred < 0:
        preferred += tensor.dim()
    return preferred if preferred in dims else next(iter(dims), None)


class Watched(NamedTuple):
    """One tensor of a pass that is compared: an output, or the gradient of an input."""

    what: Literal["output", "gradient"]
    name: str
    """How a message calls it."""
    values: torch.Tensor
    """The values, without a graph."""
    dim: int
    """The dimension that runs over tokens."""


def unequal_shapes(name: str, one: torch.Tensor, other: torch.Tensor) -> str:
    """The message where a tensor has another shape, or another tensor stands in its place, in another pass."""
    return (
        f"{name} has shape {tuple(one.shape)} in one pass and {tuple(other.shape)} in another, over equal boundaries: "
        "the shapes of a module's outputs may not depend on the values of its inputs"
    )


class Input(NamedTuple):
    """One tensor argument, and the values that replace it where a region is perturbed."""

    values: torch.Tensor
    """The caller's values."""
    others: torch.Tensor | None
    """Other values; None where the tensor does not run over tokens, or holds one integer only."""
    dim: int
    """The dimension that runs over tokens; 0 where `others` is None."""

    def with_others(self, mask: torch.Tensor) -> torch.Tensor:
        """A new tensor: the other values at the tokens in `mask`, the caller's elsewhere."""
        if self.others is None:
            return self.values.detach().clone()
        return torch.where(broadcast_mask(mask, self.values, self.dim), self.others, self.values.detach())


def perturb_inputs(tensors: Sequence[torch.Tensor], n_tokens: int, *, token_dim: int, seed: int) -> tuple[Input, ...]:
    """The tensor arguments with their other values, which `seed` draws; ValueError where none can be perturbed.

    Dimension `token_dim` of the first runs over tokens; of the others it is preferred where several dimensions could.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for tensor in tensors:
        dim = token_dim_of(tensor, n_tokens, token_dim)
        others = None if dim is None else other_values(tensor, generator)
        found.append(Input(tensor, others, 0 if dim is None or others is None else dim))
    if all(one.others is None for one in found):
        raise ValueError(
            f"none of the {len(tensors)} tensors can be perturbed: they do not run over the {n_tokens} tokens, or hold "
            "one integer only; give tensors as in training"
        )
    return tuple(found)


@contextmanager
def find_embeddings(
    module: nn.Module, integers: Mapping[int, tuple[str, torch.Tensor, int]]
) -> Iterator[list[tuple[str, torch.Tensor, int]]]:
    """Find, while the block runs the module, what its embeddings make of integer inputs, which cannot have gradients.

    `integers` are integer inputs by their addresses, each with a name and its dimension over tokens. The yielded list
    fills in the block: for each of them the name, the differentiable tensor that the first submodule made of it, with
    the input's dimensions before its own, and the dimension over tokens.
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

    def __init__(self, batch: MicroBatch, way: ModeRun, put_back: Callable[[], None]) -> None:
        """Run the first unperturbed pass; ValueError where a value is infinite or no number, so that no movement shows.

        `put_back` is called before every pass.
        """
        self._batch, self._way, self._settings, self._put_back = batch, way, batch.settings, put_back
        self._count = 0
        self._output_grads: dict[int, Input] = {}
        self._tensors = self._run_perturbed(())
        self._spreads = [0.0 for _ in self._tensors]
        self._allowed = []
        for tensor in self._tensors:
            mask = self._batch.mask(batch.documents, tensor.values)
            sizes = moved_by_token(tensor, tensor._replace(values=torch.zeros_like(tensor.values)))
            if not bool(torch.isfinite(sizes[mask]).all()):
                token = int(torch.nonzero(mask & ~torch.isfinite(sizes))[0])
                raise ValueError(
                    f"{tensor.name} is infinite or not a number at token {token}, before anything was perturbed: what "
                    "moves could not be seen; give inputs and weights as in training"
                )
            self._allowed.append(self._settings.tolerance * float(sizes[mask].max()))

    def check(self) -> tuple[ModeCheck, Leak | None]:
        """What was compared in the mode, and the first leak in it."""
        self._repeat(1)
        if not self._is_deterministic():
            self._repeat(_REPEATS - 1)
        leak: Leak | None = None
        unseen = set[int]()
        for together in rounds(self._batch.regions):
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
            mode=self._way.mode,
            bucket=self._way.bucket,
            outputs=kinds.count("output"),
            gradients=kinds.count("gradient"),
            deterministic=self._is_deterministic(),
            spread=max(self._spreads),
            passes=self._count,
            unseen=tuple(sorted(unseen)),
        )
        return check, named

    def _is_deterministic(self) -> bool:
        """Whether all unperturbed passes so far were equal over the documents' tokens."""
        return not any(self._spreads)

    def _run(self, together: Sequence[Region]) -> list[torch.Tensor]:
        """Largest difference at each token, for each tensor, of a pass in which `together` is perturbed."""
        now = self._run_perturbed(together)
        return [moved_by_token(tensor, other) for tensor, other in zip(self._tensors, now, strict=True)]

    def _repeat(self, times: int) -> None:
        """Widen the spreads by further unperturbed passes."""
        for _ in range(times):
            for position, moved in enumerate(self._run(())):
                spread = float(moved[self._batch.mask(self._batch.documents, moved)].max())
                self._spreads[position] = max(self._spreads[position], spread)

    def _limit(self, position: int) -> float:
        """Largest difference of the tensor at `position` that counts as unmoved."""
        return max(SPREADS_ALLOWED * self._spreads[position], self._allowed[position])

    def _perturb(self, together: Sequence[Region]) -> tuple[Leak | None, set[int]]:
        """The first movement outside `together` when that is perturbed, and the documents inside that did not move."""
        moved = self._run(together)
        watch = [document for document in self._batch.documents if document not in together]
        return self._find_leak(moved, together, watch), self._find_unmoved(moved, together)

    def _find_leak(
        self, by_tensor: Sequence[torch.Tensor], sources: Sequence[Region], watch: Sequence[Region]
    ) -> Leak | None:
        """The first movement of a document in `watch`: outputs before gradients, then by token; None without one."""
        for position, (tensor, moved) in enumerate(zip(self._tensors, by_tensor, strict=True)):
            beyond = self._batch.mask(watch, moved) & (moved > self._limit(position))
            if not bool(beyond.any()):
                continue
            token = int(torch.nonzero(beyond)[0])
            region = next(r for r in watch if r.begin <= token < r.end)
            return Leak(
                mode=self._way.mode,
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
        victims = [document for document in self._batch.documents if document.number == leak.document]
        smaller: Leak | None = leak
        while smaller is not None:
            leak, middle = smaller, len(smaller.sources) // 2
            halves = (leak.sources[:middle], leak.sources[middle:]) if middle else ()
            found = (self._find_leak(self._run(half), half, victims) for half in halves)
            smaller = next(filter(None, found), None)
        return self._perturb(leak.sources)[0] or leak

    def _run_perturbed(self, regions: Sequence[Region]) -> list[Watched]:
        """The compared tensors of a pass in which inputs and output gradients of `regions` have other values."""
        self._count += 1
        self._put_back()
        replays, tensors = self._way.mode == "replayed", list[torch.Tensor]()
        with torch.inference_mode(mode=False), torch.set_grad_enabled(self._settings.gradients or replays):
            for one in self._batch.inputs:
                tensor = one.with_others(self._batch.mask(regions, one.values))
                can = one.others is not None and (tensor.is_floating_point() or tensor.is_complex())
                tensors.append(tensor.requires_grad_(one.values.requires_grad if replays else can))
            sources, integers = [], {}
            for position, (tensor, one) in enumerate(zip(tensors, self._batch.inputs, strict=True)):
                if one.others is not None and tensor.requires_grad:
                    sources.append((f"tensors[{position}].grad", tensor, one.dim))
                elif one.others is not None and not replays and self._settings.gradients:  # of integers
                    integers[tensor.data_ptr()] = f"tensors[{position}] embedded, .grad", tensor, one.dim
            # in training, inputs are made by other modules: a module may then change them in place
            given = [tensor.clone() if tensor.requires_grad else tensor for tensor in tensors]
            with find_embeddings(self._batch.subject.module, integers) as embeddings:
                leaves = [leaf for leaf in tree_flatten(self._way.run(given))[0] if isinstance(leaf, torch.Tensor)]
            outputs = self._over_tokens(leaves)
            watched = [Watched("output", f"outputs[{i}]", leaves[i].detach(), dim) for i, dim in outputs.items()]
            if not self._settings.gradients:
                return watched
            return watched + self._gradients(leaves, outputs, [*sources, *embeddings], regions)

    def _over_tokens(self, leaves: Sequence[torch.Tensor]) -> dict[int, int]:
        """Position of every output that runs over tokens, and its dimension that does."""
        if not leaves:
            raise TypeError("the module returned no tensor: give call=, a function that returns its outputs as tensors")
        n_tokens, preferred = self._batch.n_tokens, self._batch.dim
        dims = {position: token_dim_of(leaf, n_tokens, preferred) for position, leaf in enumerate(leaves)}
        found = {position: dim for position, dim in dims.items() if dim is not None}
        if not found:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise ValueError(
                f"no output has a dimension of the micro-batch's {n_tokens} tokens, but shape {shapes}: give call=, a "
                "function that returns values of every token, such as losses before they are averaged"
            )
        return found

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
            self._output_grad(position, leaves[position], dim).with_others(self._batch.mask(regions, leaves[position]))
            for position, dim in differentiable.items()
        ]
        heads, inputs = [leaves[position] for position in differentiable], [tensor for _, tensor, _ in sources]
        found = torch.autograd.grad(heads, inputs, grads, allow_unused=True, materialize_grads=True)
        return [Watched("gradient", name, grad, dim) for (name, _, dim), grad in zip(sources, found, strict=True)]

    def _output_grad(self, position: int, output: torch.Tensor, dim: int) -> Input:
        """The gradient of an output, the same in all passes, and its other values: both zero outside documents."""
        if position not in self._output_grads:
            generator = torch.Generator().manual_seed(self._settings.seed + 1 + position)
            real = broadcast_mask(self._batch.mask(self._batch.documents, output), output, dim)
            drawn = [torch.randn(output.shape, generator=generator, dtype=torch.float32) for _ in range(2)]
            given, others = (d.to(output.device, output.dtype) * real for d in drawn)
            self._output_grads[position] = Input(given, others, dim)
        made = self._output_grads[position]
        if made.values.shape != output.shape:
            raise ValueError(unequal_shapes(f"outputs[{position}]", made.values, output))
        return made
