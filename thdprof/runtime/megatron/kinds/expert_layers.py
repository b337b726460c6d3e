"""A layer of dropless experts around its graph, which ends at the router, or behind the dispatcher's preprocessing.

megatron-core itself knows this split (`cuda_graph_modules` attn, moe_router and moe_preprocess): its layer returns the
router's results, and takes them in again. It passes neither a padding mask nor samples on to the router; these are
given to its experts' forward here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from thdprof.runtime.megatron import recompute
from thdprof.runtime.megatron.decoder_surroundings import gather_parameters, marked_as_capturing
from thdprof.runtime.megatron.grouped_experts import count_replayed, find_counting_routers
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.replacing import attributes

AFTER_PREPROCESS = "before_ep_alltoall"
"""Where a dispatcher may first copy token counts to the host, if everything before it is captured."""
ROW_MAP = "reversed_local_input_permutation_mapping"
"""The dispatcher's map from tokens to rows, which is Transformer Engine's where it fuses the permutation."""


class DispatcherSizes:
    """Sizes that the captured step of one MoETokenDispatcher has set, by the number of tokens of the micro-batch.

    A dispatcher keeps what its steps tell each other in attributes. Where `moe_preprocess` is captured, the graph gives
    the tensors among them out, and megatron-core puts them back before it goes on. Sizes, which are no tensors, are
    kept here.
    """

    def __init__(self, dispatcher: Any) -> None:
        self._dispatcher = dispatcher
        manager = getattr(dispatcher, "_comm_manager", None)
        self._owners = [owner for owner in (dispatcher, manager) if owner is not None]
        self._kept: dict[int, list[tuple[Any, dict[str, Any]]]] = {}

    def keep(self, num_tokens: int) -> None:
        """Keep the sizes as they are now, and drop the tensors, whose memory belongs to a graph."""
        self._kept[num_tokens] = [
            (owner, {name: value for name, value in vars(owner).items() if type(value) in (int, torch.Size)})
            for owner in self._owners
        ]
        for owner, name in _find_attributes(self._dispatcher, self._dispatcher.cudagraph_attrs):
            if isinstance(getattr(owner, name, None), torch.Tensor):
                setattr(owner, name, None)

    def restore(self, num_tokens: int) -> None:
        """Set the sizes of a captured micro-batch of `num_tokens` tokens; passes since may have had others."""
        for owner, sizes in self._kept.get(num_tokens, ()):
            vars(owner).update(sizes)


def _find_attributes(dispatcher: Any, paths: Iterable[str]) -> Iterator[tuple[Any, str]]:
    """The owner and the name of each attribute, from paths such as `_comm_manager.token_probs`."""
    for path in paths:
        parents, _, name = path.rpartition(".")
        yield attrgetter(parents)(dispatcher) if parents else dispatcher, name


class ExpertCounts:
    """The counting of one TopKRouter with `enable_expert_bias`: its routing map leaves the graph, and the router's own
    function counts it, as often and with gradients enabled or not as in eager training.

    megatron-core adds a micro-batch's routing map to the router's `local_tokens_per_expert` in a function under
    torch.compile. Its first call without gradients, in an evaluation or in the first pass of recomputed experts, makes
    dynamo run that function as it is written from then on, and where the counts are kept in bf16, both round
    differently. A graph would keep the kernel of its capture for good, and some day an expert's bias would move the
    other way than in eager training.
    """

    def __init__(self, router: Any) -> None:
        self._router = router
        self._maps: list[torch.Tensor] = []

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside the block, the router does not count, and `counted` is what it would have counted."""

        def keep(routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
            self._maps.append(routing_map if padding_mask is None else routing_map & ~padding_mask)

        try:
            with attributes(self._router, _apply_expert_bias=keep):
                yield
        finally:
            self._maps.clear()

    def counted(self) -> torch.Tensor:
        """The routing map of the pass, of shape (tokens, experts), bool; inside `left_out`, after the router ran."""
        (routing_map,) = self._maps
        return routing_map

    def count(self, routing_map: torch.Tensor) -> None:
        """Let the router count a routing map that was `counted` in the graph, if gradients are enabled."""
        self._router._apply_expert_bias(routing_map)


_DIFFERENTIABLE = ("hidden_states", "probs", "shared_expert_output")
"""What a graph leaves in megatron-core's store for the rest of a layer, but for the routing map."""


class RecomputedExperts:
    """The experts of one layer, which keep their inputs alone from a forward to its backward.

    megatron-core recomputes a layer's router together with its experts (`recompute_modules` moe, or full recompute).
    Here the router's results are outputs of the layer's graph, which stay where they are until the layer's backward:
    what follows them runs again from there, and the router does not.
    """

    def __init__(self, layer: Any, around: Callable[[int], AbstractContextManager[None]]) -> None:
        """Experts of `layer`; what follows its graph runs in the context that `around` returns for so many tokens."""
        self._layer, self._around = layer, around

    def run(self, own: Callable[[torch.Tensor], Any], num_tokens: int, *, begins: Callable[[], None]) -> torch.Tensor:
        """The experts' output, from what the layer's replay has left in its store.

        `own`, their forward, takes the rest out of the store. `begins` is called when they run: in the forward without
        gradients and in the backward with them.
        """
        store, dispatcher = self._layer.mlp.cudagraph_tensor_store, self._layer.mlp.token_dispatcher
        names = [name for name in _DIFFERENTIABLE if getattr(store, name) is not None]
        routing_map = store.routing_map
        # what a captured preprocessing has given to the dispatcher: other micro-batches replace it before the backward
        places = list(_find_attributes(dispatcher, getattr(dispatcher, "valid_cudagraph_attrs", None) or ()))
        dispatched = [(owner, name, getattr(owner, name)) for owner, name in places]
        others = [(owner, name) for owner, name, tensor in dispatched if tensor.requires_grad]
        constant = [entry for entry in dispatched if not entry[2].requires_grad]

        def experts(*tensors: torch.Tensor) -> torch.Tensor:
            given = dict(zip(names, tensors, strict=False))
            attributes = zip(others, tensors[len(names) :], strict=True)
            begins()
            with self._around(num_tokens):
                for owner, name, tensor in (*constant, *((*place, tensor) for place, tensor in attributes)):
                    setattr(owner, name, tensor)
                store.set(routing_map=routing_map, **given)
                try:
                    output: torch.Tensor = own(given["hidden_states"])[0]
                finally:
                    store.clear()
            return output

        tensors = [*(getattr(store, name) for name in names), *(getattr(owner, name) for owner, name in others)]
        result: torch.Tensor = recompute.recompute_later(self._layer, experts, *tensors)
        return result


class UpToRouter:
    """A layer of dropless experts, captured up to its router or dispatcher; what follows runs eagerly.

    The model may have been built for such graphs (`cuda_graph_impl` transformer_engine) or for none: while the split
    runs, the layer's configuration names it.
    """

    def __init__(self, layer: Any, modules: Sequence[str]) -> None:
        """Split `layer`, a TransformerLayer with experts, by the plan's `graphs.modules`.

        Raises:
            SettingsError: the layer's forward has been replaced, and graphs of a part of it would leave that out.
        """
        from megatron.core.transformer.enums import CudaGraphModule

        if "forward" in vars(layer):
            raise SettingsError(
                f"the forward of {type(layer).__name__} {layer.layer_number} is replaced, and graphs of a part of it "
                "would leave the replacement out: restore the layer's own forward"
            )
        self.layer = layer
        self._experts: Callable[..., Any] = layer.mlp.forward
        self._modules = [CudaGraphModule[name] for name in modules]
        self._sizes = DispatcherSizes(layer.mlp.token_dispatcher) if "moe_preprocess" in modules else None
        self._samples: dict[int, int] = {}
        run_again = getattr(layer.mlp, "moe_layer_recompute", False) or recompute.is_full(layer.config)
        self._recomputed = RecomputedExperts(layer, self._going_on) if run_again else None
        biased = getattr(layer.mlp.router, "enable_expert_bias", False)
        self._counts = ExpertCounts(layer.mlp.router) if biased else None

    def captured(self, hidden_states: torch.Tensor, **constants: Any) -> tuple[torch.Tensor, ...]:
        """The outputs of the captured part: the routing map that is counted, if the router has an expert bias; then the
        experts' input, probabilities, the routing map or what the dispatcher has made of it, the shared experts' output
        if they are not overlapped, and last the residual.
        """
        mask, num_tokens = constants.get("padding_mask"), int(hidden_states.shape[0])
        samples = _samples(constants.get("packed_seq_params"), num_tokens)
        self._samples[num_tokens] = samples

        def of_samples(own: Callable[..., Any], hidden: torch.Tensor) -> Any:
            if samples == 1:
                return own(hidden, padding_mask=mask)
            by_sample = hidden.view(samples, num_tokens // samples, -1).transpose(0, 1).contiguous()
            return own(by_sample, padding_mask=None if mask is None else mask.view(samples, num_tokens // samples))

        counts = self._counts
        try:
            with (
                marked_as_capturing(),
                self._split(),
                self._experts_run(of_samples),
                nullcontext() if counts is None else counts.left_out(),
            ):
                outputs = self.layer._te_cuda_graph_capture(hidden_states=hidden_states, **constants)
                if counts is not None:
                    outputs = (counts.counted(), *outputs)
            if self._sizes is not None:
                self._sizes.keep(num_tokens)
        finally:
            self.layer.mlp_norm_manager = None  # it would keep tensors of the capture alive
        tensors: tuple[torch.Tensor, ...] = tuple(outputs)
        return tensors

    def written(self, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The captured part's outputs, with zeros where no kernel has written."""
        attributes = getattr(self.layer.mlp.token_dispatcher, "valid_cudagraph_attrs", None) or ()
        if self._sizes is None or not self.layer.config.moe_permute_fusion or ROW_MAP not in attributes:
            return outputs
        place = 2 + (self._counts is not None) + attributes.index(ROW_MAP)  # behind permuted tokens and probabilities
        return [*outputs[:place], written_rows(outputs[place]), *outputs[place + 1 :]]

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """Run the captured part only: a rehearsal's tokens are zeros, which would all go to the same few experts."""
        *others, residual = self.captured(hidden, **constants)
        heads += [output for output in others if output.requires_grad]
        return residual, None

    def gather(self) -> None:
        """Wait until Megatron has gathered the parameters before the experts, whose modules run hooks of their own."""
        for part in self.parts():
            gather_parameters(part)

    def parts(self) -> Sequence[nn.Module]:
        """The modules before the experts."""
        with self._split():
            parts = [*self.layer._get_submodules_under_cudagraphs()]
        if self._sizes is not None and hasattr(self.layer.mlp, "fc1_latent_proj"):
            parts.append(self.layer.mlp.fc1_latent_proj)  # runs in the dispatcher's preprocessing
        return parts

    def replay(self, graph: Callable[[torch.Tensor], Any], hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the experts, which go on from the graph's outputs."""
        num_tokens = int(hidden.shape[0])
        samples = self._samples.get(num_tokens, 1)
        maps: list[torch.Tensor] = []

        def experts(own: Callable[..., Any], inputs: torch.Tensor) -> Any:
            if self._recomputed is None:
                output, bias = own(inputs)
            else:
                output, bias = self._recomputed.run(own, num_tokens, begins=partial(self._count, maps)), None
            return output if samples == 1 else output.transpose(0, 1).reshape(num_tokens, 1, -1), bias

        if self._sizes is not None:
            self._sizes.restore(num_tokens)
        with ExitStack() as stack:
            stack.enter_context(self._replaying(graph, maps))
            if samples > 1 or self._recomputed is not None:
                stack.enter_context(self._experts_run(experts))
            output: torch.Tensor = self.layer._te_cuda_graph_replay(hidden)[0]
        return output

    @contextmanager
    def _going_on(self, num_tokens: int) -> Iterator[None]:
        """Let megatron-core's experts go on from a graph's outputs inside the block, and keep what they compute."""
        if self._sizes is not None:
            self._sizes.restore(num_tokens)
        with self._split(), attributes(self.layer.mlp, moe_layer_recompute=False):
            yield

    @contextmanager
    def standing_for(self, graph: Callable[[torch.Tensor], Any], num_tokens: int) -> Iterator[None]:
        """Inside the block, megatron-core's own node of the layer takes its captured part from `graph`."""
        if self._sizes is not None:
            self._sizes.restore(num_tokens)
        own = self.layer._te_cuda_graph_replay

        def without_metadata(hidden_states: torch.Tensor, **_: Any) -> Any:
            return own(hidden_states)  # the graph has metadata of its own

        stand_ins = {"_te_cuda_graph_replay": without_metadata, "set_te_cuda_graph_backward_dw_wrapper": lambda: None}
        with self._replaying(graph, []), attributes(self.layer, **stand_ins):
            yield

    @contextmanager
    def _replaying(self, graph: Callable[[torch.Tensor], Any], maps: list[torch.Tensor]) -> Iterator[None]:
        """Let megatron-core find `graph` as the layer's own inside the block; `maps` gets the map to count."""

        def replay(hidden: torch.Tensor, **_: Any) -> Any:
            outputs = graph(hidden)
            if self._counts is None:
                return outputs
            maps.append(outputs[0])
            if self._recomputed is None:
                self._count(maps)
            return outputs[1:]

        with ExitStack() as stack:
            stack.enter_context(self._split())
            stack.enter_context(attributes(self.layer, cuda_graphs=[replay]))
            if not hasattr(self.layer, "cuda_graph_manual_hooks"):
                stack.enter_context(attributes(self.layer, cuda_graph_manual_hooks=[]))
            stack.callback(self.layer.mlp.cudagraph_tensor_store.clear)
            yield

    def _count(self, maps: Sequence[torch.Tensor]) -> None:
        for routing_map in maps:
            assert self._counts is not None  # or there was no map
            self._counts.count(routing_map)

    @contextmanager
    def _split(self) -> Iterator[None]:
        """Let megatron-core run the layer in the two parts of the plan inside the block."""
        layer = self.layer
        configs = {id(config): config for config in (layer.config, layer.mlp.config)}.values()
        with ExitStack() as stack:
            for config in configs:
                stack.enter_context(
                    attributes(config, cuda_graph_impl="transformer_engine", cuda_graph_modules=self._modules)
                )
            if layer.recompute_pre_mlp_layernorm and self._sizes is None:  # its output is the graph's own
                stack.enter_context(attributes(layer, recompute_pre_mlp_layernorm=False))
            dispatcher = layer.mlp.token_dispatcher
            if self._sizes is not None and hasattr(dispatcher, "cuda_dtoh_point"):
                stack.enter_context(attributes(dispatcher, cuda_dtoh_point=AFTER_PREPROCESS))
            yield

    @contextmanager
    def _experts_run(self, run: Callable[[Callable[..., Any], torch.Tensor], Any]) -> Iterator[None]:
        """Let `run` stand for the forward of the layer's experts inside the block; it gets their own forward."""

        def forward(hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
            return run(self._experts, hidden)

        with attributes(self.layer.mlp, forward=forward):
            yield


def written_rows(row_map: torch.Tensor) -> torch.Tensor:
    """Transformer Engine's `row_id_map` with zeros where its kernels have not written.

    Args:
        row_map: shape [tokens, 2 * experts + 1], int32. Of a token that has n experts, n entries from the first on are
            rows, n entries in the middle are experts, and the last entry is n
            (`transformer_engine/pytorch/triton/permutation.py`, make_row_id_map).
    """
    num_experts = row_map.shape[1] // 2
    place = torch.arange(2 * num_experts, device=row_map.device) % num_experts
    return torch.cat([row_map[:, :-1] * (place < row_map[:, -1:]), row_map[:, -1:]], dim=1)


def _samples(params: Any, num_tokens: int) -> int:
    """Samples whose tokens follow each other in a micro-batch, as megatron-core's layers count them."""
    a_sample = getattr(params, "tokens_per_sample", None)
    return max(1, num_tokens // a_sample) if a_sample else 1


Graph = Callable[[torch.Tensor], Any]
"""The type of a function that replays a layer's graph: it takes the hidden states and returns the captured outputs."""


class WholeLayer:
    """A layer that is captured whole."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self._own: Callable[..., Any] = layer.forward
        self._counting = find_counting_routers(layer)

    def captured(self, hidden_states: torch.Tensor, **constants: Any) -> torch.Tensor:
        """Hidden states after the layer, which becomes the graph; a context that it may return is dropped."""
        result = self._own(hidden_states=hidden_states, **constants)
        hidden: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return hidden

    def written(self, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The outputs: every kernel of a whole layer writes all of its output."""
        return outputs

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """Run the captured part in place of the layer's whole forward, and return what the layer returns; `heads` gets
        outputs that take a gradient and that no other layer reads.
        """
        return self._own(hidden_states=hidden, **constants)

    def gather(self) -> None:
        """Wait until Megatron has gathered the parameters that the graph reads."""
        gather_parameters(self.layer)

    def parts(self) -> Sequence[nn.Module]:
        """The modules whose passes are captured."""
        return (self.layer,)

    def replay(self, graph: Graph, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states after the layer, with `graph` in place of its captured part."""
        output: torch.Tensor = graph(hidden)
        count_replayed(self._counting)
        return output


Split = WholeLayer | UpToRouter
"""How one layer runs around its graph."""


def find_splits(layers: Iterable[nn.Module], modules: Sequence[str]) -> tuple[Split, ...]:
    """How each of `layers` runs around its graph, by the plan's `graphs.modules`.

    megatron-core reads on the host how many tokens each dropless expert gets, which a graph cannot. A layer that has
    them is therefore captured up to and including its router, and goes on eagerly from there (`UpToRouter`). In a plan
    for whole layers the experts run by other products (`grouped_experts`).
    """
    to_router = "moe_router" in modules
    return tuple(
        UpToRouter(layer, modules) if to_router and getattr(layer, "is_moe_layer", False) else WholeLayer(layer)
        for layer in layers
    )
