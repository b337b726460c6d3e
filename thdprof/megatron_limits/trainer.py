"""What graphs cannot serve of a run of Hugging Face's Trainer, by the plan, its arguments and its model's type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from thdprof.training.trainer_arguments import find_autocast

if TYPE_CHECKING:
    from thdprof.plan import Plan

WITH_EXPERTS = ("mixtral", "olmoe", "qwen3_moe")
"""Values of `model_type` in the configs of models with experts, all dropless, whose layers were checked."""
FAMILIES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "qwen2", "qwen3", *WITH_EXPERTS)
"""Values of `model_type` in the configs of models whose layers were checked in graphs."""
_REFUSED_TYPES = {"gpt_oss": "its attention has sinks, which none of the variable-length attentions here takes"}
"""Values of `model_type` that are known and cannot be served, with the reason."""
GROUPED, BATCHED = "grouped_mm", "batched_mm"
"""Values of transformers' `experts_implementation` that read nothing on the host."""
_USUAL_BATCH = 8
"""The Trainer's per_device_train_batch_size where it is not given."""


def refuse_plan(plan: Plan) -> Iterator[str]:
    """What the plan requires and the callback cannot do."""
    graphs = plan.graphs
    if graphs.impl not in ("module", "none"):
        yield f"graphs.impl is {graphs.impl}, which is Megatron's: analyse with --impl module"
    if graphs.modules or graphs.layers_per_graph is not None:
        yield "graphs.modules or graphs.layers_per_graph is set: the callback captures all layers as one; analyse anew"
    if graphs.offload is not None:
        yield "graphs.offload is set: the callback moves no activations; analyse without --offload"
    for name in ("context_parallel_size", "pipeline_parallel_size"):
        if getattr(plan.training, name) != 1:
            yield f"{name} of the plan is {getattr(plan.training, name)}: the Trainer's layers are all on one rank"


def refuse_model_type(model_type: str) -> Iterator[str]:
    """A model whose layers were not checked; `model_type` is that of its config."""
    if model_type in _REFUSED_TYPES:
        yield f"the model's model_type {model_type!r}: {_REFUSED_TYPES[model_type]}; train without PlanCallback"
    elif model_type not in FAMILIES:
        yield f"the model's model_type {model_type!r} was not checked in graphs: known are {', '.join(FAMILIES)}"


def refuse_experts(
    implementation: str | None, *, weights_dtype: str | None, groups_products: bool | None
) -> Iterator[str]:
    """Experts that a graph cannot hold, of a model of `WITH_EXPERTS` on a GPU.

    Args:
        implementation: transformers' `experts_implementation`; None: its default, grouped_mm.
        weights_dtype: the dtype of the experts' weights, such as "float32"; None: not known.
        groups_products: whether it is a Hopper GPU (compute capability 9); None: not known.
    """
    if implementation not in (None, GROUPED, BATCHED):
        reads = "the host reads which experts have tokens" if implementation == "eager" else "not checked in graphs"
        yield (
            f"experts_implementation {implementation!r}: {reads}; load the model with "
            f"experts_implementation={GROUPED!r}, or call model.set_experts_implementation({GROUPED!r})"
        )
    elif implementation != BATCHED and weights_dtype not in (None, "bfloat16"):
        yield (
            f"experts' weights are in {weights_dtype}: torch's grouped products read on the host in other dtypes than "
            "bfloat16; load the model in bfloat16 (model_init_kwargs={'dtype': 'bfloat16'})"
        )
    elif implementation != BATCHED and groups_products is False:
        yield (
            "experts on this GPU: torch's grouped products were checked in graphs on Hopper GPUs alone, and read on "
            "the host on older ones; train without PlanCallback"
        )


def refuse_arguments(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[str]:
    """What the Trainer does around the model that replays cannot follow.

    Args:
        arguments: fields of TrainingArguments or SFTConfig by name, as `to_dict` gives them; `n_gpu` is the number of
            GPUs of one process and `weights_dtype` the dtype of the model's weights, if they are known.
        environment: environment variables by name, some of which accelerate's launcher sets.
    """

    def is_launched_with(name: str) -> bool:
        return environment.get(name, "false").lower() in ("true", "1", "yes")

    if arguments.get("fsdp") or is_launched_with("ACCELERATE_USE_FSDP"):
        yield (
            "FSDP shards parameters: they move in memory, and a graph reads them where they were at the capture; use "
            "DistributedDataParallel"
        )
    if arguments.get("deepspeed") or is_launched_with("ACCELERATE_USE_DEEPSPEED"):
        yield "DeepSpeed keeps parameters and gradients in buffers of its own; use DistributedDataParallel"
    if (arguments.get("n_gpu") or 1) > 1:
        yield "DataParallel copies the model at every step: start one process for each GPU (torchrun), or show one GPU"
    if arguments.get("torch_compile"):
        yield (
            "torch_compile is set: it compiles the whole model, where graphs stand for its layers; set it to False, "
            "and give PlanCallback(compile=True) to compile each layer"
        )
    if arguments.get("activation_offloading"):
        yield "activation_offloading is set: a graph cannot wait for copies to the host; set it to False"
    checkpointing = arguments.get("activation_checkpointing_kwargs")  # transformers 5.12 has no such thing
    if isinstance(checkpointing, Mapping) and checkpointing.get("offload"):
        yield "activation_checkpointing_kwargs has offload: a graph cannot wait for copies to the host; leave it out"
    if arguments.get("use_cache") and "packing" not in arguments:  # SFTTrainer turns it off by itself
        yield "use_cache is True: layers then write to a cache, which a graph does not take; leave it at False"
    if arguments.get("parallelism_config") is not None:
        yield "parallelism_config is set: tensor, context and sequence parallelism were not checked in graphs"
    config = arguments.get("accelerator_config")
    if isinstance(config, Mapping) and config.get("dispatch_batches"):
        yield "accelerator_config dispatch_batches: other ranks get no boundaries on the host; leave it out"
    if arguments.get("weights_dtype") == "float32" and not find_autocast(arguments) and not arguments.get("use_cpu"):
        yield (
            "bf16 and fp16 are False, and weights are in float32: variable-length attention takes no float32; set "
            "bf16=True, or load the model in bfloat16 (model_init_kwargs={'dtype': 'bfloat16'})"
        )
    packed = arguments.get("padding_free") or arguments.get("packing")
    if (
        "padding_free" in arguments
        and not packed
        and (arguments.get("per_device_train_batch_size") or _USUAL_BATCH) > 1
    ):
        yield "padding_free is False with several rows in a micro-batch: set packing=True or padding_free=True"
