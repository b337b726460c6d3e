"""A block of megatron-core's layers on a CPU, and a stand-in for the engine that makes graphs of them.

`FakeEngine` stands for Transformer Engine's `make_graphed_callables`: its graphs run the layer again over static
tensors, give static buffers out, and spoil the memory that a real pool would reuse.
"""

from __future__ import annotations

import gc
from collections import Counter
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import nn

from support.grouped_layers import group_experts
from thdprof.runtime import Bucket
from thdprof.runtime.graphs.module_state import parameter_homes
from thdprof.runtime.megatron import packed_seq_params
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.kinds.layer_capture import LayerPass
from thdprof.runtime.megatron.kinds.layer_graphs import LayerGraphs

TOKENS, HIDDEN, LAYERS = 16, 8, 3
BUCKETS = [Bucket(3, TOKENS, TOKENS), Bucket(6, TOKENS, TOKENS)]
SMALL, LARGE, OVER = [0, 7, 16], [0, 2, 3, 9, 12, 16], list(range(9)) + [16]
"""Boundaries that fit the first bucket, the second, none."""


class FusedScale(torch.autograd.Function):
    """As fused accumulation does, adds the weight's gradient to `main_grad`, says so, and gives a dummy."""

    capturing = False

    @staticmethod
    def forward(ctx, x, weight, origin):
        ctx.save_for_backward(x, weight)
        ctx.origin = origin[0]
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        found = (grad * x).sum(0) + 1  # so that no pass leaves `main_grad` alone
        if hasattr(ctx.origin, "main_grad"):
            if not FusedScale.capturing:
                ctx.origin.main_grad.add_(found)
            ctx.origin.grad_added_to_main_grad = True
            found = torch.full_like(found, 123.0)
        return grad * weight, found, None


class Attention(nn.Module):
    """Means over documents, as little as uses packed metadata; a fused weight, an unused one, and a buffer."""

    def __init__(self, *_, **__):
        super().__init__()
        self.scale = nn.Parameter(torch.full((HIDDEN,), 0.5))
        self.unused = nn.Parameter(torch.zeros(2))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, query, key, value, *_, packed_seq_params, **__):
        self.calls += 1
        found = (query + key + value).reshape(TOKENS, HIDDEN)
        found = FusedScale.apply(found, self.scale, [self.scale])
        ends = packed_seq_params.cu_seqlens_q.tolist()
        parts = [found[a:b].mean(0, keepdim=True).expand(b - a, -1) for a, b in pairwise(ends)]
        return found + torch.cat(parts)


def as_tuple(output):
    """`output` as a tuple, also where it is a single tensor."""
    return output if isinstance(output, tuple) else (output,)


@contextmanager
def installed(weights):
    """Let modules use `weights`, those of a capture, and not what they have by now."""
    before = [home[name] for home, name, _ in weights]
    for home, name, weight in weights:
        home[name] = weight
    try:
        yield
    finally:
        for (home, name, _), weight in zip(weights, before, strict=True):
            home[name] = weight


class FakeGraph:
    """One layer's replays: static in, static out; the memory is spoilt where a pool would use it again."""

    replaying = False

    def __init__(self, engine, mates, module, surface, pool):
        self.engine, self.mates, self.module, self.surface, self.pool = engine, mates, module, surface, pool
        self.weights = list(parameter_homes(engine.block))
        self.static_outputs = self.static_grads = self.inner = None
        self.is_reset = False
        mates.append(self)

    def __call__(self, *given):
        assert not self.is_reset
        return Replayed.apply(self, *given)

    def reset(self):
        self.is_reset = True


