"""A module's state around captures: buffers, generators, hooks, where everything lies, and where gradients go."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import repeat
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def find_hooked_modules(module: nn.Module, *, known: Collection[str] = (), name: str = "") -> Iterator[str]:
    """Names of `module` and its submodules that have hooks which a replay would leave out; they begin with `name`.

    These are torch's hooks and pre-hooks of forward and backward passes, and those with which accelerate moves weights.
    Hooks that one of the modules of Python in `known` defines do not count.
    """
    for path, part in module.named_modules(prefix=name):
        kinds = (part._forward_pre_hooks, part._forward_hooks, part._backward_pre_hooks, part._backward_hooks)
        hooks = (hook for kind in kinds for hook in kind.values())
        if any(find_home(hook) not in known for hook in hooks) or getattr(part, "_hf_hook", None) is not None:
            yield path or type(module).__name__


def find_hooked_parameters(module: nn.Module, *, name: str = "") -> Iterator[str]:
    """Names of parameters with a hook on their gradient; hooks on its accumulation do not count, which replays run."""
    return (path for path, parameter in module.named_parameters(prefix=name) if parameter._backward_hooks)


def describe_hooked_modules(names: Sequence[str]) -> str:
    """Why modules with hooks cannot be captured, and what to do about it."""
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"modules with hooks, which a replay does not run: {some}; remove the hooks"


def find_home(hook: Callable[..., Any]) -> str | None:
    """Name of the module of Python that defines `hook`."""
    return getattr(inspect.getmodule(hook), "__name__", None)


@contextmanager
def unchanged_state(
    module: nn.Module,
    generators: Sequence[torch.Generator],
    extra: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Iterator[None]:
    """Restore generators' states, buffers and the `extra` tensors after the block, so that warm-up passes change no
    number of the run; tensors that `extra` returns only after the block are set to zero."""
    put_back = remember_state(module, generators, extra)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        put_back()


def remember_state(
    module: nn.Module, generators: Sequence[torch.Generator], extra: Callable[[], Sequence[torch.Tensor]]
) -> Callable[[], None]:
    """A function that gives generators, buffers and the `extra` tensors the states and values that they have now."""
    states = [partial(generator.set_state, generator.get_state()) for generator in generators]
    kept = KeptTensors(module, extra)

    def put_back() -> None:
        for put in states:
            put()
        kept.put_back(replaced=False)  # graphs read the memory of buffers that took the place of others

    return put_back


@contextmanager
def unchanged(
    module: nn.Module,
    device: torch.device,
    generators: Sequence[torch.Generator],
    extra: Callable[[], Sequence[torch.Tensor]],
) -> Iterator[Callable[[], None]]:
    """Yield a function that puts random states, the module's buffers and the `extra` tensors back as they are now.

    It is called at the end, too, and the parameters' gradients are then put back as well. Inside the block their
    post-accumulate hooks are taken off, so that no replayed backward runs them.

    `generators` are those that the module draws from besides torch's default ones for the host and `device`.
    """
    states = states_of(device, generators)
    kept = KeptTensors(module, extra)
    gradients = [_Gradient(parameter) for parameter in module.parameters()]

    def put_back() -> None:
        for put in states:
            put()
        kept.put_back()

    try:
        yield put_back
    finally:
        put_back()
        for gradient in gradients:
            gradient.put_back()


class KeptTensors:
    """The values that a module's buffers, and the tensors outside it that `extra` returns, have when this is made."""

    def __init__(self, module: nn.Module, extra: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._extra = extra
        self._buffers = [
            (owner._buffers, name, f"{prefix}.{name}".lstrip("."), buffer, buffer.detach().clone())
            for prefix, owner in module.named_modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._others = [(tensor, tensor.detach().clone()) for tensor in extra()]

    def put_back(self, *, replaced: bool = True) -> None:
        """Give all tensors these values again, also buffers that were `replaced` since then, which come back; tensors
        that `extra` returns only since then are set to zero.
        """
        with torch.no_grad():
            for table, name, _, buffer, saved in self._buffers:
                buffer.copy_(saved)
                if replaced:
                    table[name] = buffer
            for tensor, saved in self._others:
                tensor.copy_(saved)
            known = {id(tensor) for tensor in (*(b[3] for b in self._buffers), *(t for t, _ in self._others))}
            for tensor in self._extra():
                if id(tensor) not in known:
                    tensor.zero_()

    def values(self) -> dict[str, torch.Tensor]:
        """The copies, by the name of the buffer, or by the number of the tensor outside the module."""
        others = {f"outside the module, tensor {i}": saved for i, (_, saved) in enumerate(self._others)}
        return {**{path: saved for _, _, path, _, saved in self._buffers}, **others}


def states_of(device: torch.device, generators: Sequence[torch.Generator]) -> list[Callable[[], object]]:
    """Functions that set Python's, NumPy's, torch's (host and `device`) and the `generators`' states to the present."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    found: list[Callable[[], object]] = [
        lambda: random.setstate(python),
        lambda: np.random.set_state(numpy),
        lambda: torch.set_rng_state(host),
    ]
    if device.type == "cuda":
        gpu = torch.cuda.get_rng_state(device)
        found.append(lambda: torch.cuda.set_rng_state(gpu, device))
    found += [partial(generator.set_state, generator.get_state()) for generator in generators]
    return found


class _Gradient:
    """A parameter's gradients as they are now: `.grad`, `main_grad`, and what kernels note of them."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self._tensors = {name: getattr(parameter, name, None) for name in ("grad", "main_grad")}
        self._values = {name: None if t is None else t.detach().clone() for name, t in self._tensors.items()}
        self._added: Any = getattr(parameter, "grad_added_to_main_grad", None)
        self._hooks: Any = parameter._post_accumulate_grad_hooks
        if self._hooks:
            parameter._post_accumulate_grad_hooks = None

    def put_back(self) -> None:
        parameter = self._parameter
        for name, tensor in self._tensors.items():
            values = self._values[name]
            if tensor is not None and values is not None:
                with torch.no_grad():
                    tensor.copy_(values)
                setattr(parameter, name, tensor)
        if self._tensors["grad"] is None:
            parameter.grad = None
        if self._added is not None:
            parameter.grad_added_to_main_grad = self._added
        if self._hooks:
            parameter._post_accumulate_grad_hooks = self._hooks


@contextmanager
def aliased_parameters(module: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Replace the module's parameters, inside the block, by fresh ones over the same memory, by original id.

    Autograd remembers the stream on which a parameter's first gradient was made, and a capture on another stream then
    fails. Fresh parameters have no such memory.
    """
    originals = list(parameter_homes(module))
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


def parameter_homes(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
    """Every place in which the module's passes look a parameter up: (table, name in the table, parameter).

    These are modules' tables, and attributes of plain objects that modules hold, as Megatron's state-space mixer does.
    """
    own = {id(p) for p in module.parameters()}
    homes: dict[int, dict[str, Any]] = {}  # each once: modules share objects, such as their configuration
    for owner in module.modules():
        homes[id(owner._parameters)] = owner._parameters
        for value in vars(owner).values():
            home = getattr(value, "__dict__", None)  # few values have one
            if home and isinstance(home, dict) and not isinstance(value, (nn.Module, torch.Tensor)):
                homes[id(home)] = home
    for home in homes.values():
        yield from ((home, name, value) for name, value in home.items() if id(value) in own)


_AT_A_TIME = 100
"""Submodules, and parameters, of which one check looks at what takes turns."""
_TAKES_GRADIENT, _GRADIENT_HOOKS = attrgetter("requires_grad"), attrgetter("_backward_hooks")
_Comparison = tuple[Callable[..., Any], list[Iterable[Any]], list[Any]]
"""A function, the lists of its arguments, and the results that it must have for all of them."""


class Placement:
    """What graphs of a module rely on since their capture: its parts, and where its parameters and buffers lie.

    Every check sees a submodule or parameter that was added, removed, replaced or moved; a buffer that was replaced or
    moved; a hook that was registered or taken off; and another value of a rate, which is a float or a dropout among the
    attributes of a submodule or of its `config`. In a module of more than 100 parts or parameters, what costs more
    takes turns and shows within `ceil(number / 100)` checks, in a whole layer at once: whether a parameter takes a
    gradient, the class of a submodule, a `forward` of its own, and tables of hooks that were written to directly.
    Other attributes may change: modules count and mark with integers, booleans and objects as they run.
    """

    def __init__(self, module: nn.Module, runs_hook: Callable[[Any], bool] = lambda hook: False) -> None:
        """Remember what the captured `module` is made of now; `runs_hook`: as in `Surroundings`."""
        self._parts = [_Part(name, part, runs_hook) for name, part in module.named_modules()]
        self._parameters = [one for part in self._parts for one in part.placed("parameter", part.module._parameters)]
        self._buffers = [one for part in self._parts for one in part.placed("buffer", part.module._buffers)]
        self._turn = 0
        self._prepare()

    def check(self) -> None:
        """Make sure that replays do what the module would do now, in about 40 microseconds for 400 submodules and 300
        parameters. RuntimeError names what was added, removed, replaced, moved or set to another value.
        """
        if self._is_unchanged():
            return
        looked_at: list[_Part | _Placed] = [*self._parts, *self._parameters, *self._buffers]
        changes = (one.find_change() for one in looked_at)
        if change := next(filter(None, changes), ""):
            raise RuntimeError(
                f"{change} after its graphs were captured; make such changes before the first micro-batch, or call "
                "recapture()"
            )
        self._prepare()  # only hooks that replays run themselves have come or gone

    def _prepare(self) -> None:
        """Lay out in lists what `_is_unchanged` compares without a loop in Python."""
        modules, parameters = [part.module for part in self._parts], [one.tensor for one in self._parameters]
        tables: list[dict[Any, Any]] = [table for m in modules for table in (m._modules, m._parameters)]
        hooks = [table for m in modules for table in _hook_tables(m)]
        self._filled: list[dict[Any, Any]] = [table for table in (*tables, *hooks) if table]
        self._copies = [dict(table) for table in self._filled]
        self._empty, empty_hooks = ([table for table in some if not table] for some in (tables, hooks))
        placed = [*self._parameters, *self._buffers]
        own = any(type(one.tensor).data_ptr is not torch.Tensor.data_ptr for one in placed)
        address = methodcaller("data_ptr") if own else torch.Tensor.data_ptr
        # equal tensors of one element could pass for one another, and tables of buffers may grow
        self._one_by_one = [*self._buffers, *(one for one in self._parameters if one.tensor.numel() == 1)]
        rates = [rate for part in self._parts for rate in part.rates]
        self._always: list[_Comparison] = [
            (address, [[one.tensor for one in placed]], [one.address for one in placed]),
            (dict.get, [[rate[0] for rate in rates], [rate[1] for rate in rates]], [rate[3] for rate in rates]),
        ]
        self._hooks_made = RemovableHandle.next_id
        self._hooks: list[_Comparison] = [
            (len, [empty_hooks], [0] * len(empty_hooks)),
            (_GRADIENT_HOOKS, [parameters], [*map(_GRADIENT_HOOKS, parameters)]),
        ]
        turns = -(-max(len(modules), len(parameters)) // _AT_A_TIME)
        self._turns = [self._take_turn(slice(turn, None, turns), empty_hooks) for turn in range(turns)]

    def _take_turn(self, some: slice, empty_hooks: list[dict[int, Any]]) -> list[_Comparison]:
        """The part of a module that one check looks at more closely."""
        parts, parameters, hooks = self._parts[some], self._parameters[some], empty_hooks[some]
        modules = [part.module for part in parts]
        return [
            (_TAKES_GRADIENT, [[one.tensor for one in parameters]], [one.takes_gradient for one in parameters]),
            (dict.get, [[vars(m) for m in modules], repeat("forward")], [part.forward for part in parts]),
            (type, [modules], [part.kind for part in parts]),
            (len, [hooks], [0] * len(hooks)),
        ]

    def _is_unchanged(self) -> bool:
        """Whether nothing of what this check looks at differs; False, too, where only hooks of replays' own do."""
        self._turn = (self._turn + 1) % len(self._turns)
        try:
            return (
                self._filled == self._copies
                and not any(self._empty)
                and _are_equal(self._always)
                and all(one.home.get(one.key) is one.tensor for one in self._one_by_one)
                and _are_equal(self._turns[self._turn])
                and (RemovableHandle.next_id == self._hooks_made or self._has_no_new_hook())
            )
        except Exception:  # a tensor took the place of another one: what they are compared to has no truth
            return False

    def _has_no_new_hook(self) -> bool:
        """Whether hooks that were made since the last look, on any module or tensor, are none of this module's."""
        made = RemovableHandle.next_id
        if not _are_equal(self._hooks):
            return False
        self._hooks_made = made
        return True


def _are_equal(comparisons: list[_Comparison]) -> bool:
    return all([*map(function, *arguments)] == expected for function, arguments, expected in comparisons)


class _Part:
    """One submodule, as it was captured."""

    def __init__(self, name: str, module: nn.Module, runs_hook: Callable[[Any], bool]) -> None:
        self.module, self._runs_hook = module, runs_hook
        self._path = f"{name}." if name else ""
        self._shown = f"submodule {name}" if name else "the module"
        self.kind, self.forward = type(module), vars(module).get("forward")
        self._submodules, self._parameters = dict(module._modules), dict(module._parameters)
        self._hooks = self._foreign_hooks()
        config = getattr(vars(module).get("config"), "__dict__", {})
        self.rates = [
            (table, key, prefix + key, value)
            for prefix, table in (("", vars(module)), ("config.", config))
            for key, value in table.items()
            if isinstance(value, float) or (type(value) is int and (key == "p" or "dropout" in key))
        ]
        """The numbers that passes compute with: their table, their key there, their shown name, their value."""

    def placed(self, what: str, home: dict[str, Any]) -> Iterator[_Placed]:
        """The parameters or buffers in one of the submodule's tables."""
        for key, tensor in home.items():
            if tensor is not None:
                yield _Placed(what, f"{self._path}{key}", home, key, tensor)

    def find_change(self) -> str:
        """What changed since the captures, by name; "" if nothing did."""
        for what, before, now in (
            ("submodule", self._submodules, self.module._modules),
            ("parameter", self._parameters, self.module._parameters),
        ):
            for key in {**before, **now}:
                old, new = before.get(key), now.get(key)
                if old is not new:
                    done = "added" if old is None else "removed" if new is None else "replaced"
                    return f"{what} {self._path}{key} was {done}"
        if type(self.module) is not self.kind:
            return f"the class of {self._shown} changed from {self.kind.__name__} to {type(self.module).__name__}"
        if vars(self.module).get("forward") != self.forward:
            return f"forward of {self._shown} was replaced"
        if self._foreign_hooks() != self._hooks:
            return f"{self._shown} got or lost a hook"
        for table, key, shown, value in self.rates:
            if [table.get(key)] != [value]:  # in lists, NaN equals itself
                return f"{shown} of {self._shown} changed from {value} to {table.get(key)}"
        return ""

    def _foreign_hooks(self) -> list[dict[int, Any]]:
        """The hooks that replays leave out."""
        before, *others = _hook_tables(self.module)
        return [{key: hook for key, hook in before.items() if not self._runs_hook(hook)}, *map(dict, others)]


def _hook_tables(module: nn.Module) -> Iterator[dict[int, Any]]:
    """The tables of the hooks that a pass of `module` runs."""
    yield from (module._forward_pre_hooks, module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)


class _Placed:
    """One parameter or buffer, as it was captured."""

    def __init__(self, what: str, name: str, home: dict[str, Any], key: str, tensor: torch.Tensor) -> None:
        self.home, self.key, self.tensor, self.address = home, key, tensor, tensor.data_ptr()
        self._what, self._name = what, name
        self.takes_gradient, self._hooked = tensor.requires_grad, bool(tensor._backward_hooks)

    def find_change(self) -> str:
        """What changed since the captures, by name; "" if nothing did."""
        shown = f"{self._what} {self._name} of shape {tuple(self.tensor.shape)}"
        if self.home.get(self.key) is not self.tensor:
            return f"{shown} was replaced"
        if self.tensor.data_ptr() != self.address:
            return f"{shown} moved in memory"
        if self._what == "parameter" and self.tensor.requires_grad != self.takes_gradient:
            return f"requires_grad of {shown} changed"
        if self._what == "parameter" and bool(self.tensor._backward_hooks) != self._hooked:
            return f"{shown} got or lost a gradient hook"
        return ""


def changes_since(placement: Placement | None, *checks: Callable[[], None]) -> str:
    """What the first failing check of `placement`, if there is one, and of `checks` reports; "" if none fails."""
    for check in (*([placement.check] if placement is not None else []), *checks):
        try:
            check()
        except RuntimeError as error:
            return str(error)
    return ""


@dataclass(slots=True)
class GradientBuffers:
    """One gradient buffer for every parameter of a module, shared by all its graphs. The bank owns them.

    A buffer is the parameter's `main_grad` where it has one, as under Megatron, and else a tensor that becomes its
    `.grad`. All graphs add to the buffers in place, so their addresses must not change between captures and replays.
    """

    parameters: list[nn.Parameter]
    buffers: list[torch.Tensor] = field(default_factory=list)
    """The buffer of each parameter, of its shape and on its device."""
    uses_main_grad: list[bool] = field(default_factory=list)
    """Whether each parameter's buffer is its `main_grad`."""
    all_are_inputs: bool = False
    """Whether every parameter is an input of replays: autograd runs the hooks on its accumulation, such as DDP's."""
    _pointers: list[int] = field(default_factory=list)
    _chosen: dict[tuple[bool, ...], list[nn.Parameter]] = field(default_factory=dict)
    """Results of `with_main_grad`, by its argument."""

    @classmethod
    def allocate(cls, parameters: Sequence[nn.Parameter], *, all_are_inputs: bool = False) -> GradientBuffers:
        """The parameters' `main_grad` where they have one, else new tensors that become their `.grad`."""
        accumulators = cls(list(parameters), all_are_inputs=all_are_inputs)
        _fires_without_gradient()  # cached here: the check runs a backward, and must not run inside another one
        for parameter in accumulators.parameters:
            main_grad = getattr(parameter, "main_grad", None)
            accumulators.uses_main_grad.append(main_grad is not None)
            accumulators.buffers.append(main_grad if main_grad is not None else torch.zeros_like(parameter))
            accumulators._pointers.append(accumulators.buffers[-1].data_ptr())
        return accumulators

    def with_main_grad(self, touched: Sequence[bool]) -> list[nn.Parameter]:
        """The `touched` parameters whose gradient a backward adds to `main_grad`, or to `.grad` if `all_are_inputs`."""
        key = tuple(touched)
        if key not in self._chosen:
            marks = zip(self.parameters, self.uses_main_grad, touched, strict=True)
            self._chosen[key] = [p for p, main, used in marks if used and (main or self.all_are_inputs)]
        return self._chosen[key]

    def collect(self, aliases: Sequence[nn.Parameter]) -> set[int]:
        """Make the next pass over `aliases` add each gradient to its buffer as soon as autograd has it.

        `aliases` stand for the module's own parameters in the pass, in the same order. Kernels that have added a
        gradient to `main_grad` themselves set `grad_added_to_main_grad` on the parameter and hand a dummy to autograd:
        Transformer Engine and megatron-core's DistributedDataParallel have agreed on this. The returned positions of
        the parameters that got a gradient fill while the pass runs.
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

    def check(self) -> None:
        """Raise RuntimeError where a parameter's `main_grad` is no longer the buffer that graphs add to."""
        for parameter, buffer, pointer, main in zip(
            self.parameters, self.buffers, self._pointers, self.uses_main_grad, strict=True
        ):
            own = getattr(parameter, "main_grad", None)
            if own is not (buffer if main else None) or (main and buffer.data_ptr() != pointer):
                raise RuntimeError(
                    f"main_grad of a parameter of shape {tuple(parameter.shape)} was made, replaced or moved after its "
                    "graphs were captured"
                )

    def attach(self, touched: Sequence[bool]) -> None:
        """Make each buffer its parameter's `.grad`, so that a backward graph adds to the gradient that is there.

        A `.grad` of None counts as zero. A `.grad` that an eager pass or the user made is copied into the buffer.
        RuntimeError: a `main_grad` was replaced since the captures, or a buffer moved, as by `parameter.grad.data =`.
        """
        empty, targets, sources = [], [], []
        for parameter, buffer, pointer, main, used in zip(
            self.parameters, self.buffers, self._pointers, self.uses_main_grad, touched, strict=True
        ):
            if buffer.data_ptr() != pointer or (main and getattr(parameter, "main_grad", None) is not buffer):
                raise RuntimeError(
                    f"{'main_grad' if main else 'grad'} of a parameter of shape {tuple(parameter.shape)} was replaced "
                    "or moved after its graphs were captured; call recapture()"
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
        """Run the post-accumulate hooks of the `touched` parameters, as autograd would after adding to `.grad`.

        Parameters with `main_grad`, or all, are inputs of the replay, to which the replay returns no gradient. Some
        versions of torch run their hooks all the same; the hooks are then left to torch, so that they run once.
        """
        for parameter, used, main in zip(self.parameters, touched, self.uses_main_grad, strict=True):
            hooks = parameter._post_accumulate_grad_hooks
            if hooks and used and not ((main or self.all_are_inputs) and _fires_without_gradient()):
                for hook in tuple(hooks.values()):
                    hook(parameter)


def spare_main_grads(aliases: Sequence[nn.Parameter]) -> None:
    """Give `aliases` a scratch `main_grad` until the caller sets it: kernels of warm-up passes may write to it."""
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    grads = [(alias, g) for alias in aliases if (g := getattr(alias, "main_grad", None)) is not None]
    for _, grad in grads:
        key = grad.dtype, grad.device
        sizes[key] = max(sizes.get(key, 0), grad.numel())
    scratch = {key: torch.zeros(size, dtype=key[0], device=key[1]) for key, size in sizes.items()}
    for alias, grad in grads:
        spare = scratch[grad.dtype, grad.device][: grad.numel()].view(grad.shape)
        alias.main_grad = spare  # type: ignore[attr-defined]


class NoGradient(torch.autograd.Function):
    """A function of `x` that returns no gradient to its second input, and calls `note` in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        """A copy of `x`."""
        ctx.note = note
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient of `x` alone."""
        ctx.note()
        return grad, None, None


@cache
def _fires_without_gradient() -> bool:
    """Whether this torch runs a parameter's post-accumulate hooks when a backward returns no gradient to it."""
    fired: list[torch.Tensor] = []
    parameter, x = nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(fired.append)
    NoGradient.apply(x, parameter, lambda: None).backward()
    return bool(fired)
