"""What graphs cannot move to the host.

Two mechanisms move activations: thdprof's own, inside the graphs of `chunk` and of `transformer_engine`, and
megatron-core's `fine_grained_activation_offloading` around graphs of single layers, where the model was built with it.
Behind a router's graph (dropless experts) only the second one works.
"""

from __future__ import annotations

from thdprof.megatron_limits.limit import Limit, Words
from thdprof.megatron_limits.run import Run
from thdprof.offload.plan import CORE_MODULES, CORE_MODULES_WITH_EXPERTS


def _by_core(run: Run) -> bool:
    return bool(run.core_offload) and run.impl == "transformer_engine"


def _turned_off_first(run: Run) -> bool:
    """Whether megatron-core's own offloading is on with graphs that do not work with it.

    `install` refuses that in any case, and says to turn it off or to set graphs.impl to transformer_engine.
    """
    return bool(run.core_offload) and run.impl != "transformer_engine"


def _unsupported(run: Run) -> list[str]:
    """Modules that megatron-core's own offloading has in no model."""
    return [name for name in run.offload_modules or () if name not in CORE_MODULES]


def _unsupported_with_experts(run: Run) -> list[str]:
    """Modules that it has, but not where a layer is captured up to its router."""
    known = [name for name in run.offload_modules or () if name in CORE_MODULES]
    return [name for name in known if name not in CORE_MODULES_WITH_EXPERTS]


def _lacks_core_attn(run: Run) -> bool:
    modules = run.offload_modules or ()
    return "attn_proj" in modules and not {"all", "core_attn"} & {*modules}


def _has_experts(run: Run) -> bool:
    return run.experts not in (None, "none")


def _names(run: Run) -> str:
    return ",".join(run.offload_modules or ())


OFFLOAD_LIMITS: tuple[Limit, ...] = (
    Limit(
        name="offloading with `local`",
        holds=lambda run: run.offload_modules is not None and run.impl == "local" and not _turned_off_first(run),
        reason="megatron-core does not offload with cuda_graph_impl='local' and whole-layer capture, so Megatron's own "
        "layer graphs move nothing",
        options=Words("--offload", "use --impl chunk or transformer_engine"),
        fields=Words("graphs.offload", "set graphs.impl to chunk or transformer_engine"),
    ),
    Limit(
        name="offloading by megatron-core itself of modules that it does not support",
        holds=lambda run: _by_core(run) and _unsupported(run),
        reason="megatron-core's own offloading supports only some modules around graphs of layers (attn_norm's tensor "
        "is a layer's input, which the layer's graph keeps)",
        options=Words(
            lambda run: f"--offload {','.join(_unsupported(run))} with --experts {run.experts}",
            f"choose some of {', '.join(CORE_MODULES_WITH_EXPERTS)}, or leave --offload out",
        ),
        fields=Words(
            lambda run: f"graphs.offload.modules has {', '.join(_unsupported(run))}",
            f"with fine_grained_activation_offloading choose some of {', '.join(CORE_MODULES)}",
        ),
    ),
    Limit(
        name="offloading `mlp_norm` of layers with experts by megatron-core itself",
        holds=lambda run: _by_core(run) and _has_experts(run) and _unsupported_with_experts(run),
        reason="megatron-core does not move its tensors where attn and moe_router are captured",
        options=Words(
            lambda run: f"--offload {','.join(_unsupported_with_experts(run))} with --experts {run.experts}",
            "leave mlp_norm out",
        ),
        fields=Words(
            lambda run: f"graphs.offload.modules has {', '.join(_unsupported_with_experts(run))} with num_moe_experts",
            "leave mlp_norm out",
        ),
    ),
    Limit(
        name="offloading by thdprof from graphs of single layers with experts",
        holds=lambda run: (
            run.offload_modules is not None
            and run.impl == "transformer_engine"
            and _has_experts(run)
            and run.core_offload is False
        ),
        reason="graphs of layers with experts move nothing",
        options=Words("--offload with --experts {experts}", "use --impl chunk"),
        fields=Words(
            "graphs.offload with num_moe_experts",
            "build the model with fine_grained_activation_offloading (dropless experts), set graphs.impl to chunk, or "
            "graphs.offload to null",
        ),
    ),
    Limit(
        name="offloading `attn_proj` without `core_attn`",
        holds=lambda run: _lacks_core_attn(run) and run.impl != "module" and not _turned_off_first(run),
        reason="the input of attn_proj is the output of core_attn, which the backward of core_attn needs too",
        options=Words(lambda run: f"--offload {_names(run)}", "add core_attn"),
        fields=Words("graphs.offload.modules has attn_proj without core_attn", "add core_attn"),
    ),
)
