"""The decoder of a Megatron model as a module that takes tensors and one PackedSequence."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from thdprof.dispatch import FallbackReason
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.megatron import rotary
from thdprof.runtime.megatron.decoder import packed_seq_params, parts
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.replacing import attributes, replaced
from thdprof.runtime.megatron.rotary import KeptTables, keep_tables
from thdprof.runtime.padding import PackedSequence
from thdprof.training import TailPolicy

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from thdprof.runtime.megatron.decoder.packed_seq_params import ContextGroups


KNOWN_ARGUMENTS = frozenset({"hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params", "padding_mask"})
"""Arguments of a decoder's forward that graphs take: their tensors are copied into static ones."""
FOR_INFERENCE = frozenset({"inference_context", "inference_params"})
"""With one of these the decoder's own forward runs, past everything else."""


def find_unknown_arguments(
    arguments: Mapping[str, Any], signature: inspect.Signature, known: frozenset[str] = KNOWN_ARGUMENTS
) -> set[str]:
    """Names of `arguments`, bound by a forward's `signature`, that no graph takes and that are not at their default."""
    names = {name for name, value in further(arguments, signature).items() if value is not None}
    for name, value in arguments.items():
        parameter = signature.parameters[name]
        taken = name in known | FOR_INFERENCE or parameter.kind is parameter.VAR_KEYWORD
        if not taken and not _is_default(value, parameter.default):
            names.add(name)
    return names


