"""A model of transformers whose decoder layers run as one graphed stack, while the model itself stays as it is.

The model's forward loops over `self.layers`. While a micro-batch with boundaries runs, that name leads to stand-ins:
each notes the arguments of its layer and hands the hidden states on; the last one runs the whole stack. So embeddings,
rope tables, masks, the last norm, the loss and the model's state_dict are what they are without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from thdprof.dispatch import Bucket, Dispatcher
from thdprof.errors import UsageError
from thdprof.plan import Plan
from thdprof.runtime.graphs.graphed_module import GraphedModule, graphed
from thdprof.runtime.graphs.module_state import find_home
from thdprof.runtime.padding import PackedSequence, boundaries_of, pack, pad_cu_seqlens, shape_of
from thdprof.runtime.replacing import attributes, replaced, shared
from thdprof.transformers.boundaries import BATCH_KEY, HostBoundaries

NOT_FOR_LAYERS = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch"}
)
"""Keyword arguments of a model that its layers do not need: boundaries, which the stack gives them, and the loss's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Stands for a tensor among the arguments of a layer."""

    index: int
    """Which of the tensors of the call it is, from 0."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The keyword arguments of all layers, with `Place` for every tensor."""

    of_layers: tuple[tuple[tuple[str, Any], ...], ...]
    """The names and values of each distinct set of arguments."""
    sets: tuple[int, ...]
    """Which set each layer is called with."""


class UnknownArgument(Exception):
    """A layer was called with an argument that a capture could not follow."""