class Replayed(torch.autograd.Function):
    """The pass through a FakeGraph, which spoils its memory as a pool that is used again would."""

    @staticmethod
    def forward(ctx, graph, *given):
        ctx.graph = graph
        graph.engine.replays.append(graph)
        assert len(given) == len(graph.surface)
        for static, value in zip(graph.surface, given, strict=True):
            if static.data_ptr() != value.data_ptr():
                static.data.copy_(value)
        graph.engine.owner[graph.pool] = graph.mates
        FakeGraph.replaying = True
        with torch.enable_grad(), installed(graph.weights):
            graph.inner = as_tuple(graph.module(*graph.surface))
        FakeGraph.replaying = False
        if graph.static_outputs is None:
            graph.static_outputs = [torch.empty_like(o).detach() for o in graph.inner]
        for static, value in zip(graph.static_outputs, graph.inner, strict=True):
            static.copy_(value.detach())
        given = tuple(o.detach() for o in graph.static_outputs)
        return given if len(given) > 1 else given[0]

    @staticmethod
    def backward(ctx, *grads):
        graph = ctx.graph
        assert not graph.is_reset
        if graph.engine.owner[graph.pool] is not graph.mates:  # another bucket's activations lie there
            return None, *(torch.full_like(s, torch.nan) for s in graph.surface)
        heads = [(o, g.clone()) for o, g in zip(graph.inner, grads, strict=True) if o.requires_grad]
        for later in graph.mates[graph.mates.index(graph) + 1 :]:
            for spoilt in (*later.static_outputs, *(later.static_grads or ())):
                spoilt.fill_(torch.nan if spoilt.is_floating_point() else 1)
        found = torch.autograd.grad([o for o, _ in heads], graph.surface, [g for _, g in heads])
        if graph.static_grads is None:
            graph.static_grads = [torch.empty_like(g) for g in found]
        for static, value in zip(graph.static_grads, found, strict=True):
            static.copy_(value)
        return None, *(g.detach() for g in graph.static_grads)


class FakeEngine:
    """make_graphed_callables, and what it was asked for."""

    def __init__(self):
        self.calls, self.replays, self.owner = [], [], {}
        self.fails, self.block = False, None

    def __call__(self, modules, sample_args, *, post_warmup_hook, num_warmup_iters, pool, **settings):
        assert isinstance(modules, tuple)
        assert not any(list(m.parameters()) or m._forward_pre_hooks for m in modules)
        self.calls.append(SimpleNamespace(modules=modules, sample_args=sample_args, pool=pool, settings=settings))
        for _ in range(num_warmup_iters):
            self._pass(modules, sample_args)
        post_warmup_hook()
        LayerPass.__call__ = lambda self, *args: nn.Module.__call__(self, *args)  # as it wraps each module's class
        gc.disable()
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        FusedScale.capturing = True  # a capture runs no kernel
        self._pass(modules, sample_args)
        FusedScale.capturing = False
        gc.enable()
        LayerPass.__call__ = nn.Module.__call__
        mates = []
        return tuple(FakeGraph(self, mates, m, a, pool) for m, a in zip(modules, sample_args, strict=True))

    def _pass(self, modules, sample_args):
        outputs = [module(*args) for module, args in zip(modules, sample_args, strict=True)]
        for output, args in zip(reversed(outputs), reversed(sample_args), strict=True):
            torch.rand(())  # draws from the random state
            heads = [o for o in as_tuple(output) if o.requires_grad]
            grads = torch.autograd.grad(heads, args, [torch.full_like(o, 3.0) for o in heads])
            assert len(grads) == len(args)


def make_block(num_layers=LAYERS, **settings):
    """A block of megatron-core's own layers with `Attention` inside; `settings` go to its configuration."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        cuda_graph_impl="transformer_engine",
        cuda_graph_modules=[],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        **settings,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = Attention
    return TransformerBlock(config, spec).train()


MODULES = ["attn", "moe_router"]
"""The parts of layers with dropless experts that are captured."""


def make_experts(
    *,
    dispatcher="allgather",
    graphs=True,
    shared=None,
    every=2,
    balancing="aux_loss",
    bias=False,
    grouped=False,
    **more,
):
    """A dense layer between two with dropless experts; `grouped` ones are those that run as grouped products."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        ffn_hidden_size=16,
        use_cpu_initialization=True,
        cuda_graph_impl="transformer_engine" if graphs else "none",
        cuda_graph_modules=MODULES if graphs else [],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        add_bias_linear=False,
        num_moe_experts=4,
        moe_layer_freq=[int(n % every == 0) for n in range(LAYERS)],
        moe_router_topk=2,
        moe_token_dispatcher_type=dispatcher,
        moe_router_load_balancing_type=balancing,
        moe_aux_loss_coeff=0.1,
        moe_shared_expert_intermediate_size=shared,
        moe_router_enable_expert_bias=bias,
        moe_router_score_function="sigmoid" if bias else "softmax",
        **more,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = Attention
    if grouped:
        group_experts(spec.layer_specs)
    block = TransformerBlock(config, spec).train()
    for layer in block.layers:
        if layer.is_moe_layer:
            torch.nn.init.normal_(layer.mlp.router.weight)  # tokens go to all experts
    return block


