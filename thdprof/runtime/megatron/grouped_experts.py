"""Dropless experts of one rank as products of fixed shape, which a graph can hold.

With one expert-parallel rank the experts of a layer get tokens x top-k rows together, whatever the routing.
megatron-core reads on the host how many of them each expert gets. Here these counts stay on the device: rows are sorted
by expert, `torch.nn.functional.grouped_mm` multiplies them with the weights of all experts, and every token adds up its
rows in a fixed order. Router, losses, activation, shared experts and recomputation are megatron-core's own.

The weights are read, and their gradients added, where they lie. DistributedDataParallel's buffers hold them side by
side in reverse order; the rows of the last expert come first then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.replacing import attributes

logger = logging.getLogger(__name__)

_HOPPER = 9
"""Compute capability of the GPUs whose grouped products were checked. Older ones make torch read the counts on the
host; on newer ones an expert without tokens gets a gradient that is not zero (pytorch/pytorch#172439)."""


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view of equal tensors that lie at even distances in this order, of shape [number, *their shape]; None where
    they do not.
    """
    first, size = tensors[0], tensors[0].element_size()
    step = (tensors[1].data_ptr() - first.data_ptr()) // size if len(tensors) > 1 else first.numel()
    memory, begin = first.untyped_storage().data_ptr(), first.data_ptr()
    is_even = step >= first.numel() and all(
        t.untyped_storage().data_ptr() == memory
        and t.data_ptr() == begin + number * step * size
        and (t.shape, t.dtype) == (first.shape, first.dtype)
        and t.is_contiguous()
        for number, t in enumerate(tensors)
    )
    if not is_even:
        return None
    return first.detach().as_strided((len(tensors), *first.shape), (step, *first.stride()))


def lay_side_by_side(weights: Sequence[nn.Parameter]) -> bool:
    """Move weights that have memory of their own into one, in order; False where they share memory, but not evenly."""
    if side_by_side(weights) is not None or side_by_side(weights[::-1]) is not None:
        return True
    if any(weight.untyped_storage().nbytes() > weight.nbytes for weight in weights):
        return False
    for weight, place in zip(weights, torch.stack([w.detach() for w in weights]), strict=True):
        weight.data = place
    torch.cuda.empty_cache()  # the next layer's memory is one large piece, for which the small ones are of no use
    return True


class Rows:
    """The rows of one micro-batch: a row for every expert of every token, by expert in the order of their weights.

    It stands for the numbers of tokens by expert, of which megatron-core asks a list.
    """

    _nobodys: int | None = None
    """The row that stands for none in `token_rows`."""

    def __init__(self, routing_map: torch.Tensor, top_k: int, *, reverse: bool) -> None:
        """Rows by `routing_map`, of shape [tokens, experts], bool, with `top_k` experts of every token; `reverse` says
        that the last expert's weight comes first.
        """
        by_expert = routing_map.T.flip(0) if reverse else routing_map.T
        num_tokens = routing_map.shape[0]
        self.reverse = reverse
        self.places = by_expert.reshape(-1).argsort(descending=True, stable=True)[: num_tokens * top_k]
        """For each row its place among experts x tokens, shape [rows], int64."""
        self.tokens = self.places % num_tokens
        """The token of each row, shape [rows], int64."""
        self.token_rows = self.tokens.int().argsort(stable=True).view(num_tokens, top_k)
        """The rows of each token, shape [tokens, top-k], int64."""
        self.ends = by_expert.sum(dim=1).cumsum(0).to(torch.int32)
        """The row behind each expert's last one, shape [experts], int32."""

    def tolist(self) -> Rows:
        """The rows themselves, which `_GroupedLinear` gets in place of numbers."""
        return self

    def order(self, by_expert: Sequence[Any]) -> Sequence[Any]:
        """Entries by expert in the order of the weights, or the other way round."""
        return by_expert[::-1] if self.reverse else by_expert

    def sum_up(self, hidden: torch.Tensor) -> torch.Tensor:
        """For each token the sum of its rows of `hidden`, always in the same order; 0 without a row."""
        return torch.nn.functional.embedding_bag(self.token_rows, hidden, mode="sum", padding_idx=self._nobodys)


class _Between(torch.autograd.Function):
    """Hidden states of the rows, of those of the tokens (`to_rows`), or the other way round. A backward goes back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, rows: Rows, to_rows: bool) -> torch.Tensor:
        ctx.rows, ctx.to_rows = rows, to_rows
        return _spread_tokens(hidden, rows) if to_rows else rows.sum_up(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.rows.sum_up(grad) if ctx.to_rows else _spread_tokens(grad, ctx.rows), None, None


def move_hidden(hidden: torch.Tensor, rows: Rows | None, *, to_rows: bool) -> torch.Tensor:
    """Hidden states of the rows, of those of the tokens (`to_rows`), or the other way round."""
    moved: torch.Tensor = _Between.apply(hidden, rows, to_rows)
    return moved


def _spread_tokens(hidden: torch.Tensor, rows: Rows) -> torch.Tensor:
    return hidden.index_select(0, rows.tokens)


class _GroupedLinear(torch.autograd.Function):
    """Products of the rows with the weights of their experts.

    Gradients of the weights are rounded to the weights' dtype once a micro-batch. Where hooks on their accumulation
    know of kernels that add to `main_grad`, they are added here, and autograd gets dummies, as from Transformer
    Engine's layers with gradient_accumulation_fusion.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, rows: Rows, *weights: nn.Parameter) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        ctx.rows, ctx.weights = rows, weights
        return torch.nn.functional.grouped_mm(hidden, _stacked(rows.order(weights)).transpose(1, 2), offs=rows.ends)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (hidden,), rows, weights = ctx.saved_tensors, ctx.rows, ctx.rows.order(ctx.weights)
        grad = grad.contiguous()
        hidden_grad: torch.Tensor | None = None
        weight_grads: Sequence[torch.Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            hidden_grad = torch.nn.functional.grouped_mm(grad, _stacked(weights), offs=rows.ends)
        if any(ctx.needs_input_grad[2:]):
            found = torch.nn.functional.grouped_mm(grad.t(), hidden.contiguous(), offs=rows.ends)
            weight_grads = accumulate(weights, found) if _are_fused(weights) else [*found.unbind()]
        return hidden_grad, None, *rows.order(weight_grads)


def _stacked(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    together = side_by_side(weights)
    return torch.stack([w.detach() for w in weights]) if together is None else together


def _are_fused(weights: Sequence[Any]) -> bool:
    """Whether hooks on the weights' gradients know that a kernel may have added them to `main_grad`."""
    return all(
        getattr(w, "main_grad", None) is not None
        and hasattr(w, "grad_added_to_main_grad")
        and not getattr(w, "zero_out_wgrad", False)
        for w in weights
    )


def accumulate(weights: Sequence[Any], found: torch.Tensor) -> list[torch.Tensor]:
    """Add gradients, of shape [experts, *the weights'], to `main_grad`; returns what autograd gets in their place."""
    sums = [weight.main_grad for weight in weights]
    together = side_by_side(sums)
    parts = [(together, found)] if together is not None else zip([s[None] for s in sums], found.split(1), strict=True)
    for totals, gradients in parts:
        is_plain = totals.device.type == "cuda" and totals[0].is_contiguous() and gradients.is_contiguous()
        (_adder() if is_plain else torch.Tensor.add_)(totals, gradients)
    for weight in weights:
        weight.grad_added_to_main_grad = True
    dummy = _dummy(weights[0].shape, weights[0].dtype, weights[0].device)
    return [dummy.detach() for _ in weights]


@cache
def _adder() -> Callable[[torch.Tensor, torch.Tensor], Any]:
    try:
        from thdprof.runtime.megatron.gradient_sums import add_gradients
    except ImportError:  # a torch without Triton
        return torch.Tensor.add_
    return add_gradients


@cache
def _dummy(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory that nobody reads, which autograd keeps as a gradient until the hook on its accumulation drops it."""
    return torch.zeros(shape, dtype=dtype, device=device)


def _weights(linear: Any) -> list[nn.Parameter]:
    return [getattr(linear, f"weight{number}") for number in range(linear.num_gemms)]


class LocalDispatcher:
    """A token dispatcher of megatron-core's interface whose experts are all on this rank."""

    shared_experts = None

    def __init__(self, layer: Any) -> None:
        """Dispatches to the experts of `layer`, an MoELayer with a TEGroupedMLP."""
        self._first, self._top_k = layer.experts.linear_fc1, layer.config.moe_router_topk
        self._rows: Rows | None = None
        self._shape = torch.Size()

    def dispatch_preprocess(
        self, hidden: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and probabilities of the rows, from those of the tokens."""
        reverse = self._is_reversed()
        self._shape, self._rows = hidden.shape, Rows(routing_map, self._top_k, reverse=reverse)
        by_expert = probs.T.flip(0) if reverse else probs.T
        spread = move_hidden(hidden.reshape(-1, hidden.shape[-1]), self._rows, to_rows=True)
        return spread, by_expert.reshape(-1).index_select(0, self._rows.places)

    def _is_reversed(self) -> bool:
        """Whether the weights lie in memory with the last expert's first."""
        weights = _weights(self._first)
        return weights[-1].data_ptr() < weights[0].data_ptr()

    def token_dispatch(self, hidden: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Its arguments."""
        return hidden, probs

    def dispatch_postprocess(self, hidden: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """Its arguments, with the rows in place of the numbers of tokens by expert."""
        return hidden, self._rows, probs

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """None: nothing is exchanged."""
        return None, None

    def combine_preprocess(self, hidden: torch.Tensor) -> torch.Tensor:
        """Its argument."""
        return hidden

    def token_combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """Its argument."""
        return hidden

    def combine_postprocess(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of the tokens, of the shape that they had, from those of the rows."""
        rows, self._rows = self._rows, None  # whose memory may be a graph's
        return move_hidden(hidden, rows, to_rows=False).view(self._shape)


class ReplayedCounts:
    """Stands for the counting of one TopKRouter with `enable_expert_bias`, which no graph holds.

    Under torch.compile megatron-core's function rounds its sums in one way until its first call without gradients, and
    in another way from then on, which a graph would not follow. A graph only writes how many tokens each expert has
    got, and `count` lets the function add that.
    """

    def __init__(self, router: Any) -> None:
        self._own: Callable[..., None] = router._apply_expert_bias
        self._counts = torch.zeros((1, router.num_experts), dtype=torch.int64, device=router.expert_bias.device)

    def __call__(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count a routing map of shape [tokens, experts], bool; while a graph is captured, write its counts alone."""
        if not torch.cuda.is_current_stream_capturing():
            self._own(routing_map, padding_mask=padding_mask)
            return
        counted = routing_map if padding_mask is None else routing_map & ~padding_mask
        self._counts.copy_(counted.sum(dim=0, keepdim=True))

    def count(self) -> None:
        """Let the router count the tokens of the micro-batch whose forward was replayed last."""
        self._own(self._counts)


def find_counting_routers(module: nn.Module) -> list[nn.Module]:
    """The routers inside `module` that count tokens for a bias of their experts."""
    return [part for part in module.modules() if getattr(part, "enable_expert_bias", False)]


def count_replayed(routers: Iterable[nn.Module]) -> None:
    """Let `routers` count the tokens of a micro-batch right after its forward was replayed."""
    for router in routers:
        counts = vars(router).get("_apply_expert_bias")
        if isinstance(counts, ReplayedCounts):
            counts.count()


def find_expert_layers(models: Iterable[nn.Module]) -> list[Any]:
    """The MoELayers inside `models`.

    Raises:
        SettingsError: experts that grouped products cannot serve.
    """
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layers = [part for model in models for part in model.modules() if isinstance(part, MoELayer)]
    for layer in layers:
        if why := _why_not_grouped(layer.experts):
            raise SettingsError(
                f"thdprof cannot install graphs:\n- graphs.modules is [], and {why}, or analyse with graphs that end "
                "at the router (graphs.impl transformer_engine, graphs.modules attn and moe_router)"
            )
    return layers


def _why_not_grouped(experts: Any) -> str:
    """What keeps `experts` from grouped products beyond the table of limits, and what to do about it, in one clause; ""
    if nothing does.
    """
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    if not hasattr(torch.nn.functional, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm: install torch 2.10 or newer"
    if type(experts) is not TEGroupedMLP or experts._with_fused_impl:
        return (
            f"experts run by {type(experts).__name__}: only TEGroupedMLP without fused operations was checked in a "
            "graph; set moe_grouped_gemm to True and use_transformer_engine_op_fuser to False"
        )
    for linear in (experts.linear_fc1, experts.linear_fc2):
        if not hasattr(linear, "weight0") or getattr(linear, "use_bias", False) or "forward" in vars(linear):
            return (
                f"experts have a {type(linear).__name__} that is no plain grouped layer without bias: leave experts "
                "out of the adapters' target_modules, and moe_single_grouped_weight False"
            )
        weight = linear.weight0
        if weight.device.type == "cuda" and torch.cuda.get_device_capability(weight.device)[0] != _HOPPER:
            return (
                "the GPU is no Hopper GPU (compute capability 9.0), whose grouped products alone were checked: use one"
            )
        if weight.device.type == "cuda" and weight.dtype is not torch.bfloat16:
            return f"experts' weights are {weight.dtype}: torch takes grouped products in bf16 alone; set bf16 to True"
    return ""


@contextmanager
def grouped(
    layers: Sequence[Any], make_dispatcher: Callable[[Any], LocalDispatcher] = LocalDispatcher
) -> Iterator[None]:
    """Run the experts of `layers`, from `find_expert_layers`, as grouped products inside the block, in all passes.
    `make_dispatcher` returns the token dispatcher of a layer.

    Weights that have memory of their own are moved into one, a layer at a time, and stay there.
    """
    apart = 0
    with ExitStack() as stack:
        for layer in layers:
            experts, router = layer.experts, layer.router
            for linear in (experts.linear_fc1, experts.linear_fc2):
                apart += not lay_side_by_side(_weights(linear)[::-1])  # as gradients lie in their buffers
                stack.enter_context(attributes(linear, forward=partial(_multiply, linear)))
                stack.callback(_forget_accumulation, linear)
            # overlapped shared experts would run inside the dispatcher; they run before the router
            stack.enter_context(attributes(layer, token_dispatcher=make_dispatcher(layer), shared_expert_overlap=False))
            if getattr(router, "enable_expert_bias", False):
                stack.enter_context(attributes(router, _apply_expert_bias=ReplayedCounts(router)))
        if apart:
            logger.warning(
                "the weights of %d grouped layers do not lie evenly in their buffers: every pass copies them", apart
            )
        yield


def _forget_accumulation(linear: Any) -> None:
    """Take the marks of added gradients off the weights of a layer that does not set them itself: hooks go by them."""
    for weight in () if linear.fuse_wgrad_accumulation else _weights(linear):
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = False


def _multiply(linear: Any, hidden: torch.Tensor, rows: Rows) -> tuple[torch.Tensor, None]:
    """The forward of a TEGroupedLinear without bias, over rows that stand for the numbers of tokens."""
    output: torch.Tensor = _GroupedLinear.apply(hidden, rows, *_weights(linear))
    return output, None