def further(arguments: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """The keyword arguments that a forward takes without naming them (`**kwargs`)."""
    names = [name for name, p in signature.parameters.items() if p.kind is p.VAR_KEYWORD]
    return {key: value for name in names for key, value in arguments.get(name, {}).items()}


def _is_default(value: Any, default: Any) -> bool:
    """Whether an argument says nothing: None, its own default, or an empty collection in place of None."""
    if value is None or value is default:
        return True
    if isinstance(value, set | frozenset | list | tuple | dict):
        return not value and not default
    return isinstance(value, bool | int | float | str) and type(value) is type(default) and value == default


_MASK, _ROWS, _ADD = "visual_pos_masks", "deepstack_visual_embeds", "_deepstack_process"
"""The block's arguments, and the method that adds one layer's rows."""
_TOKENS, _FEATURES = "deepstack_tokens", "deepstack_features_"
"""Names of the tensors that stand for these arguments: the mask, and one for each list of rows."""


def is_between_layers(name: str) -> bool:
    """Whether an argument is read between layers, and by none of them."""
    return name == _TOKENS or name.startswith(_FEATURES)


class DeepStack:
    """Stands for the method by which one block adds features, and makes the tensors that it adds.

    Megatron-Bridge gives its decoder a mask of the image's tokens and, for each of the first layers, a row of features
    for every such token. Their shape differs between micro-batches, and adding them waits for the GPU. Here the
    features of a layer become a tensor with a row for each token of the micro-batch, which a graph can take. The sums
    are the same bit for bit: tokens without an image keep their hidden states.
    """

    def __init__(self, block: nn.Module, *, num_features: int) -> None:
        """Nothing replaced yet; behind `num_features` layers of this pipeline stage features are added."""
        self._block: Any = block
        self._num = num_features

    def attach(self) -> None:
        """Replace the block's method, on the instance, by one that takes tensors of either form."""
        own = getattr(self._block, _ADD, None)
        if own is None:
            return

        def add(hidden: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> Any:
            if features.dim() == 2:
                return own(hidden, mask, features)
            return torch.where(mask.reshape(-1, 1, 1), hidden + features, hidden)

        vars(self._block)[_ADD] = add

    def detach(self) -> None:
        """Give the block its own method back."""
        vars(self._block).pop(_ADD, None)

    def taken(self, arguments: dict[str, Any], hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Take the features out of a call's arguments; returns the tensors that stand for them.

        A micro-batch without images has features of zeros, so that all micro-batches give the same arguments. Features
        of another number than the model has stay where they are. `hidden` has the shape [tokens of this rank, 1, hidden
        size].
        """
        mask, rows = arguments.get(_MASK), arguments.get(_ROWS)
        if rows is not None and len(rows) != self._num:
            return {}
        arguments.pop(_MASK, None)
        arguments.pop(_ROWS, None)
        if self._num == 0:
            return {}
        tokens, takes_grad = int(hidden.shape[0]), torch.is_grad_enabled()
        if mask is None or rows is None:
            mask = torch.zeros(tokens, dtype=torch.bool, device=hidden.device)
            features = [torch.zeros_like(hidden, requires_grad=takes_grad) for _ in range(self._num)]
        else:
            mask = mask.reshape(-1)
            places = torch.nonzero_static(mask, size=len(rows[0])).reshape(-1)
            features = []
            for own in rows:
                shape = tokens, own.shape[-1]
                empty = torch.zeros(shape, dtype=own.dtype, device=own.device, requires_grad=takes_grad)
                features.append(empty.index_copy(0, places, own).unsqueeze(1))
        return {_TOKENS: mask, **{f"{_FEATURES}{number}": one for number, one in enumerate(features)}}


def restore_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """A call's arguments with the block's own names, whose features are the tensors that `DeepStack.taken` made."""
    if _TOKENS not in arguments:
        return arguments
    features = [value for name, value in arguments.items() if name.startswith(_FEATURES)]
    others = {name: value for name, value in arguments.items() if not is_between_layers(name)}
    return {**others, _MASK: arguments[_TOKENS], _ROWS: features}


logger = logging.getLogger(__name__)

Rope = Callable[[int], torch.Tensor]
"""The type of a function that returns the rotary embeddings of so many positions, from the model's own module."""


class Decoder(nn.Module):
    """Calls a decoder's own forward with the metadata that a graph reads; not part of the model. `attach` sends the
    decoder's packed micro-batches to a DispatchedModule, which runs this module.
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

        `block` is a TransformerBlock or HybridStack, which its method `entry` runs. `rope` returns the model's rotary
        embeddings, where the layers do not make their own; where every micro-batch has others, `rotary_sample` returns
        some of their form. Behind `num_features` layers the features of images are added.

        Raises:
            SettingsError: the block's forward has been replaced, for example by another installation.
        """
        super().__init__()
        self._entry = entry
        self._instance_forward = vars(block).get(entry)
        if self._instance_forward is not None and not parts.is_bridges_forward(self._instance_forward):
            raise SettingsError(
                f"the forward of {type(block).__name__} is replaced already: close the installation that is there, or "
                "undo what replaced it"
            )
        self.block = block
        self._own_forward: Callable[..., Any] = getattr(block, entry)
        self._rope, self._rotary_sample = rope, rotary_sample
        self._unfused = getattr(getattr(block, "config", None), "apply_rope_fusion", None) is False
        """Whether the layers apply rotary embeddings by Megatron's own operations, and not by a kernel."""
        self._deepstack = DeepStack(block, num_features=num_features)
        self._kept: dict[int, torch.Tensor] = {}
        self._layers_tables: tuple[KeptTables, ...] = ()
        self._like: PackedSeqParams | None = None
        self._shards, self._lengths = 1, frozenset[int]()
        self._with_seq_idx = parts.has_mamba(block)
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
        kwargs = restore_arguments(kwargs)
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
        """What the block's own pass returns; `hidden_states` as `forward` takes them."""
        with input_given(self.block, hidden_states):
            output: torch.Tensor = self._own_forward(hidden_states=hidden_states, **arguments)
        return output

    def is_between_layers(self, name: str) -> bool:
        """Whether an argument is read between layers, and by none of them."""
        return is_between_layers(name)

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

        `cp_size` context-parallel ranks share the rows, and `shards` further ranks the tokens. `groups` are given where
        micro-batches have context-parallel sizes of their own.
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
                parts.check_covered(packed, int(hidden.shape[0]) * shards * cp_size)
            unknown = find_unknown_arguments(arguments, signature, self.known)
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

        `hidden` has the shape [tokens, 1, hidden size].
        """
        rope = self._rotary(hidden, lambda: self._table(int(hidden.shape[0]), int(params.max_seqlen_q)))
        with input_given(self.block, hidden):
            output: torch.Tensor = self.block(
                hidden_states=hidden, attention_mask=None, packed_seq_params=params, **rope
            )
        return output

    def show(self, hidden: torch.Tensor, params: PackedSeqParams) -> None:
        """Give one packed micro-batch to what is attached, as the model does in training, past the block's hooks.

        `hidden` has the shape [tokens of this rank, 1, hidden size].
        """
        rope = self._rotary(hidden, lambda: hidden.new_empty(0))  # only its presence counts
        self.decide(hidden, **self._further_inputs(hidden), packed_seq_params=params, **rope)

    def _further_inputs(self, hidden: torch.Tensor) -> dict[str, Any]:
        """Arguments of training besides the hidden states, their metadata and rotary embeddings."""
        return {"attention_mask": None}

    def decide(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        """What is attached returns for one packed micro-batch of a schedule that does not call the block itself.

        `hidden` has the shape [tokens of this rank, 1, hidden size]; `arguments` are the block's others.
        """
        with nullcontext() if self.pre_process else input_given(self.block, hidden):
            return getattr(self.block, self._entry)(hidden_states=hidden, **arguments)

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

    def _rotary(self, hidden: torch.Tensor, table: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The argument with rotary embeddings: `table`, or those of position 0 where every micro-batch has its own."""
        if self._rope is not None:
            return {"rotary_pos_emb": table()}
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
        return table[:longest] if self._unfused and rotary.reads_max_seqlen() else table

    def as_now(self) -> Callable[[], AbstractContextManager[None]]:
        """Makes contexts in which the decoder runs the micro-batch of now: later ones may set other fields."""
        return partial(attributes, self, _like=self._like)

    def renew_tables(self) -> None:
        """Copy the kept rotary embeddings: some callers tell micro-batches apart by the identity of their tensors."""
        self._kept = {length: table.clone() for length, table in self._kept.items()}


def input_given(block: Any, hidden: torch.Tensor) -> AbstractContextManager[None]:
    """A context in which the decoder of a later pipeline stage finds `hidden` in the attribute that it reads."""
    return nullcontext() if block.pre_process else replaced(block, "input_tensor", hidden)


def runs_on_over_documents(table: torch.Tensor | None, packed: PackedSequence, num_tokens: int) -> bool:
    """Whether unfused RoPE takes the rows of `table` for positions in the whole micro-batch of `num_tokens` tokens over
    all ranks: it does so where there are as many of them as tokens or, from megatron-core 0.20 on, more than the
    longest document has. Where documents are one or fewer, it makes no difference.
    """
    if table is None or packed.cu_seqlens.numel() <= 2:
        return False
    rows = int(table.shape[0])
    return rows > packed.max_seqlen if rotary.reads_max_seqlen() else rows == num_tokens


def decoder_of(chunk: nn.Module, model: Any) -> Decoder:
    """The decoder of `model`, which a model chunk holds, not attached yet."""
    num_features = parts.num_features(parts.whole(chunk))
    sample = parts.rotary_sample_of(model)
    return Decoder(model.decoder, rope_of(model), rotary_sample=sample, num_features=num_features)


def rope_of(model: Any) -> Rope | None:
    """The function that makes rotary embeddings of a GPTModel or HybridModel; None where the layers do."""
    module, embedding_type = getattr(model, "rotary_pos_emb", None), getattr(model, "position_embedding_type", None)
    if module is None or embedding_type not in ("rope", "yarn") or model.config.multi_latent_attention:
        return None

    def table(length: int) -> torch.Tensor:
        result = module(length, packed_seq=True)
        embeddings: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return embeddings

    return table
