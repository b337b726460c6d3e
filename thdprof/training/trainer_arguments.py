"""The settings of a run of Hugging Face's Trainer or TRL's SFTTrainer, from the fields of its arguments.

Fields are read from `SFTConfig.to_dict()` or `to_json_string()`, and from `TrainingArguments` alike. Rules: TRL 1.16,
transformers 5.23 and accelerate 1.15.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from thdprof.errors import UsageError
from thdprof.training.settings import definitions
from thdprof.training.systems import TRL_STRATEGIES

TRAINER_ARGUMENTS: Mapping[str, str] = {
    "seq_length": "max_length",
    "micro_batch_size": "per_device_train_batch_size",
    "global_batch_size": "per_device_train_batch_size x gradient_accumulation_steps x processes",
    "data_parallel_size": "number of processes",
    "loader": "data loader (the Trainer's own)",
    "drop_last": "dataloader_drop_last",
    "seed": "data_seed (seed)",
    "shuffle_seed": "shuffle_dataset (seed)",
    "sampling": "train_sampling_strategy",
    "packer": "packing_strategy",
    "packing_processes": "dataset_num_proc",
    "pad_seq_to_mult": "pad_to_multiple_of",
    "train_samples": "samples of the run (max_steps)",
    "train_epochs": "num_train_epochs",
    "chat_template": "chat_template_path",
    "text_column": "dataset_text_field",
    "eos_token": "eos_token",
    "completion_only_loss": "completion_only_loss",
    "assistant_only_loss": "assistant_only_loss",
}
"""What Trainer's arguments call the settings of a run."""

_READ = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs activation_offloading adam_beta1 adam_beta2
adam_epsilon assistant_only_loss average_tokens_across_devices batch_eval_metrics bf16 bf16_full_eval chat_template_path
completion_only_loss data_seed dataloader_drop_last dataloader_num_workers dataloader_persistent_workers
dataloader_pin_memory dataloader_prefetch_factor dataset_kwargs dataset_num_proc dataset_text_field ddp_backend
ddp_bucket_cap_mb ddp_timeout debug deepspeed disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eos_token
eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_packing eval_steps eval_strategy
eval_use_gather_object fp16_full_eval fsdp fsdp_config full_determinism gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo
hub_revision hub_strategy hub_token include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor
learning_rate length_column_name load_best_model_at_end local_rank log_level log_level_replica log_on_each_node
logging_dir logging_first_step logging_nan_inf_filter logging_steps logging_strategy loss_type lr_scheduler_kwargs
lr_scheduler_type max_grad_norm max_length max_steps metric_for_best_model model_init_kwargs neftune_noise_alpha
num_train_epochs optim optim_args output_dir packing packing_strategy pad_to_multiple_of pad_token padding_free
parallelism_config per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project push_to_hub
remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint router_aux_loss_coef
run_name save_on_each_node save_only_model save_steps save_strategy save_total_limit seed shuffle_dataset
skip_memory_metrics tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy truncation_mode use_cache use_cpu
use_liger_kernel warmup_ratio warmup_steps weight_decay
"""
READ_ARGUMENTS: frozenset[str] = frozenset(_READ.split())
"""Fields of SFTConfig that thdprof reads, or that change nothing inside of a model's layers. Others, such as those of
later versions, are named where they are off their default.
"""
_PRECISIONS: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""dtypes of torch -> `thdprof.training.Model.precision`."""
_SAMPLING = "train_sampling_strategy"
_OTHER_ORDERS: Mapping[str, Any] = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
}
"""Fields of `accelerator_config` that change the order of the data, and the values under which it is known."""


_SIGNS = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "output_dir")
"""Fields of TrainingArguments of which every file of them has one, and no other file of a model."""
_TEXT = ("chat_template", "text_column", "eos_token", "completion_only_loss", "assistant_only_loss")
"""Settings by which TRL makes tokens of text, each a field of `TRAINER_ARGUMENTS`."""

_HIDDEN_TOKEN = "<EOS_TOKEN>"
"""What the Trainer writes for eos_token, as for every field whose name ends in `_token`."""


def are_trainer_arguments(fields: Mapping[str, Any]) -> bool:
    """Whether `fields` are of a Trainer's arguments, and not of a model's config or another file."""
    return any(name in fields for name in _SIGNS) or (bool(fields) and READ_ARGUMENTS.issuperset(fields))


def _unknown_orders(arguments: Mapping[str, Any]) -> list[str]:
    """What makes the order in which the run reads its rows unknown, a clause each; empty where it is replayed."""
    found = []
    strategy = arguments.get(_SAMPLING, "random")
    if arguments.get("group_by_length") or strategy not in ("random", "sequential", None):
        found.append("group_by_length" if arguments.get("group_by_length") else f"{_SAMPLING} {strategy!r}")
    config = arguments.get("accelerator_config") or {}
    if isinstance(config, Mapping):
        found += [
            f"accelerator_config {name} {config[name]}"
            for name, usual in _OTHER_ORDERS.items()
            if name in config and config[name] != usual and not (name == "dispatch_batches" and config[name] is False)
        ]
    return found