def gathered(calls: Sequence[dict[str, Any]]) -> tuple[Arguments, list[torch.Tensor]]:
    """The arguments of all layers, and the distinct tensors among them in order.

    Raises:
        UnknownArgument: an argument is neither a tensor, nor a tuple of tensors, nor a constant.
    """
    tensors: list[torch.Tensor] = []
    places: dict[int, Place] = {}
    distinct: list[dict[str, Any]] = []
    described: list[tuple[tuple[str, Any], ...]] = []
    sets: list[int] = []

    def replaced(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in places:
                places[id(value)] = Place(len(tensors))
                tensors.append(value)
            return places[id(value)]
        if isinstance(value, tuple | list):
            return tuple(replaced(name, part) for part in value)
        if value is None or isinstance(value, bool | int | float | str | torch.dtype):
            return value
        raise UnknownArgument(f"{name} is a {type(value).__name__}")

    for call in calls:
        same = (
            n for n, known in enumerate(distinct)
            if known.keys() == call.keys() and all(known[name] is value for name, value in call.items())
        )  # fmt: skip
        known = next(same, None)
        if known is None:
            known = len(distinct)
            distinct.append(call)
            described.append(tuple((name, replaced(name, value)) for name, value in call.items()))
        sets.append(known)
    return Arguments(tuple(described), tuple(sets)), tensors


class LayerStack(nn.Module):
    """All decoder layers of a model, one after the other. The layers stay the model's own.

    Call it with hidden states [1, tokens, hidden], the boundaries, the name of a form of arguments, and its tensors.
    """

    def __init__(self, layers: nn.ModuleList) -> None:
        """The stack of `layers`, each called with hidden states and keyword arguments, and returning hidden states."""
        super().__init__()
        self.layers = layers
        self._forms: list[tuple[Arguments, bool]] = []

    def name_form(self, arguments: Arguments, *, with_logits: bool) -> str:
        """A short name of a form of arguments: calls with one name can share captured graphs.

        Args:
            with_logits: whether layers return the logits of their routers, too.
        """
        if (arguments, with_logits) not in self._forms:
            self._forms.append((arguments, with_logits))
        return f"form {self._forms.index((arguments, with_logits))}"

    def forward(
        self, hidden_states: torch.Tensor, packed: PackedSequence, form: str, *tensors: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Hidden states after all layers, shape [1, tokens, hidden]; with router logits, each [tokens, experts]."""
        arguments, with_logits = self._forms[int(form.removeprefix("form "))]
        logits: list[torch.Tensor] = []
        boundaries = {
            "cu_seq_lens_q": packed.cu_seqlens,
            "cu_seq_lens_k": packed.cu_seqlens,
            "max_length_q": packed.max_seqlen,
            "max_length_k": packed.max_seqlen,
        }
        calls = [{name: _restored(value, tensors) for name, value in one} for one in arguments.of_layers]
        for layer, number in zip(self.layers, arguments.sets, strict=True):
            result = layer(hidden_states, **calls[number], **boundaries)
            hidden_states, *others = result if isinstance(result, tuple) else (result,)
            logits += others if with_logits else ()
        return (hidden_states, *logits) if with_logits else hidden_states


def _restored(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Place):
        return tensors[value.index]
    return tuple(_restored(part, tensors) for part in value) if isinstance(value, tuple) else value


OUTPUT_HOOKS = "transformers.utils.output_capturing"
"""Where transformers defines hooks that stay on layers after a call with output_hidden_states, and then do nothing."""
_HAS_HOOKS = "_output_capturing_hooks_installed"
"""The attribute that transformers gives a model with such hooks."""


@contextmanager
def _without_new_hooks(model: nn.Module) -> Iterator[None]:
    """Take off, after the block, the hooks of transformers that a call in it was the first to need.

    Graphs were captured without them, and would take them for a change of the model.
    """
    had = getattr(model, _HAS_HOOKS, False)
    try:
        yield
    finally:
        if not had and getattr(model, _HAS_HOOKS, False):  # else transformers would not put them on again
            for part in model.modules():
                part.__dict__.pop(_HAS_HOOKS, None)
                for key, hook in [*part._forward_hooks.items()]:
                    if find_home(hook) == OUTPUT_HOOKS:
                        del part._forward_hooks[key]


_LOGITS = "router_logits"
"""The field of a model's result that has them; with `output_` before it, the argument that asks for them."""


class RouterLogits:
    """Which modules of a decoder are routers, and whether the present micro-batch wants their logits.

    transformers makes its load-balancing loss of them, and keeps them by hooks, which a replay does not run and
    torch.compile cannot follow. Here each router keeps its own for a moment, and its layer returns them beside hidden
    states, so that graphs and checkpoints know of them.
    """

    def __init__(self, kind: type[nn.Module], index: int, path: str) -> None:
        """Routers of class `kind`, which return logits at `index`, at `path` inside of each layer that has one."""
        self._kind, self._index, self._path = kind, index, path.split(".")
        self.wanted = False
        """Whether layers return them."""

    @classmethod
    def find(cls, decoder: nn.Module) -> Self | None:
        """Those of `decoder`; None where transformers records none of it.

        `_can_record_outputs` of its class says which modules transformers itself would put hooks on.
        """
        recorder = (getattr(decoder, "_can_record_outputs", None) or {}).get(_LOGITS)
        if recorder is None:
            return None
        kind = recorder.target_class
        layers: Any = decoder.layers
        paths = {name for layer in layers for name, part in layer.named_modules() if isinstance(part, kind)}
        return cls(kind, recorder.index, paths.pop()) if len(paths) == 1 else None

    @contextmanager
    def kept(self, layers: nn.ModuleList) -> Iterator[None]:
        """Let the routers of `layers` keep their logits inside the block."""
        index = self._index

        class Keeping(self._kind):  # type: ignore[name-defined,misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                result = super().forward(*args, **kwargs)
                self.kept_logits = result[index]
                return result

        found = [part for part in layers.modules() if type(part) is self._kind]
        for part in found:
            part.__class__ = Keeping
        try:
            yield
        finally:
            for part in found:
                part.__class__ = self._kind
                part.__dict__.pop("kept_logits", None)

    def returned_by(self, forward: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, ...]]:
        """`forward` of a layer's class, which also returns the logits of the layer's router, [tokens, experts]."""
        path = self._path

        def run(layer: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
            result = forward(layer, *args, **kwargs)
            hidden = result[0] if isinstance(result, tuple) else result
            router: Any = layer
            for name in path:
                router = getattr(router, name, None)
            if router is None:
                return (hidden,)
            logits, router.kept_logits = router.kept_logits, None
            return hidden, logits

        return run


_FUNCTION = "_gradient_checkpointing_func"


@contextmanager
def without_random_states(decoder: nn.Module) -> Iterator[None]:
    """Let the layers' checkpoints leave random states alone inside the block: a capture cannot read them.

    Layers with dropout are refused together with checkpointing, so that a recomputed layer draws no random numbers.

    Args:
        decoder: the module whose layers transformers has told how to checkpoint.
    """
    with ExitStack() as stack:
        for module in decoder.modules():
            own = module.__dict__.get(_FUNCTION)
            if own is not None:
                stack.enter_context(attributes(module, **{_FUNCTION: partial(own, preserve_rng_state=False)}))
        yield


@contextmanager
def changed_layers(layers: nn.ModuleList, routers: RouterLogits | None, *, compile: bool) -> Iterator[None]:
    """Let `layers` return what `routers` want of them inside the block, and run compiled in training mode, if asked.

    Layers of one type share what was compiled. The forward itself is compiled, inside of gradient checkpoints, so that
    a layer is recomputed by the kernels that it ran with. A layer that torch.compile cannot take whole is an error when
    it first runs.
    """
    of_type: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {}
    with ExitStack() as stack:
        if routers is not None:
            stack.enter_context(routers.kept(layers))
        if compile and torch.cuda.is_available():
            stack.enter_context(constant_compute_capability())
        for layer in layers if compile or routers is not None else ():
            if "forward" in layer.__dict__:  # another package has replaced it, and knows of this layer alone
                continue
            kind = type(layer)
            if kind not in of_type:
                plain = kind.forward if routers is None else routers.returned_by(kind.forward)
                of_type[kind] = plain, torch.compile(plain, fullgraph=True) if compile else plain
            stack.enter_context(attributes(layer, forward=_forward(layer, *of_type[kind], routers)))
        yield


@shared
@contextmanager
def constant_compute_capability() -> Iterator[None]:
    """Let torch.compile find the present GPU's compute capability as a constant inside the block.

    transformers looks it up before each grouped product of experts (`integrations/moe.py`), by a function of torch that
    torch itself refuses to trace.
    """
    found = [torch.cuda.get_device_capability(gpu) for gpu in range(torch.cuda.device_count())]
    present = torch.cuda.current_device()

    def get_device_capability(device: torch.device | str | int | None = None) -> tuple[int, int]:
        if isinstance(device, str):
            device = torch.device(device)
        number = device.index if isinstance(device, torch.device) else device
        return found[present if number is None else number]

    with replaced(torch.cuda, "get_device_capability", get_device_capability):
        yield


def _forward(
    layer: nn.Module, plain: Callable[..., Any], fast: Callable[..., Any], routers: RouterLogits | None
) -> Callable[..., Any]:
    """The forward of `layer`: `fast` in training, else `plain`, without the router logits that nobody wants."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        for name in ("cu_seq_lens_q", "cu_seq_lens_k") if layer.training and fast is not plain else ():
            if isinstance(kwargs.get(name), torch.Tensor):
                torch._dynamo.maybe_mark_dynamic(kwargs[name], 0)  # one compilation serves all buckets
        result = (fast if layer.training else plain)(layer, *args, **kwargs)
        return result if routers is None or routers.wanted else result[0]

    return forward


class GraphedDecoder:
    """Runs a model's decoder layers through a plan's graphs, wherever a micro-batch comes with host boundaries."""

    def __init__(
        self, model: nn.Module, plan: Plan, *, replay: bool, reduced_by_hooks: bool, compile: bool = False
    ) -> None:
        """Prepare the stack of `model`; nothing is changed before `following`.

        Args:
            model: the decoder: the module whose `layers` its forward loops over.
            replay: False: pad micro-batches as the plan says, but run them eagerly.
            reduced_by_hooks: whether hooks on the parameters' gradient accumulation must run after a replay.
            compile: whether the layers run compiled in training, replayed and eagerly alike.
        """
        self._model, self._compile = model, compile
        self._config: Any = model.config
        self._stack = LayerStack(model.layers)  # type: ignore[arg-type]
        self._routers = RouterLogits.find(model)
        self.graphed: GraphedModule = graphed(self._stack, plan, token_dim=1, reduced_by_hooks=reduced_by_hooks)
        """The stack, run by the plan; its counters are those of the run."""
        self.graphed.enabled = replay
        self.changes = ExitStack()
        """What `give_back` takes back."""
        self._replay, self._dispatcher = replay, Dispatcher(plan.captured)
        self._most_tokens = max((b.n_tokens for b in plan.captured), default=0)
        self._own_attention = getattr(self._config, "_attn_implementation", None)

    def give_back(self) -> None:
        """Take every change to the model back, and free the graphs; a second call does nothing."""
        self.changes.close()

    @contextmanager
    def following(self) -> Iterator[None]:
        """Let the model's forward run its layers as the plan says inside the block. The graphs are freed at its end."""
        own = self._model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            boundaries = kwargs.pop(BATCH_KEY, None)
            if isinstance(boundaries, HostBoundaries):
                return self._run(own, args, kwargs, boundaries)
            return self._run_plain(own, args, kwargs)

        try:
            with (
                attributes(self._model, forward=forward),
                changed_layers(self._stack.layers, self._routers, compile=self._compile),
            ):
                yield
        finally:
            self.graphed.close()

    def _run(
        self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], boundaries: HostBoundaries
    ) -> Any:
        """The model's forward with the stack in the place of its layers."""
        calls: list[dict[str, Any]] = []
        handed_on: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        count = len(self._stack.layers)

        def stand_in(hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
            """Notes the call of one layer, and hands hidden states on; in the place of the last one, runs the stack."""
            if handed_on and handed_on[-1] is not hidden_states:
                raise UsageError(
                    "the model changes hidden states between its decoder layers, which then cannot run as one stack"
                )
            handed_on[:] = [hidden_states]
            calls.append(arguments)
            if len(calls) < count:
                return hidden_states
            hidden_states, *kept = self._run_stack(hidden_states, calls, boundaries)
            logits.extend(kept)
            return hidden_states

        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise UsageError(f"the model is called with {name}=True, which its layers in graphs do not return")
        kwargs = {name: value for name, value in kwargs.items() if name not in NOT_FOR_LAYERS}
        if self._routers is not None:  # the stack returns them: transformers' own hooks would keep padded ones
            asked = kwargs.get(f"output_{_LOGITS}")
            self._routers.wanted = bool(getattr(self._config, f"output_{_LOGITS}", False) if asked is None else asked)
            kwargs[f"output_{_LOGITS}"] = False
        with attributes(self._model, layers=[stand_in] * count):
            result = own(*args, **kwargs)
        if len(calls) != count:
            raise UsageError(f"the model called {len(calls)} of its {count} decoder layers, which run as one stack")
        if logits:
            result[_LOGITS] = tuple(logits)
        return result

    def _run_plain(self, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward as it is, with its own attention where boundaries are not known.

        Raises:
            UsageError: it is training, of which the plan would then know nothing.
        """
        if self._model.training and torch.is_grad_enabled():
            raise UsageError(
                "a micro-batch of training came without document boundaries on the host: the collator gave neither "
                "cu_seq_lens_q nor one row with position_ids, or it gave token_type_ids or padding before tokens; set "
                "padding_free=True, or per_device_train_batch_size=1"
            )
        if self._routers is not None:
            self._routers.wanted = False
        keeps = kwargs.get("cu_seq_lens_q") is not None or self._own_attention == self._attention()
        attention = nullcontext() if keeps else replaced(self._config, "_attn_implementation", self._own_attention)
        with attention, _without_new_hooks(self._model):
            return own(*args, **kwargs)

    def _run_stack(
        self, hidden_states: torch.Tensor, calls: list[dict[str, Any]], boundaries: HostBoundaries
    ) -> tuple[torch.Tensor, ...]:
        """Hidden states after all layers, [1, tokens, hidden], and router logits, if wanted; replayed or eagerly.

        Raises:
            UsageError: the boundaries end elsewhere than the hidden states.
        """
        n_rows, n_tokens, _ = hidden_states.shape
        if n_rows != 1 or n_tokens != boundaries.cu_seqlens[-1]:
            raise UsageError(
                f"the boundaries of a micro-batch end at {boundaries.cu_seqlens[-1]}, but its hidden states are "
                f"{n_rows} x {n_tokens} tokens: the model adds, drops or splits tokens behind the collator's back, as "
                "prompt tuning does; train without that, or without PlanCallback"
            )
        arguments, tensors = gathered(calls)
        stack = self._stack
        stack.training = self._model.training  # the stack is no part of the model, which switches its own modules alone
        form = stack.name_form(arguments, with_logits=self._routers is not None and self._routers.wanted)
        padding = self._most_tokens - n_tokens if self._model.training and torch.is_grad_enabled() else 0
        if padding > 0:
            hidden_states = functional.pad(hidden_states, (0, 0, 0, padding))
            tensors = [_padded(t, n_tokens, padding) for t in tensors]
        packed = pack(boundaries.cu_seqlens)
        if self._model.training:
            packed = self._count_decision(packed, n_tokens + max(0, padding))
        result = self.graphed(hidden_states, packed, form, *tensors)
        hidden, *logits = result if isinstance(result, tuple | list) else (result,)
        return hidden[:, :n_tokens], *(one[:n_tokens] for one in logits)

    def _count_decision(self, packed: PackedSequence, n_tokens: int) -> PackedSequence:
        """Count what the shape of a micro-batch alone decides.

        Without replays its boundaries are returned as the graphs of the chosen bucket would read them.
        """
        policy = self.graphed.options.tail_policy
        choice = self._dispatcher.decide(shape_of(packed, boundaries_of(packed, n_tokens, policy), n_tokens))
        self.graphed.stats().decided[choice] += 1
        if self._replay or not isinstance(choice, Bucket) or packed.host is None:
            return packed
        host = pad_cu_seqlens(packed.host, max_seqs=choice.max_seqs, n_tokens=n_tokens, policy=policy)
        return pack(host, max_seqlen=choice.max_seqlen)

    def _attention(self) -> str | None:
        return getattr(self._config, "_attn_implementation", None)

    def choose_attention(self, name: str | None) -> Callable[[], None]:
        """Let the layers use the attention that is registered as `name`; returns a function that ends it."""
        end = partial(setattr, self._config, "_attn_implementation", self._attention())
        self._config._attn_implementation = name
        return end


def _padded(tensor: torch.Tensor, n_tokens: int, padding: int) -> torch.Tensor:
    """`tensor` with zeros behind its tokens, where its second dimension runs over them."""
    if tensor.dim() < 2 or tensor.shape[1] != n_tokens:
        return tensor
    return functional.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, padding))
