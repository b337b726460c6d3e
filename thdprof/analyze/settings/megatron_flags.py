"""The table of flags that are read in launch scripts of Megatron-LM: their values, and the settings that they give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from thdprof.analyze.settings.model_reading import READ_APART
from thdprof.training import definitions, model_definitions

Value = Literal["count", "text", "list", "switch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of Megatron-LM or of torchrun."""

    name: str
    """The flag with its dashes."""
    value: Value
    """Its arguments: a whole number, a text, every word up to the next flag, or none."""
    setting: str | None = None
    """Name of the training setting that the value is; None where more than this flag decides a setting."""
    not_followed: str | None = None
    """Why the flag does not change the prediction, as a note to the user; None where the flag is followed."""
    of_torchrun: bool = False
    """Whether the flag is one of torchrun; it then says nothing about whether a command trains."""
    of_model: bool = False
    """Whether the flag only says what the model is; other programs, which do not train, have such flags too."""

    @property
    def least(self) -> int:
        """Smallest whole number that is allowed: that of the setting, else 1."""
        least = None if self.setting is None else definitions()[self.setting].least
        return 1 if least is None else least


DATA_PATHS = ("--data-path", "--train-data-path")
"""Flags that name datasets, with or without weights."""
DOCUMENT_MASKING = "--dataloader-inter-document-masking"
"""Without this flag Megatron-LM trains on each sample as one document."""
CONVERSATIONS = "--sft"
"""With this flag Megatron-LM trains on conversations, which it tokenises while training."""
COUNTED_AS_LAYERS = ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split")
"""Switches that each add one to the number of layers which the pipeline splits."""
RANKS_PER_NODE = ("--nproc-per-node", "--nproc_per_node")
WORLD_VARIABLES = (("WORLD_SIZE",), ("GPUS_PER_NODE", "NUM_NODES"), ("GPUS_PER_NODE", "NNODES"), ("SLURM_NTASKS",))
"""Variables of a script whose product is the number of ranks, the first complete group before the others."""
PRINTING_COMMANDS = frozenset(("echo", "printf", "cat", "[", "[[", "test", ":", "set", "shift", "let", "logger"))
"""Commands that only print or test words, so that flags among their words start nothing."""

# --- flags that say what the model is, by the kind of value that they take --------------------------------------------

_BY_ONE_FLAG = [
    definition
    for name, definition in model_definitions().items()
    if name not in READ_APART
    and name not in ("num_layers", "tensor_model_parallel_size", "num_query_groups", "recompute_modules")
    and name not in ("grad_reduce_in_fp32", "check_for_nan_in_grad")
]
"""Fields of `Model` that the flag of their own name gives."""
FIELDS = {definition.option: definition.name for definition in _BY_ONE_FLAG if definition.type is not bool}
"""Flags whose value is a field of `Model`, with that field."""
SWITCHES = {
    **{one.off_option: (one.name, False) for one in _BY_ONE_FLAG if one.type is bool and one.default},
    **{one.option: (one.name, True) for one in _BY_ONE_FLAG if one.type is bool and not one.default},
    "--disable-bias-linear": ("add_bias_linear", False),
    "--swiglu": ("gated_linear_unit", True),
    "--quick-geglu": ("gated_linear_unit", True),
    "--use-rotary-position-embeddings": ("rotary", True),
    "--use-megatron-fsdp": ("use_distributed_optimizer", True),
    "--accumulate-allreduce-grads-in-fp32": ("grad_reduce_in_fp32", True),
    "--grad-reduce-in-bf16": ("grad_reduce_in_fp32", False),
    "--no-check-for-nan-in-loss-and-grad": ("check_for_nan_in_grad", False),
    "--fp16": ("precision", "fp16"),
    "--bf16": ("precision", "bf16"),
    "--recompute-activations": ("recompute_granularity", "selective"),
}
"""Flags without a value, with the field of `Model` and the value that they give it."""
PATTERNS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
"""Names of the flag for a hybrid's layers; the second is the older one."""
UNPADDED = ("--no-pad-vocab-size", "--disable-pad-vocab-size")