def trainer_settings(arguments: Mapping[str, Any], *, where: str, num_processes: int | None = None) -> dict[str, Any]:
    """The run's settings by their names in `thdprof.training.TrainingOptions`; those that they do not say are missing.

    Args:
        arguments: fields of SFTConfig or TrainingArguments; unknown fields are not read.
        where: what holds them, for messages.
        num_processes: number of data-parallel processes; None: not known.

    Raises:
        UsageError: a field has a value of a wrong type, or the order of the data would not be known.
    """
    unknown = _unknown_orders(arguments)
    if unknown:
        raise UsageError(
            f"{where}: {', '.join(unknown)}: thdprof does not know in which order the Trainer then reads the data; "
            "leave it out, or analyse with the other settings as options"
        )
    found: dict[str, Any] = {"loader": "trainer"}

    def take(name: str, field: str, least: int = 1) -> int | None:
        value = arguments.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UsageError(f"{where}: {field} {value!r}: must be a whole number of at least {least}")
        found[name] = value
        return value

    take("micro_batch_size", "per_device_train_batch_size")
    take("gradient_accumulation", "gradient_accumulation_steps")
    take("seq_length", "max_length")
    take("seed", "seed", least=0)
    if arguments.get("shuffle_dataset"):
        take("shuffle_seed", "seed", least=0)
    take("seed", "data_seed", least=0)
    if arguments.get(_SAMPLING) == "sequential":
        found["sampling"] = "sequential"
    take("pad_seq_to_mult", "pad_to_multiple_of")
    take("packing_processes", "dataset_num_proc")
    # transformers' default is to keep the last, partial micro-batch of an epoch
    found["drop_last"] = bool(arguments.get("dataloader_drop_last", False))
    if arguments.get("packing"):
        strategy = arguments.get("packing_strategy", "bfd")
        if not isinstance(strategy, str) or strategy not in TRL_STRATEGIES:
            raise UsageError(f"{where}: packing_strategy {strategy!r}: known are {', '.join(TRL_STRATEGIES)}")
        found["packer"] = TRL_STRATEGIES[strategy]
        if arguments.get("max_length", 0) is None:
            raise UsageError(f"{where}: max_length is null: TRL refuses to pack without it; set it")
    elif "packing" in arguments:
        found["packer"] = "none"
    _take_text(arguments, where, found)
    _take_length(arguments, where, found)
    if num_processes is not None:
        found["data_parallel_size"] = num_processes
    return found


def _take_text(arguments: Mapping[str, Any], where: str, found: dict[str, Any]) -> None:
    """Put how TRL makes tokens of text into `found`, as far as it is off TRL's default."""
    for name in _TEXT:
        field, definition = TRAINER_ARGUMENTS[name], definitions()[name]
        value = arguments.get(field)
        if value is None or value in (definition.default, _HIDDEN_TOKEN):
            continue
        try:
            definition.check(value)
        except UsageError:
            raise UsageError(f"{where}: {field} {value!r}: is of another type than TRL's") from None
        found[name] = value


def trainer_model(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the run's arguments say of the model, by the names of `thdprof.training.Model`."""
    weights, by_autocast = find_weights_dtype(arguments), find_autocast(arguments)
    found: dict[str, Any] = {"autocast": True} if by_autocast and weights == "float32" else {}
    if precision := by_autocast or _PRECISIONS.get(weights or ""):
        found["precision"] = precision
    if arguments.get("use_liger_kernel"):
        found["liger"] = True
    names = ("activation_checkpointing", "gradient_checkpointing")  # transformers 5.23 has both, 5.12 the second
    if True not in [arguments.get(name) for name in names]:
        return found
    options = arguments.get("activation_checkpointing_kwargs")
    if isinstance(options, Mapping) and options.get("every_n_layers", 1) != 1:
        return found  # some layers keep their activations: the memory of all of them is the safe side
    return {**found, "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def find_autocast(arguments: Mapping[str, Any]) -> str | None:
    """The precision in which the Trainer's autocast computes, bf16 or fp16; None without autocast.

    Where nothing is said it is bf16, as in SFTConfig.
    """
    bf16, fp16 = arguments.get("bf16"), arguments.get("fp16")
    return "fp16" if fp16 and not bf16 else "bf16" if bf16 is not False else None


def find_weights_dtype(arguments: Mapping[str, Any]) -> str | None:
    """The dtype of the model's weights, such as "float32"; None where that is the checkpoint's, or not known.

    It is `weights_dtype`, which thdprof adds where it has the model. Else it is the one in which SFTTrainer loads a
    model by its name: TRL's create_model_from_path takes float32 where `model_init_kwargs` has no `dtype`; a
    `torch_dtype` there changes nothing. Other Trainers are given a model.
    """
    if "weights_dtype" in arguments:
        return arguments["weights_dtype"]  # type: ignore[no-any-return]
    if "packing" not in arguments and "model_init_kwargs" not in arguments:
        return None
    options = arguments.get("model_init_kwargs")
    dtype = options.get("dtype", "float32") if isinstance(options, Mapping) else "float32"
    return None if dtype in (None, "auto") else str(dtype).removeprefix("torch.")


def _take_length(arguments: Mapping[str, Any], where: str, found: dict[str, Any]) -> None:
    """Put the run's length into `found`: steps where they are given, else epochs."""
    steps = arguments.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        found["train_iters"] = steps
        return
    epochs = arguments.get("num_train_epochs")
    if epochs is None:
        return
    if not isinstance(epochs, int | float) or not math.isfinite(epochs) or epochs <= 0 or epochs != int(epochs):
        raise UsageError(
            f"{where}: num_train_epochs {epochs!r}: only whole epochs are replayed; give the steps that the Trainer "
            "logs at its start as --train-iters"
        )
    found["train_epochs"] = int(epochs)
