"""A module's state around captures: restored buffers and generators, fresh parameters, and where everything lies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def unchanged_state(
    module: nn.Module,
    generators: Sequence[torch.Generator],
    extra: Callable[[], Sequence[torch.Tensor]] = tuple,
) -> Iterator[None]:
    """Restore generators' states, the module's buffers and the `extra` tensors after the block, so that warm-up passes
    change no number of the run.

    Tensors that `extra` returns only after the block, because the block made them, are set to zero.

    Args:
        module: the module whose buffers are restored.
        generators: CUDA generators whose states are restored.
        extra: returns further tensors that passes change.
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
    """Replace the module's parameters, inside the block, by fresh ones over the same memory; yields id of original ->
    alias.

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

    These are the modules' own tables, and the attributes of plain objects that modules hold: Megatron's mixer of
    state-space layers has such an object, which keeps the mixer's parameters.
    """
    own = {id(p) for p in module.parameters()}
    for owner in module.modules():
        held = (v.__dict__ for v in vars(owner).values() if _is_plain(v))
        for home in (owner._parameters, *held):
            for name, value in home.items():
                if isinstance(value, nn.Parameter) and id(value) in own:
                    yield home, name, value


def _is_plain(value: Any) -> bool:
    """Whether `value` is an object with attributes of its own, and neither a module nor a tensor."""
    attributes = getattr(value, "__dict__", None)
    return isinstance(attributes, dict) and not isinstance(value, nn.Module | torch.Tensor)


_AT_A_TIME = 100
"""Submodules, and parameters, of which one check looks at what takes turns."""
_TAKES_GRADIENT, _GRADIENT_HOOKS = attrgetter("requires_grad"), attrgetter("_backward_hooks")


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
        """Remember what `module` is made of now.

        Args:
            module: the module whose graphs were captured.
            runs_hook: whether replays run a forward pre-hook themselves: such hooks may come and go.
        """
        self._parts = [_Part(name, part, runs_hook) for name, part in module.named_modules()]
        self._parameters = [one for part in self._parts for one in part.placed("parameter", part.module._parameters)]
        self._buffers = [one for part in self._parts for one in part.placed("buffer", part.module._buffers)]
        self._turn = 0
        self._prepare()

    def check(self) -> None:
        """Make sure that replays do what the module would do now.

        It costs the host about 40 microseconds for 400 submodules and 300 parameters.

        Raises:
            RuntimeError: names what was added, removed, replaced, moved or set to another value since the captures.
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
        self._tensors = [*parameters, *(one.tensor for one in self._buffers)]
        own = any(type(tensor).data_ptr is not torch.Tensor.data_ptr for tensor in self._tensors)
        self._address = methodcaller("data_ptr") if own else torch.Tensor.data_ptr
        self._addresses = [one.address for one in (*self._parameters, *self._buffers)]
        # equal tensors of one element could pass for one another, and tables of buffers may grow
        self._one_by_one = [*self._buffers, *(one for one in self._parameters if one.tensor.numel() == 1)]
        rates = [rate for part in self._parts for rate in part.rates]
        self._rate_tables, self._rate_keys = [rate[0] for rate in rates], [rate[1] for rate in rates]
        self._rates = [rate[3] for rate in rates]
        self._hooks_made = RemovableHandle.next_id
        self._hooks = empty_hooks, parameters, [*map(_GRADIENT_HOOKS, parameters)]
        turns = -(-max(len(modules), len(parameters)) // _AT_A_TIME)
        self._turns = [
            _Turn(
                modules=self._parts[turn::turns],
                parameters=self._parameters[turn::turns],
                hooks=empty_hooks[turn::turns],
            )
            for turn in range(turns)
        ]

    def _is_unchanged(self) -> bool:
        """Whether nothing of what this check looks at differs; False, too, where only hooks of replays' own do."""
        self._turn = (self._turn + 1) % len(self._turns)
        try:
            return (
                self._filled == self._copies
                and not any(self._empty)
                and [*map(self._address, self._tensors)] == self._addresses
                and all(one.home.get(one.key) is one.tensor for one in self._one_by_one)
                and [*map(dict.get, self._rate_tables, self._rate_keys)] == self._rates
                and self._turns[self._turn].is_unchanged()
                and (RemovableHandle.next_id == self._hooks_made or self._has_no_new_hook())
            )
        except Exception:  # a tensor took the place of another one: what they are compared to has no truth
            return False

    def _has_no_new_hook(self) -> bool:
        """Whether hooks that were made since the last look, on any module or tensor, are none of this module's."""
        made = RemovableHandle.next_id
        tables, parameters, hooks = self._hooks
        if any(tables) or [*map(_GRADIENT_HOOKS, parameters)] != hooks:
            return False
        self._hooks_made = made
        return True


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


class _Turn:
    """The part of a module that one check looks at more closely."""

    def __init__(
        self, modules: Sequence[_Part], parameters: Sequence[_Placed], hooks: Sequence[dict[int, Any]]
    ) -> None:
        self._modules, self._kinds = [part.module for part in modules], [part.kind for part in modules]
        self._attributes, self._forwards = [vars(part.module) for part in modules], [part.forward for part in modules]
        self._parameters, self._takes = [p.tensor for p in parameters], [p.takes_gradient for p in parameters]
        self._hooks = hooks

    def is_unchanged(self) -> bool:
        return (
            [*map(_TAKES_GRADIENT, self._parameters)] == self._takes
            and [*map(dict.get, self._attributes, repeat("forward"))] == self._forwards
            and [*map(type, self._modules)] == self._kinds
            and not any(self._hooks)
        )


def changes_since(placement: Placement | None) -> str:
    """How parameters and buffers differ from what `placement` remembers; "" if they do not, or nothing is known."""
    if placement is None:
        return ""
    try:
        placement.check()
    except RuntimeError as error:
        return str(error)
    return ""