class Reduction:
    """Megatron's own hooks around parameters with `main_grad`, and how often each was reported ready."""

    def __init__(self, block, overlap=True):
        from megatron.core.distributed import DistributedDataParallel

        self.block = block
        self.ready, self.gathered, self._nodes = Counter(), [], []
        names = {p: name for name, p in block.named_parameters()}
        groups = {
            p: SimpleNamespace(
                register_grad_ready=lambda q, *_: self.ready.update([names[q]]),
                finish_param_sync=lambda name=name, **_: self.gathered.append(name),
            )
            for p, name in names.items()
        }
        this = SimpleNamespace(
            param_to_bucket_group=groups,
            ddp_config=SimpleNamespace(overlap_grad_reduce=overlap, align_param_gather=False),
            force_all_reduce=False,
            use_forward_hook=True,
            overlap_param_gather_with_optimizer_step=False,
            _finish_param_sync_for_bucket_group=lambda group: group.finish_param_sync(),  # called from 0.20 on
        )
        for p in block.parameters():
            p.main_grad = torch.zeros_like(p)
            p.grad_added_to_main_grad = False
            node = p.expand_as(p).grad_fn.next_functions[0][0]
            node.register_hook(DistributedDataParallel._make_backward_post_hook(this, p))
            self._nodes.append(node)
        for part in block.modules():
            part.register_forward_pre_hook(DistributedDataParallel._make_forward_pre_hook(this))

    def zero(self, resets_flags):
        for p in self.block.parameters():
            p.main_grad.zero_()
            if resets_flags:
                p.grad_added_to_main_grad = False


def graphs_of(block, engine=None, *, num_slots=2, **options):
    """Layer graphs of `block`, captured by `engine` for BUCKETS, attached to its decoder."""
    decoder, engine = Decoder(block), engine or FakeEngine()
    engine.block = block
    run = LayerGraphs(decoder, BUCKETS, num_slots=num_slots, make=engine, sample_every=0, **options)
    decoder.attach(run, cp_size=1)
    return run


def forward(block, x, bounds):
    """The output of `block` for hidden states `x`, (tokens, 1, hidden), of documents with these boundaries."""
    return block(
        hidden_states=x,
        attention_mask=None,
        packed_seq_params=packed_seq_params(bounds, max_seqlen=TOKENS, device="cpu"),
    )


def described(block, bounds):
    """Arguments of a decoder's call, as its dispatch sees them."""
    seen = []
    real = LayerGraphs.forward

    def watched(self, *args, **kwargs):
        seen.append((args, kwargs))
        return real(self, *args, **kwargs)

    LayerGraphs.forward = watched
    try:
        with torch.no_grad():
            forward(block, inputs(1)[0].requires_grad_(), bounds)
    finally:
        LayerGraphs.forward = real
    return seen[0]


def inputs(count, seed=1):
    """`count` random hidden states, each of shape (tokens, 1, hidden)."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(TOKENS, 1, HIDDEN, generator=generator) for _ in range(count)]


def one_f_one_b(count):
    """forward 0, forward 1, backward 0, forward 2, backward 1, ...: two micro-batches in flight."""
    yield "f", 0
    for i in range(1, count):
        yield "f", i
        yield "b", i - 1
    yield "b", count - 1


def train(block, batches, order, between=lambda step: None):
    """All outputs and input gradients of one step after the other, as they were when they came."""
    seen, held = [], {}
    for kind, i in order:
        if kind == "f":
            x = batches[i][0].clone().requires_grad_()
            held[i] = x, forward(block, x, batches[i][1])
            seen.append(held[i][1].detach())
        else:
            x, y = held.pop(i)
            y.square().sum().backward()
            seen.append(x.grad)
    return seen


MIXED = [SMALL, LARGE, OVER, SMALL, SMALL, OVER, LARGE, LARGE]
