"""The decoder of a Megatron model as a module that takes tensors and one PackedSequence.

Layers of multi-token prediction are replayed behind it, by graphs of their own. Their micro-batches are the decoder's,
and fit the same buckets; each layer decides by itself, as the decoder does. It has as many slots, and so many times
more where it predicts several tokens one after the other.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from thdprof.dispatch import FallbackReason
from thdprof.runtime.dispatched_module import DispatchedModule
from thdprof.runtime.graphs.module_state import find_hooked_parameters
from thdprof.runtime.megatron import decoder_surroundings, recompute, rotary
from thdprof.runtime.megatron.decoder import packed_seq_params, parts
from thdprof.runtime.megatron.decoder.packed_seq_params import ContextGroups
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.rotary import KeptTables, keep_tables
from thdprof.runtime.padding import PackedSequence
from thdprof.runtime.replacing import attributes, replaced

KNOWN_ARGUMENTS = frozenset({"hidden_states", "attention_mask", "rotary_pos_emb", "packed_seq_params", "padding_mask"})
"""Arguments of a decoder's forward that graphs take: their tensors are copied into static ones."""
FOR_INFERENCE = frozenset({"inference_context", "inference_params"})
"""With one of these the decoder's own forward runs, past everything else."""


def find_unknown_arguments(
    arguments: Mapping[str, Any], signature: inspect.Signature, known: frozenset[str] = KNOWN_ARGUMENTS
) -> set[str]:
    """Names of `arguments`, bound by a forward's `signature`, that no graph takes and that are not at their default."""
    names = {name for name, value in collect_keywords(arguments, signature).items() if value is not None}
    for name, value in arguments.items():
        parameter = signature.parameters[name]
        taken = name in known | FOR_INFERENCE or parameter.kind is parameter.VAR_KEYWORD
        if not taken and not _is_default(value, parameter.default):
            names.add(name)
    return names


