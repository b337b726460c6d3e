"""`verify_isolation`: proves by perturbation that the documents of a packed micro-batch do not move each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from thdprof.dispatch import Bucket
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.isolation.passes import NotReplayed, Passes, inputs_of
from thdprof.runtime.isolation.regions import regions_of
from thdprof.runtime.isolation.result import Isolation, Leak, Mode, ModeCheck
from thdprof.runtime.isolation.search import Search
from thdprof.runtime.isolation.state import unchanged
from thdprof.runtime.isolation.subject import (
    CallModule,
    MicroBatch,
    Subject,
    mixes_on_purpose,
    rehearsal,
    ways_of,
)
from thdprof.runtime.padding import PackedSequence
from thdprof.training import TailPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a subject is verified: the arguments of `verify_isolation` that are not the micro-batch."""

    modes: Sequence[Mode] | None = None
    """The modes that must run; None: all that can."""
    bucket: Bucket | None = None
    """The bucket to pad to; None: that of the plan."""
    tail_policy: TailPolicy | None = None
    """The tail policy; None: that of the plan, else `none`."""
    token_dim: int | None = None
    """Dimension of the first tensor that runs over tokens; None: that of the graphed module, else 0."""
    output_token_dim: int | None = None
    """Preferred dimension of outputs over tokens; None: `token_dim`."""
    shared: Sequence[int] = ()
    """Positions of tensors that all documents share."""
    gradients: bool = True
    """Whether to compare gradients, too."""
    tolerance: float = 0.0
    """Largest difference that counts as none, as a share of a tensor's largest absolute value."""
    seed: int = 0
    """Seed of the values that replace a document's."""


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
    unperturbed passes differ among themselves is compared within four times its own spread instead. Padding between
    documents, and a tail that belongs to no document, are perturbed like documents, but not watched. All pairs of
    documents are covered: of N documents by N passes, or by 2 * log2(N) where that is less. More passes are made only
    to name a leak.

    The micro-batch runs eagerly; eagerly with its boundaries padded to a bucket (the end repeated, after the tail
    policy); and, for a graphed module on a GPU, replayed. Give tensors that take gradients as in training: only those
    have a gradient in a replay. A module that has captured nothing yet captures its graphs for the proof, and drops
    them at the end.

    Everything runs in the module's present mode, under the present autocast. Afterwards random states (Python's,
    NumPy's, torch's), buffers, parameters' gradients and counters are as before. Forward hooks run; hooks of parameters
    and of their gradients' accumulation do not. One more copy of the gradients is held meanwhile.

    It cannot see what depends on another document's length alone (positions that count on across documents), nor what
    the weights hide: an attention whose output projection is still zero moves nothing. A module that mixes documents
    on purpose is not isolated, and `notes` of the result says what to change for a proof: experts with a capacity,
    auxiliary losses of routers, batch statistics. Dropless experts may also round otherwise when other documents are
    routed otherwise: give a small `tolerance`.

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
    batch = MicroBatch.of(packed, tensors, token_dim=token_dim, policy=policy)
    regions = regions_of(batch.boundaries, batch.shape.n_tokens)
    documents = tuple(region for region in regions if region.kind == "document")
    if not documents or len(regions) < 2:
        raise ValueError(
            f"the micro-batch has {len(documents)} documents with tokens, and no padding: give at least two documents"
        )
    inputs = inputs_of(tensors, batch.shape.n_tokens, token_dim=token_dim, shared=settings.shared, seed=settings.seed)
    ways = ways_of(subject, batch, settings.bucket, settings.modes or get_args(Mode))
    search = Search(regions=regions, documents=documents, n_tokens=batch.shape.n_tokens, tolerance=settings.tolerance)
    checks: list[ModeCheck] = []
    leak: Leak | None = None
    with (
        unchanged(
            subject.module, batch.device, subject.generators, subject.extra_state, subject.random_states
        ) as put_back,
        rehearsal(subject.dispatched),
    ):
        for way in ways.runs:
            passes = Passes(
                module=subject.module,
                run=way.run,
                put_back=put_back,
                inputs=inputs,
                documents=documents,
                n_tokens=batch.shape.n_tokens,
                output_dim=token_dim if settings.output_token_dim is None else settings.output_token_dim,
                gradients=settings.gradients,
                as_given=way.mode == "replayed",
                seed=settings.seed,
            )
            try:
                check, leak = search.check(way, passes)
            except NotReplayed as error:
                ways.skipped[way.mode] = str(error)
                continue
            checks.append(check)
            if leak is not None:
                break
    return Isolation(
        documents=len(documents),
        checks=tuple(checks),
        leak=leak,
        skipped=ways.skipped,
        missing=tuple(mode for mode in settings.modes or () if mode in ways.skipped),
        notes=mixes_on_purpose(subject.module),
    )


def _check(subject: Subject, packed: Any, tensors: Sequence[Any], settings: Settings) -> None:
    """Refuse arguments that cannot be verified.

    Raises:
        TypeError, ValueError: as `verify_isolation`.
    """
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