ELSEWHERE: Mapping[str, tuple[Value, str]] = {
    "--use-checkpoint-args": ("switch", "the checkpoint says what the model is, and is not read: give --model"),
    "--yaml-cfg": ("text", "the file says what the model is, and is not read: give --model"),
    "--heterogeneous-layers-config-path": ("text", "layers of different sizes are not known"),
    "--heterogeneous-layers-config-encoded-json": ("text", "layers of different sizes are not known"),
    "--experimental-attention-variant": ("text", "this kind of attention is not known"),
    "--fp4-format": ("text", "matrix products in FP4 are not known"),
    "--moe-latent-size": ("text", "experts with a width of their own are not known"),
}
"""Flags with which the other flags do not say what the model is, with the reason as the end of a sentence."""
LEFT_OUT: Mapping[str, tuple[Value, str]] = {
    "--window-size": ("text", "windows of attention are not followed: it is taken as full within a document"),
    "--first-last-layers-bf16": ("switch", "all layers are taken in FP8"),
    "--ddp-reduce-scatter-with-fp32-accumulation": ("switch", "its reductions are taken as plain reduce-scatters"),
}
"""Flags with which the model is known but for a detail, with what is taken instead."""
_MODEL_TEXTS = """
--num-query-groups --position-embedding-type --fp8-format --fp8-recipe --moe-expert-capacity-factor --moe-layer-freq
--hybrid-override-pattern --loss-scale --main-grads-dtype --vocab-size --padded-vocab-size
--make-vocab-size-divisible-by
"""
MODEL_FLAGS: Mapping[str, Value] = {
    **dict.fromkeys((*FIELDS, *_MODEL_TEXTS.split()), "text"),
    **dict.fromkeys((*SWITCHES, "--group-query-attention", *UNPADDED), "switch"),
    **{name: takes for name, (takes, _) in {**LEFT_OUT, **ELSEWHERE}.items()},
    "--recompute-modules": "list",
}
"""All of these flags that no other table has, and what each takes."""

# --- the table --------------------------------------------------------------------------------------------------------

_FILE_NOT_READ = "the file is not read; name the datasets on the command line, and their --weights"
_EVENLY = (
    "times and memory are predicted for layers that are spread evenly over the pipeline; slots and fallbacks do not "
    "depend on layers"
)
_OVERLAPPED = "its schedule is not followed; it keeps one more micro-batch in flight"
_NOT_FOLLOWED: Mapping[str, tuple[Value, str]] = {
    "--rampup-batch-size": (
        "text",
        "megatron-core 0.19 passes it over, and so does the prediction: every step has the global batch size; a ramp "
        "is given by --step-batch-size-schedule",
    ),
    "--data-args-path": ("text", _FILE_NOT_READ),
    "--per-split-data-args-path": ("text", _FILE_NOT_READ),
    "--mock-data": ("switch", "there is no dataset to analyse; name one on the command line"),
    "--pipeline-model-parallel-layout": (
        "text",
        "the layout is not followed; give --virtual-pipeline-size (times and memory are predicted for layers that are "
        "spread evenly; slots and fallbacks do not depend on layers)",
    ),
    "--decoder-first-pipeline-num-layers": ("count", _EVENLY),
    "--decoder-last-pipeline-num-layers": ("count", _EVENLY),
    "--hybrid-layer-pattern": ("text", "pipeline stages in the pattern are not followed; give --virtual-pipeline-size"),
    "--overlap-moe-expert-parallel-comm": ("switch", _OVERLAPPED),
    "--moe-paged-stash": (
        "switch",
        "it needs cuBLAS 13.4 (hybridep) or NCCL 2.30.4 (ncclep), newer than torch 2.11's; dropless experts run "
        "eagerly",
    ),
    "--deterministic-mode": (
        "switch",
        "what the deterministic backward of attention takes longer, and its gigabytes, are not predicted",
    ),
}
"""Flags that do not change the prediction, with the reason."""
_COUNTED = ("seq_length", "micro_batch_size", "global_batch_size", "train_iters", "train_samples", "seed")
"""Settings that Megatron's flags of the same names give."""
_TEXTS = """
--dataloader-type --num-experts --moe-token-dispatcher-type --step-batch-size-schedule --tokenizer-type
--tokenizer-model --sft-tokenizer-prompt-format
"""
_COUNTS = """
--tensor-model-parallel-size --num-layers --num-virtual-stages-per-pipeline-rank
--num-layers-per-virtual-pipeline-stage --microbatch-group-size-per-virtual-pipeline-stage
"""
_FLAGS = (
    *(Flag(name=definitions()[name].option, value="count", setting=name) for name in _COUNTED),
    Flag(name="--context-parallel-size", value="count", setting="context_parallel_size"),
    Flag(name="--pipeline-model-parallel-size", value="count", setting="pipeline_parallel_size"),
    Flag(name="--split", value="text", setting="split"),
    *(Flag(name=name, value="text") for name in _TEXTS.split()),
    *(Flag(name=name, value="switch") for name in ("--no-data-sharding", DOCUMENT_MASKING)),
    *(Flag(name=name, value="switch") for name in ("--moe-pad-expert-input-to-capacity", CONVERSATIONS)),
    *(Flag(name=name, value="switch") for name in COUNTED_AS_LAYERS),
    *(Flag(name=name, value="list") for name in (*DATA_PATHS, "--moe-router-load-balancing-type")),
    *(Flag(name=name, value="count") for name in _COUNTS.split()),
    *(Flag(name=name, value="count", of_torchrun=True) for name in ("--nnodes", *RANKS_PER_NODE)),
    *(Flag(name=name, value=value, not_followed=why) for name, (value, why) in _NOT_FOLLOWED.items()),
    *(Flag(name=name, value=value, of_model=True) for name, value in MODEL_FLAGS.items()),
)
FLAGS = {flag.name: flag for flag in _FLAGS}
"""Every flag that is looked for, by its name; all others are passed over."""