def collect_keywords(arguments: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
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

    def attach(self, run: DispatchedModule, *, cp_size: int, groups: ContextGroups | None = None) -> None:
        """Send the decoder's packed micro-batches through `run`, which calls this module.

        `cp_size` context-parallel ranks share the rows. `groups` are given where micro-batches have context-parallel
        sizes of their own.
        """
        shards, tail = run.options.token_shards, run.options.tail_policy
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
            arguments.update(collect_keywords(arguments, signature))
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
    num_features = parts.num_features(parts.find_whole_model(chunk))
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


# --- multi-token prediction -------------------------------------------------------------------------------------------

_EMBEDDED = "decoder_input"
"""The argument with the embedding of the tokens that were shifted."""
_WHOLE, _RECOMPUTED = "_proj_and_transformer_layer", "_checkpointed_forward"
"""The layer's methods that run what follows the embedding: as it is, and recomputed in the backward."""


class PredictionLayer(Decoder):
    """Calls what follows the embedding in a MultiTokenPredictionLayer with the metadata that a graph reads.

    megatron-core's layer first shifts tokens by the documents' boundaries and embeds them, which reads the boundaries
    on the host. What follows is a norm of each of its two inputs, their projection, a transformer layer and a norm:
    that part is replayed as the decoder is.
    """

    known = KNOWN_ARGUMENTS | {_EMBEDDED}

    def __init__(
        self, layer: Any, rope: Rope | None = None, *, rotary_sample: Rope | None = None, embeds_grad: bool = True
    ) -> None:
        """A MultiTokenPredictionLayer that is not attached yet; `rope` and `rotary_sample` are as `Decoder` takes them.

        Raises:
            SettingsError: what follows the embedding has been replaced, for example by another installation.
        """
        entry = _RECOMPUTED if recompute.is_full(layer.config) else _WHOLE
        super().__init__(layer, rope, rotary_sample=rotary_sample, entry=entry)
        self._config = layer.config
        self._whole = getattr(layer, _WHOLE)
        self._embeds_grad = embeds_grad

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        """The transformer layer, or the layers of the stack in its place."""
        return inner_layers(self.block)

    @property
    def pre_process(self) -> bool:
        """True: the hidden states are an argument on every pipeline stage."""
        return True

    def run_block(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """What follows the embedding; recomputed in the backward, if the configuration says so now."""
        run = self._own_forward if recompute.is_full(self._config) else self._whole
        output: torch.Tensor = run(hidden_states=hidden_states, **arguments)
        return output

    def is_between_layers(self, name: str) -> bool:
        """Whether the argument of that name is read before the transformer layer alone."""
        return name == _EMBEDDED

    def draws_apart(self) -> bool:
        """Whether the layer runs over the random state of this tensor-parallel rank alone."""
        return bool(self._config.sequence_parallel)

    def _further_inputs(self, hidden: torch.Tensor) -> dict[str, Any]:
        return {_EMBEDDED: torch.zeros_like(hidden, requires_grad=self._embeds_grad)}


def inner_layers(layer: Any) -> tuple[nn.Module, ...]:
    """The layers that a MultiTokenPredictionLayer calls, in order."""
    inner = layer.mtp_model_layer
    return tuple(getattr(inner, "layers", (inner,)))


def prediction_layers(model: Any) -> Sequence[Any]:
    """The layers of multi-token prediction of a GPTModel or HybridModel, on the rank that has them; else none."""
    block = getattr(model, "mtp", None)
    return () if block is None else tuple(block.layers)


def passes_a_microbatch(config: Any) -> int:
    """How often a micro-batch passes each of these layers: several times where one layer predicts all tokens."""
    return int(config.mtp_num_layers) if getattr(config, "mtp_use_repeated_layer", False) else 1


def find_replayed_predictions(model: Any, config: Any, *, impl: str, offloads: bool = False) -> list[PredictionLayer]:
    """The layers of multi-token prediction of a chunk's model that follow a plan's `graphs.impl`, not attached yet. The
    log says why others do not; `offloads` says that activations of the decoder wait in host memory.

    Raises:
        SettingsError: layers that cannot be replayed have MambaLayers, which get no `seq_idx` then, so that documents
            would mix.
    """
    found = prediction_layers(model)
    if not found:
        return []
    why = "" if impl == "none" else why_eager(found, config, impl=impl, offloads=offloads)
    if why and any(map(parts.has_mamba, found)):
        raise SettingsError(
            f"multi-token prediction has MambaLayers, which must be replayed so that documents stay apart, and {why}; "
            "use attention and MLP layers in its pattern"
        )
    if why:
        logger.warning("multi-token prediction runs eagerly behind the decoder's graphs: %s", why)
        return []
    embeds_grad = not getattr(config, "mtp_detach_heads", False) and any(
        parameter.requires_grad for parameter in model.embedding.parameters()
    )
    rope, sample = rope_of(model), parts.rotary_sample_of(model)
    return [PredictionLayer(layer, rope, rotary_sample=sample, embeds_grad=embeds_grad) for layer in found]


def why_eager(found: Sequence[Any], config: Any, *, impl: str, offloads: bool = False) -> str:
    """Why the layers `found` cannot be replayed, in one clause; "" if they can."""
    chunk = impl == "chunk"
    inner = [part for layer in found for part in inner_layers(layer)]
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        return "overlap_moe_expert_parallel_comm runs it by nodes of its own"
    if offloads:
        return "graphs.offload moves activations of the decoder alone"
    if chunk and passes_a_microbatch(config) > 1:
        return (
            "mtp_use_repeated_layer adds up the gradients of several passes, which chunk graphs would round otherwise"
        )
    if foreign := [*(parts.find_foreign_layers(inner) if chunk else ())]:
        return f"it has a {foreign[0]}, which was not checked in a graph"
    if not chunk and not parts.find_capturable(inner):
        return "none of its layers can be a graph"
    for name, check in _IN_THE_WAY.items():
        if chunk or name != "fused operations":
            named = [part for layer in found for part in check(layer)]
            if named:
                return f"its {named[0]} has {name}"
    return ""


_IN_THE_WAY: Mapping[str, Callable[[Any], Iterable[str]]] = {
    "hooks that a replay would leave out": decoder_surroundings.foreign_hooks,
    "an adapter of Transformer Engine's operation fuser": parts.find_fused_adapters,
    "a gradient hook": find_hooked_parameters,
    "fused operations": parts.find_fused_parts,
}
"""What keeps a part of a layer from being captured: its name, and a function that returns the names of such parts."""
