"""One captured forward/backward pair over static buffers.

Buffers and who owns them: the slot owns the static inputs and output gradients and shares them among its buckets; the
pass owns its outputs and input gradients, which live in the slot's memory pool and are copied out after every replay;
the bank owns the gradient buffers of the parameters, one a parameter, which every pass adds to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thdprof.offload.plan import OffloadPlan
from thdprof.runtime.offload.saved_tensors import NoOffload, PassOffload

WARMUP_PASSES = 2
"""Passes before a capture: libraries make their handles and workspaces, and kernels tune themselves, in the first."""


class WarmupError(RuntimeError):
    """A pass before the capture failed: unlike a failed capture, it has run, and perhaps communicated, up to there."""


@dataclass(slots=True, kw_only=True)
class CapturedPass:
    """Two graphs: replay `forward` after writing the inputs, `backward` after writing the output gradients."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph
    outputs: tuple[torch.Tensor, ...]
    """Written by every forward replay; the next replay in the slot overwrites them."""
    differentiable: tuple[bool, ...]
    """Which outputs take a gradient."""
    spec: Any
    """How to put the outputs together as the module returned them."""
    input_grads: tuple[torch.Tensor | None, ...]
    """Written by every backward replay, one for every input; None where no gradient flows."""
    output_grads: tuple[torch.Tensor, ...]
    """To be written before a backward replay, one for every differentiable output; the slot owns them."""
    touched: tuple[bool, ...]
    """Which of the parameters the backward pass adds a gradient to."""
    pool_bytes: int
    """What the slot's pool grew by."""
    offload: OffloadPlan | None = None
    """Which activations are on the host between forward and backward; None: all stay."""


