"""A layer of dropless experts around its graph, which ends at the router, or behind the dispatcher's preprocessing.

megatron-core itself knows this split (`cuda_graph_modules` attn, moe_router and moe_preprocess): its layer returns the
router's results, and takes them in again. It passes neither a padding mask nor samples on to the router; these are
given to its experts' forward here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from thdprof.runtime.megatron.graphs.attributes import attributes
from thdprof.runtime.megatron.graphs.dispatchers import AFTER_PREPROCESS, DispatcherSizes
from thdprof.runtime.megatron.graphs.expert_counts import ExpertCounts
from thdprof.runtime.megatron.graphs.recomputed_experts import RecomputedExperts, are_recomputed
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.surroundings import capturing, gather_parameters


class UpToRouter:
    """A layer of dropless experts, captured up to its router or dispatcher; what follows runs eagerly.

    The model may have been built for such graphs (`cuda_graph_impl` transformer_engine) or for none: while the split
    runs, the layer's configuration names it.
    """

    def __init__(self, layer: Any, modules: Sequence[str]) -> None:
        """The split of `layer`.

        Args:
            layer: a TransformerLayer with experts.
            modules: the plan's `graphs.modules`.

        Raises:
            SettingsError: the layer's forward has been replaced; graphs of a part of it would leave the replacement
                out.
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
        self._recomputed = RecomputedExperts(layer, self._going_on) if are_recomputed(layer) else None
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
                capturing(),
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

    def rehearse(self, hidden: torch.Tensor, constants: dict[str, Any], heads: list[torch.Tensor]) -> Any:
        """Run the captured part only: a rehearsal's tokens are zeros, which would all go to the same few experts."""
        *others, residual = self.captured(hidden, **constants)
        heads += [output for output in others if output.requires_grad]
        return residual, None

    def gather(self) -> None:
        """Wait until Megatron has gathered the parameters before the experts. The experts' modules run their own
        hooks.
        """
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
        """Inside the block, megatron-core's own node of the layer, which computes what is captured, takes it from
        `graph`.

        Args:
            graph: replays the layer's graph: it takes the hidden states and returns the captured outputs.
            num_tokens: tokens of this rank's hidden states.
        """
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
        """Let megatron-core find `graph` as the layer's own inside the block.

        Args:
            graph: replays the layer's graph.
            maps: gets the routing map that is to be counted, if there is one.
        """

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
        """Count the tokens of a replay for the experts' bias."""
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


def _samples(params: Any, num_tokens: int) -> int:
    """Samples whose tokens follow each other in a micro-batch, as megatron-core's layers count them."""
    a_sample = getattr(params, "tokens_per_sample", None)
    return max(1, num_tokens // a_sample) if a_sample else 1
