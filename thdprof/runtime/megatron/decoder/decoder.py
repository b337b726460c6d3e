"""A Megatron decoder (TransformerBlock or HybridStack) as a module that takes tensors and one PackedSequence.

The decoder stays where it is in the model, with its parameters and the keys of its checkpoints: only its `forward` is
replaced on the instance, and put back at the end.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from thdprof.dispatch import FallbackReason
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.megatron.decoder import adapters, deepstack, mamba, packed_seq_params, unfused_rope
from thdprof.runtime.megatron.decoder.arguments import FOR_INFERENCE, KNOWN_ARGUMENTS, further, not_known
from thdprof.runtime.megatron.decoder.rotary import KeptTables, keep_tables
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.padding import PackedSequence
from thdprof.training import TailPolicy

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from thdprof.runtime.megatron.decoder.context_groups import ContextGroups

logger = logging.getLogger(__name__)

Rope = Callable[[int], torch.Tensor]
"""The type of a function that returns the rotary embeddings of so many positions, from the model's own module."""


class Decoder(nn.Module):
    """Calls a decoder's own forward with the metadata that a graph reads. It is not part of the model.

    A GraphedModule or another DispatchedModule runs this module. `attach` sends the decoder's packed micro-batches
    there.
    """

    known = KNOWN_ARGUMENTS
    """Arguments that graphs take."""

    def __init__(
        self,
        block: nn.Module,
        rope: Rope | None = None,
        *,
        rotary_sample: Rope | None = None,
        num_features: int = 0,
        entry: str = "forward",
    ) -> None:
        """A decoder that is not attached yet.

        Args:
            block: a TransformerBlock or HybridStack.
            rope: returns the model's rotary embeddings; None where the layers make their own, or where every
                micro-batch has others.
            rotary_sample: returns rotary embeddings of the form that micro-batches have, where each has its own.
            num_features: layers behind which the features of images are added.
            entry: name of the block's method that runs it.

        Raises:
            SettingsError: the block's forward has been replaced, for example by another installation.
        """
        super().__init__()
        self._entry = entry
        self._instance_forward = vars(block).get(entry)
        if self._instance_forward is not None and not adapters.is_bridges_forward(self._instance_forward):
            raise SettingsError(
                f"the forward of {type(block).__name__} is replaced already: close the installation that is there, or "
                "undo what replaced it"
            )
        self.block = block
        self._own_forward: Callable[..., Any] = getattr(block, entry)
        self._rope, self._rotary_sample = rope, rotary_sample
        self._unfused = is_unfused(block)
        self._deepstack = deepstack.DeepStack(block, num_features=num_features)
        self._kept: dict[int, torch.Tensor] = {}
        self._layers_tables: tuple[KeptTables, ...] = ()
        self._like: PackedSeqParams | None = None
        self._shards, self._lengths = 1, frozenset[int]()
        self._with_seq_idx = mamba.has_mamba(block)
        self._groups: ContextGroups | None = None

    @property
    def training(self) -> bool:
        """Whether the decoder is in training mode; the decoder's own attribute decides."""
        return bool(self.block.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Does nothing: the decoder's own attribute decides."""

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The layers that a pass calls, in order."""
        return tuple(self.block.layers)  # type: ignore[arg-type]

    @property
    def pre_process(self) -> bool:
        """Whether the hidden states come from this pipeline stage, and not from the one before."""
        return bool(self.block.pre_process)

    def forward(
        self, hidden_states: torch.Tensor, packed: PackedSequence, *, constants: str, with_rope: bool, **kwargs: Any
    ) -> torch.Tensor:
        """Hidden states of one packed micro-batch after the decoder's layers.

        Args:
            hidden_states: shape [tokens of this rank, 1, hidden size], on the GPU.
            packed: the micro-batch's documents, on the GPU.
            constants: the fields of PackedSeqParams that a graph fixes; only compared between calls.
            with_rope: whether the layers take rotary embeddings; they then cover the whole buffer.
            kwargs: all other arguments with which the model calls its decoder.
        """
        kwargs = deepstack.as_given(kwargs)
        assert self._like is not None  # set by the forward that `attach` installs
        params = packed_seq_params.write(packed, self._like)
        if self._groups is not None:
            params = self._groups.of_size(params, packed.cp_size)
        if with_rope:
            length = int(hidden_states.shape[0]) * self._shards * packed.cp_size
            kwargs["rotary_pos_emb"] = self._table(length, packed.max_seqlen)
        with self.around(packed.cp_size):
            return self.run_block(hidden_states, packed_seq_params=params, **kwargs)

    def run_block(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """What the block's own pass returns.

        Args:
            hidden_states: as `forward` takes them.
            arguments: the block's other arguments.
        """
        with input_given(self.block, hidden_states):
            output: torch.Tensor = self._own_forward(hidden_states=hidden_states, **arguments)
        return output

    def is_between_layers(self, name: str) -> bool:
        """Whether the argument of that name is read between layers, and by none of them."""
        return deepstack.is_between_layers(name)

    def draws_apart(self) -> bool:
        """Whether the block runs its layers over the random state of this tensor-parallel rank alone."""
        from megatron.core.transformer.transformer_block import TransformerBlock

        return isinstance(self.block, TransformerBlock) and self.block.config.sequence_parallel

    def around(self, cp_size: int) -> AbstractContextManager[None]:
        """A context in which the layers compute positions for micro-batches that `cp_size` ranks share."""
        return nullcontext() if self._groups is None else self._groups.around(cp_size)

    def attach(
        self,
        run: DispatchedModule,
        *,
        cp_size: int,
        shards: int,
        tail: TailPolicy,
        groups: ContextGroups | None = None,
    ) -> None:
        """Send the decoder's packed micro-batches through `run`, which calls this module.

        Args:
            run: decides how each micro-batch runs.
            cp_size: number of context-parallel ranks that share the rows.
            shards: number of ranks that share a micro-batch's tokens out among them, besides context parallelism.
            tail: the plan's tail policy.
            groups: process groups of every context-parallel size, if micro-batches have sizes of their own.
        """
        self._shards, self._groups = shards, groups
        self._lengths = run.lengths()
        self._layers_tables = keep_tables(self.block, run.longest())
        self._deepstack.attach()
        signature = inspect.signature(self._own_forward)
        required = {name for name, p in signature.parameters.items() if p.default is p.empty}
        explained: set[str] = set()

        def forward(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            params = arguments.pop("packed_seq_params", None)
            if any(arguments.get(name) is not None for name in FOR_INFERENCE):
                return self._own_forward(*args, **kwargs)
            if params is None:
                return run.unpacked(self._own_forward, *args, **kwargs)
            if groups is not None:
                groups.check(params)
            hidden = arguments.pop("hidden_states")
            if not self.pre_process:
                hidden = self.block.input_tensor
            self._like = params
            packed = packed_seq_params.read(params, cp_size=cp_size, tail=tail, with_seq_idx=self._with_seq_idx)
            runs_on = self._unfused and runs_on_over_documents(
                arguments.get("rotary_pos_emb"), packed, int(hidden.shape[0]) * shards * packed.cp_size
            )
            with_rope = self._rope is not None and not runs_on and arguments.pop("rotary_pos_emb", None) is not None
            features = self._deepstack.taken(arguments, hidden)
            if self._with_seq_idx and cp_size > 1 and tail == "none":
                mamba.check_covered(packed, int(hidden.shape[0]) * shards * cp_size)
            unknown = not_known(arguments, signature, self.known)
            if self._rope is not None and runs_on:
                unknown.add("rotary_pos_emb")
            if unknown and not explained.issuperset(unknown):
                explained.update(unknown)
                logger.warning(
                    "%s.forward got %s, which no graph takes: its micro-batches run eagerly",
                    type(self.block).__name__,
                    ", ".join(sorted(unknown)),
                )
            arguments.update(further(arguments, signature))
            given = required | self.known | unknown  # all others are at their default
            with run.falling_back(FallbackReason.argument_not_known if unknown else None):
                return run(
                    hidden,
                    packed,
                    constants=packed_seq_params.constants(params, of_size=groups is None),
                    with_rope=with_rope,
                    **features,
                    **{
                        name: value
                        for name, value in arguments.items()
                        if name in given and (value is not None or name in required)
                    },
                )

        vars(self.block)[self._entry] = forward

    def call_block(self, hidden: torch.Tensor, params: PackedSeqParams) -> torch.Tensor:
        """Run the block on one packed micro-batch as its model does, through what is attached.

        Args:
            hidden: hidden states, shape [tokens, 1, hidden size].
            params: the micro-batch's metadata.
        """
        rope = self._sampled(hidden)
        if self._rope is not None:
            rope = {"rotary_pos_emb": self._table(int(hidden.shape[0]), int(params.max_seqlen_q))}
        with input_given(self.block, hidden):
            output: torch.Tensor = self.block(
                hidden_states=hidden, attention_mask=None, packed_seq_params=params, **rope
            )
        return output

    def show(self, hidden: torch.Tensor, params: PackedSeqParams) -> None:
        """Give one packed micro-batch to what is attached, as the model does in training, past the block's hooks.

        Args:
            hidden: hidden states, shape [tokens of this rank, 1, hidden size].
            params: the micro-batch's metadata.
        """
        rope = self._sampled(hidden)
        if self._rope is not None:
            rope = {"rotary_pos_emb": hidden.new_empty(0)}  # only asked whether it is there
        with input_given(self.block, hidden):
            self.block.forward(hidden_states=hidden, attention_mask=None, packed_seq_params=params, **rope)

    def decide(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        """What is attached returns for one packed micro-batch of a schedule that does not call the block itself.

        Args:
            hidden: hidden states of the first layer, shape [tokens of this rank, 1, hidden size].
            arguments: the block's other arguments.
        """
        with input_given(self.block, hidden):
            return self.block.forward(hidden_states=hidden, **arguments)

    def detach(self) -> None:
        """Give the decoder its own forward back, and its layers' rotary modules their own tables."""
        vars(self.block).pop(self._entry, None)
        if self._instance_forward is not None:
            vars(self.block)[self._entry] = self._instance_forward
        for tables in self._layers_tables:
            tables.detach()
        self._layers_tables = ()
        self._deepstack.detach()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside the block, the decoder runs as if nothing were attached to it."""
        attached = vars(self.block).pop(self._entry)
        try:
            yield
        finally:
            vars(self.block)[self._entry] = attached

    def _sampled(self, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rotary embeddings where every micro-batch has its own: those of position 0 for all tokens."""
        if self._rotary_sample is None:
            return {}
        return {"rotary_pos_emb": self._rotary_sample(int(hidden.shape[0]) * self._shards)}

    def _table(self, length: int, longest: int) -> torch.Tensor:
        """Rotary embeddings of the positions of documents of up to `longest` tokens, in micro-batches of `length`.
        Those of the buckets' lengths are kept, because graphs read them in place.
        """
        assert self._rope is not None
        # unfused RoPE takes a table of as many rows as there are tokens for positions that run on over documents
        rows = length + 1 if self._unfused else length
        if length in self._lengths and length not in self._kept:
            self._kept[length] = self._rope(rows)
        table = self._kept[length] if length in self._lengths else self._rope(rows)
        return table[:longest] if self._unfused and unfused_rope.reads_max_seqlen() else table

    def as_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that returns a context, in which the decoder runs the micro-batch that it runs now: later
        ones may have set other fields of PackedSeqParams.
        """
        like = self._like

        @contextmanager
        def as_then() -> Iterator[None]:
            now, self._like = self._like, like
            try:
                yield
            finally:
                self._like = now

        return as_then

    def renew_tables(self) -> None:
        """Copy the kept rotary embeddings, for callers that tell micro-batches apart by the identity of their
        tensors.
        """
        self._kept = {length: table.clone() for length, table in self._kept.items()}


@contextmanager
def input_given(block: Any, hidden: torch.Tensor) -> Iterator[None]:
    """Let the decoder of a later pipeline stage, which reads its input from an attribute, read `hidden` inside the
    block.
    """
    if block.pre_process:
        yield
        return
    before = block.input_tensor
    block.input_tensor = hidden
    try:
        yield
    finally:
        block.input_tensor = before


def is_unfused(block: nn.Module) -> bool:
    """Whether the layers of a decoder apply rotary embeddings by Megatron's own operations, and not by a kernel."""
    return getattr(getattr(block, "config", None), "apply_rope_fusion", None) is False


def runs_on_over_documents(table: torch.Tensor | None, packed: PackedSequence, num_tokens: int) -> bool:
    """Whether unfused RoPE takes the rows of `table` for positions in the whole micro-batch: it does so where there
    are as many of them as tokens or, from megatron-core 0.20 on, more than the longest document has. Where documents
    are one or fewer, it makes no difference.

    Args:
        table: the rotary embeddings of the micro-batch; None: it has none.
        packed: the micro-batch's documents.
        num_tokens: tokens of all ranks that share the micro-batch.
    """
    if table is None or packed.cu_seqlens.numel() <= 2:
        return False
    rows = int(table.shape[0])
    return rows > packed.max_seqlen if unfused_rope.reads_max_seqlen() else rows == num_tokens


def rope_of(model: Any) -> Rope | None:
    """The function that returns the rotary embeddings of a GPTModel or HybridModel.

    None where the layers make their own embeddings, or there are none.
    """
    module, embedding_type = getattr(model, "rotary_pos_emb", None), getattr(model, "position_embedding_type", None)
    if module is None or embedding_type not in ("rope", "yarn") or model.config.multi_latent_attention:
        return None

    def table(length: int) -> torch.Tensor:
        result = module(length, packed_seq=True)
        embeddings: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return embeddings

    return table