@dataclass(slots=True)
class GradientBuffers:
    """Persistent gradient accumulators of a module's parameters, shared by all its graphs."""

    parameters: list[nn.Parameter]
    buffers: list[torch.Tensor] = field(default_factory=list)
    uses_main_grad: list[bool] = field(default_factory=list)
    _pointers: list[int] = field(default_factory=list)
    _chosen: dict[tuple[bool, ...], list[nn.Parameter]] = field(default_factory=dict)

    @classmethod
    def of(cls, parameters: Sequence[nn.Parameter]) -> GradientBuffers:
        """Buffers for `parameters`: `main_grad` where a parameter has one, else a new one that becomes `.grad`."""
        made = cls(list(parameters))
        _fires_without_gradient()  # asked outside any backward
        for parameter in made.parameters:
            main_grad = getattr(parameter, "main_grad", None)
            made.uses_main_grad.append(main_grad is not None)
            made.buffers.append(main_grad if main_grad is not None else torch.zeros_like(parameter))
            made._pointers.append(made.buffers[-1].data_ptr())
        return made

    def with_main_grad(self, touched: Sequence[bool]) -> list[nn.Parameter]:
        """Parameters that a backward pass touches and whose gradient goes to `main_grad`."""
        key = tuple(touched)
        if key not in self._chosen:
            found = zip(self.parameters, self.uses_main_grad, touched, strict=True)
            self._chosen[key] = [parameter for parameter, main, used in found if main and used]
        return self._chosen[key]

    def collect(self, aliases: Sequence[nn.Parameter]) -> set[int]:
        """Make the next forward and backward over `aliases` add each gradient to its buffer as soon as it is there.

        Kernels that have added it to `main_grad` themselves say so in `grad_added_to_main_grad` and hand a dummy to
        autograd, as Transformer Engine and megatron-core's DistributedDataParallel have agreed.

        Gives the set of positions that will have got one; it fills while the pass runs.
        """
        touched: set[int] = set()

        def hook(position: int, buffer: torch.Tensor | None) -> Callable[[torch.Tensor], None]:
            def arrived(alias: torch.Tensor) -> None:
                touched.add(position)
                if buffer is not None and alias.grad is not None:
                    if not getattr(alias, "grad_added_to_main_grad", False) or getattr(alias, "zero_out_wgrad", False):
                        buffer.add_(alias.grad)
                    alias.grad = None

            return arrived

        for position, (alias, buffer, main) in enumerate(zip(aliases, self.buffers, self.uses_main_grad, strict=True)):
            if main:
                alias.main_grad = buffer  # type: ignore[attr-defined]
                if hasattr(alias, "grad_added_to_main_grad"):
                    alias.grad_added_to_main_grad = False
            else:
                alias.grad = buffer  # autograd adds to it in place
            alias.register_post_accumulate_grad_hook(hook(position, buffer if main else None))
        return touched

    def attach(self, touched: Sequence[bool]) -> None:
        """Make each buffer its parameter's `.grad`, so that a backward graph adds to what is there.

        A `.grad` of None means zero; one that an eager pass or the user made is copied into the buffer.
        """
        empty, targets, sources = [], [], []
        for parameter, buffer, pointer, main, used in zip(
            self.parameters, self.buffers, self._pointers, self.uses_main_grad, touched, strict=True
        ):
            if main and (getattr(parameter, "main_grad", None) is not buffer or buffer.data_ptr() != pointer):
                raise RuntimeError(
                    f"main_grad of a parameter of shape {tuple(parameter.shape)} was replaced or moved after its "
                    "graphs were captured; call recapture()"
                )
            if main or not used:
                continue
            grad = parameter.grad
            if grad is buffer:
                continue
            if grad is None:
                empty.append(buffer)
            else:
                targets.append(buffer)
                sources.append(grad)
            parameter.grad = buffer
        if empty:
            torch._foreach_zero_(empty)
        if targets:
            torch._foreach_copy_(targets, sources)

    def run_hooks(self, touched: Sequence[bool]) -> None:
        """Fire the parameters' post-accumulate hooks, as autograd would after adding to `.grad`.

        Those with `main_grad` are inputs of the replay, which gives autograd no gradient of theirs: some versions of
        torch fire their hooks all the same, and they are left to it then.
        """
        for parameter, used, main in zip(self.parameters, touched, self.uses_main_grad, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if hooks and used and not (main and _fires_without_gradient()):
                for hook in tuple(hooks.values()):
                    hook(parameter)


def spare_main_grads(aliases: Sequence[nn.Parameter]) -> None:
    """Let passes over `aliases` add to scratch memory: kernels may write to `main_grad` themselves.

    Until `main_grad` is theirs again.
    """
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    grads = [(alias, g) for alias in aliases if (g := getattr(alias, "main_grad", None)) is not None]
    for _, grad in grads:
        kind = grad.dtype, grad.device
        sizes[kind] = max(sizes.get(kind, 0), grad.numel())
    scratch = {kind: torch.zeros(size, dtype=kind[0], device=kind[1]) for kind, size in sizes.items()}
    for alias, grad in grads:
        spare = scratch[grad.dtype, grad.device][: grad.numel()].view(grad.shape)
        alias.main_grad = spare  # type: ignore[attr-defined]


class _NoGradient(torch.autograd.Function):
    """Gives its second input no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


@cache
def _fires_without_gradient() -> bool:
    """Whether this torch fires a parameter's post-accumulate hooks where a backward gives it no gradient."""
    fired: list[torch.Tensor] = []
    parameter, x = nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(fired.append)
    _NoGradient.apply(x, parameter).backward()
    return bool(fired)


@contextmanager
def unchanged_state(
    module: nn.Module,
    generators: Sequence[torch.Generator],
    extra: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Iterator[None]:
    """Put back generators' states, buffers and `extra` tensors after the block: warming up changes no number.

    Extra tensors that the block made are set to zero.
    """
    states = [generator.get_state() for generator in generators]
    buffers = [(buffer, buffer.detach().clone()) for buffer in (*module.buffers(), *extra())]
    try:
        yield
    finally:
        torch.cuda.synchronize()
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        with torch.no_grad():
            for buffer, saved in buffers:
                buffer.copy_(saved)
            known = {id(buffer) for buffer, _ in buffers}
            for buffer in extra():
                if id(buffer) not in known:
                    buffer.zero_()


@contextmanager
def aliased_parameters(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replace the module's parameters by fresh ones over the same memory; id of the original -> its alias.

    Autograd keeps, with a parameter, the stream that its gradient was first made on; a capture on another stream then
    fails. Fresh parameters have no past.
    """
    originals = list(_homes(module))
    aliases: dict[int, nn.Parameter] = {}
    for _, _, parameter in originals:
        if id(parameter) not in aliases:
            alias = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            alias.__dict__.update(parameter.__dict__)
            aliases[id(parameter)] = alias
    try:
        for home, name, parameter in originals:
            home[name] = aliases[id(parameter)]
        yield aliases
    finally:
        for home, name, parameter in originals:
            home[name] = parameter


def _homes(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    """Where the module's passes look its parameters up: a table, the name in it, the parameter.

    Besides the modules' own tables these are attributes of plain objects that modules hold, as Megatron's mixer of
    state-space layers has one that keeps the mixer's parameters.
    """
    own = {id(p) for p in module.parameters()}
    for owner in module.modules():
        held = (v.__dict__ for v in vars(owner).values() if _is_plain(v))
        for home in (owner._parameters, *held):
            for name, value in home.items():
                if isinstance(value, nn.Parameter) and id(value) in own:
                    yield home, name, value


def _is_plain(value: Any) -> bool:
    """Whether it is an object with attributes of its own, and neither a module nor a tensor."""
    attributes = getattr(value, "__dict__", None)
    return isinstance(attributes, dict) and not isinstance(value, nn.Module | torch.Tensor)


def capture_pass(
    module: nn.Module,
    call: Callable[[], Any],
    *,
    inputs: Sequence[torch.Tensor],
    static_output_grads: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    gradients: GradientBuffers,
    generators: Sequence[torch.Generator],
    pool: Any,
    stream: torch.cuda.Stream,
    extra_state: Callable[[], Sequence[torch.Tensor]] = tuple,
    offload: PassOffload | None = None,
) -> CapturedPass:
    """Warm up and capture one forward and one backward pass of `call()`, which runs `module` on static inputs.

    Args:
        module: the module that `call` runs; its parameters' gradients go to `gradients`.
        call: runs the module on its static inputs and metadata.
        inputs: the static input tensors, leaves; those that require grad get a gradient.
        static_output_grads: gives static gradient buffers for the differentiable outputs.
        gradients: accumulators of the parameters.
        generators: every random generator that the module draws from; all are registered with both graphs.
        pool: handle of the memory pool to capture into.
        stream: side stream for warm-up and capture.
        extra_state: gives tensors, besides the module's buffers, that the passes must leave as they were.
        offload: moves activations to the host, over `stream`; None: all stay.

    Raises:
        WarmupError: the module failed before the capture.
        RuntimeError: whatever the module does that a capture does not allow.
    """
    _refuse_hooks(gradients.parameters)
    device = stream.device
    moves = offload or NoOffload()
    with (
        aliased_parameters(module) as aliases,
        unchanged_state(module, generators, extra_state),
        _no_autocast_cache(),
    ):
        parameters = [aliases[id(p)] for p in gradients.parameters]
        spare_main_grads(parameters)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(WARMUP_PASSES):
                    with moves.forward():
                        made = _tensors(call())
                    heads = _heads(made)
                    del made
                    # a backward runs outside the forward's autocast
                    with torch.autocast("cuda", enabled=False), moves.backward():
                        torch.autograd.backward(heads, static_output_grads(heads))
                    del heads
                    for leaf in (*inputs, *parameters):
                        leaf.grad = None
            torch.cuda.synchronize(device)
        except Exception as error:
            raise WarmupError(f"{type(error).__name__}: {error}") from error
        touched = gradients.collect(parameters)
        before = _pool_bytes(device, pool)
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        for generator in generators:
            if generator is not torch.cuda.default_generators[device.index]:  # which registers itself
                forward.register_generator_state(generator)
                backward.register_generator_state(generator)
        with torch.cuda.graph(forward, pool=pool, stream=stream, capture_error_mode="thread_local"), moves.forward():
            result = call()
        outputs, spec = _tensors(result), tree_flatten(result)[1]
        heads = _heads(outputs)
        output_grads = static_output_grads(heads)
        with (
            torch.cuda.graph(backward, pool=pool, stream=stream, capture_error_mode="thread_local"),
            torch.autocast("cuda", enabled=False),
            moves.backward(),
        ):
            torch.autograd.backward(heads, output_grads)
        captured = CapturedPass(
            forward=forward,
            backward=backward,
            outputs=tuple(o.detach() for o in outputs),
            differentiable=tuple(o.requires_grad for o in outputs),
            spec=spec,
            input_grads=tuple(x.grad for x in inputs),
            output_grads=tuple(output_grads),
            touched=tuple(i in touched for i in range(len(parameters))),
            pool_bytes=_pool_bytes(device, pool) - before,
            offload=moves.plan,
        )
        for leaf in (*inputs, *parameters):
            leaf.grad = None
        return captured


def _heads(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    heads = [o for o in outputs if o.requires_grad]
    if not heads:
        raise RuntimeError("no output of the module takes a gradient; there is no backward pass to capture")
    return heads


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Cast weights anew in every pass: a graph that reads a cached cast would never see the weights change."""
    enabled = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _refuse_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Gradient hooks run in Python, which a replay does not: ignoring them would give wrong numbers."""
    for parameter in parameters:
        if parameter._backward_hooks:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient hook (Tensor.register_hook), which a "
                "replay cannot run; use register_post_accumulate_grad_hook"
            )


def restore(outputs: Sequence[torch.Tensor], spec: Any) -> Any:
    """The outputs as the module returned them."""
    return tree_unflatten(list(outputs), spec)


def _tensors(result: Any) -> list[torch.Tensor]:
    flat, _ = tree_flatten(result)
    for value in flat:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"a graphed module must return tensors only, got a {type(value).__name__}")
    return flat


def _pool_bytes(device: torch.device, pool: Any) -> int:
    """Bytes that the pool has reserved."""
    segments = torch.cuda.memory_snapshot()
    return sum(
        s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool) and s["device"] == device.index
    )
