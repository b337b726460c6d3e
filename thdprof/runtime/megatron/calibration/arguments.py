"""The arguments of a launch script by Megatron's own parser, without what a measurement does not need."""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from thdprof.errors import UsageError
from thdprof.runtime.megatron.replacing import replaced

_NONE = """
save load pretrained_checkpoint data_path train_data_path valid_data_path test_data_path data_args_path
per_split_data_args_path data_cache_path per_dataset_sequences_path tokenizer_model vocab_file merge_file
tensorboard_dir rampup_batch_size step_batch_size_schedule train_samples lr_decay_samples non_persistent_ckpt_type
ckpt_convert_format result_rejected_tracker_filename logits_save_dir logits_load_dir exit_interval
exit_duration_in_mins pipeline_model_parallel_layout num_layers_per_virtual_pipeline_stage
num_virtual_stages_per_pipeline_rank decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
lr_warmup_fraction save_interval cuda_graph_scope_deprecated decoupled_lr decoupled_min_lr
"""
_FALSE = """
use_checkpoint_args async_save use_persistent_ckpt_worker profile fim_data record_memory_history enable_one_logger
auto_detect_ckpt_format skip_train account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
create_attention_mask_in_dataloader tp_comm_overlap moe_use_upcycling enable_cuda_graph external_cuda_graph
optimizer_cuda_graph log_straggler check_for_spiky_loss
"""
_OFF: dict[str, Any] = {
    **dict.fromkeys(_NONE.split()),
    **dict.fromkeys(_FALSE.split(), False),
    **dict.fromkeys(("lr_warmup_samples", "lr_warmup_iters", "eval_iters"), 0),
    **dict.fromkeys(("wandb_project", "wandb_exp_name"), ""),
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "tokenizer_type": "NullTokenizer",
    "mock_data": True,
    "pipeline_model_parallel_size": 1,
    "te_rng_tracker": True,
    "train_iters": 100_000,
    "lr": 1e-9,
    "min_lr": 0.0,
    "lr_warmup_init": 0.0,
    "lr_decay_style": "constant",
}
"""Values of arguments for a measurement. Those of stock graphs are off because a plan's graphs take their place."""
_REFUSED = {
    "yaml_cfg": "settings in YAML are not read",
    "perform_rl_step": "reinforcement learning is not measured",
    "hybrid_context_parallel": "micro-batches of other context-parallel sizes are not measured",
    "use_megatron_fsdp": "Megatron-FSDP moves parameters, which graphs read in place",
    "use_torch_fsdp2": "FSDP moves parameters, which graphs read in place",
    "heterogeneous_layers_config_path": "layers that all differ cannot be scaled",
}
"""Arguments that cannot be measured, with the reason."""
GPT2_VOCABULARY = 50257
"""Tokens of the GPT-2 tokenizer, which Megatron-LM's pretrain_gpt.py takes by default."""


def parse(words: Sequence[str], *, where: str) -> tuple[Any, list[str]]:
    """The words of a training command by Megatron's own parser, and the words that it does not know.

    Raises:
        UsageError: the parser refuses the words, or they ask for training that cannot be measured.
    """
    from megatron.training.arguments import add_megatron_arguments, parse_args

    errors = io.StringIO()
    parser = add_megatron_arguments(argparse.ArgumentParser(prog="megatron", allow_abbrev=False))
    try:
        with contextlib.redirect_stderr(errors), replaced(sys, "argv", [*(sys.argv[:1] or ["megatron"]), *words]):
            _, unknown = parser.parse_known_args(list(words))
            args = parse_args(ignore_unknown_args=True)
    except SystemExit as error:
        lines = errors.getvalue().strip().splitlines() or ["no reason given"]
        raise UsageError(f"{where}: Megatron-LM's parser refuses its flags: {lines[-1]}") from error
    for name, why in _REFUSED.items():
        if getattr(args, name, None):
            raise UsageError(f"{where}: --{name.replace('_', '-')}: {why}")
    return args, unknown


def ranks_of_stage(args: Any) -> int:
    """Fewest GPUs on which one pipeline stage of the arguments runs; any other number is a multiple of it."""
    tensor, expert = args.tensor_model_parallel_size, args.expert_model_parallel_size or 1
    return math.lcm(tensor * args.context_parallel_size, (args.expert_tensor_parallel_size or tensor) * expert)


def check_world(args: Any, world: int, *, where: str) -> None:
    """Raise UsageError where one pipeline stage cannot run on `world` processes."""
    least, tensor = ranks_of_stage(args), args.tensor_model_parallel_size
    if world % least:
        sizes = f"tensor {tensor} x context {args.context_parallel_size}"
        if (expert := args.expert_model_parallel_size or 1) > 1:
            sizes += f" and expert tensor {args.expert_tensor_parallel_size or tensor} x expert {expert}"
        raise UsageError(
            f"{where}: {sizes} parallel ranks need {least} GPUs, or a multiple, and {world} "
            f"{'is' if world == 1 else 'are'} used: torchrun --nproc-per-node {least} -m thdprof calibrate ..."
        )


def vocabulary(args: Any, *, given: int | None, where: str) -> int:
    """Rows of the embedding, padded as training pads them; `given` is the user's number of tokens.

    Raises:
        UsageError: neither the script nor the user tells the vocabulary.
    """
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    padded: int | None = getattr(args, "padded_vocab_size", None)
    if given is None and padded is not None:
        return padded
    tokens: int | None = given if given is not None else args.vocab_size
    kind = args.tokenizer_type
    if tokens is None and kind in (None, "GPT2BPETokenizer"):
        tokens = GPT2_VOCABULARY
    if tokens is None:
        raise UsageError(f"{where}: the vocabulary of {kind} is not known: give --vocab-size, its number of tokens")
    divisor = args.make_vocab_size_divisible_by
    with contextlib.redirect_stdout(io.StringIO()):
        return int(calculate_padded_vocab_size(tokens, divisor, args.tensor_model_parallel_size))


def total_layers(args: Any) -> int:
    """Layers of the whole model; of a hybrid, the letters of its pattern."""
    pattern = _pattern(args)
    return len(pattern) if pattern else int(args.num_layers)


def stage_layers(args: Any) -> int:
    """Most layers that a pipeline rank of the script's own run has; UsageError where Megatron refuses the layout."""
    total, stages = total_layers(args), max(1, int(args.pipeline_model_parallel_size))
    if chunks := _layers_of_chunks(args, stages):
        return max(sum(chunks[rank::stages]) for rank in range(stages))
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    ends = [n for n in (first, last) if n is not None]
    if not ends:
        return -(-total // stages)
    between = stages - len(ends)
    return int(max([*ends, -(-(total - sum(ends)) // between) if between else 0]))


def _layers_of_chunks(args: Any, stages: int) -> list[int]:
    """Layers of each chunk of the pipeline, virtual ones too, where the arguments place every layer; else empty."""
    if not (layout := args.pipeline_model_parallel_layout):
        segments = _main_pattern(args).split("|")
        return [len(segment) for segment in segments] if len(segments) > 1 else []
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    try:
        placed = PipelineParallelLayerLayout.from_str(layout, stages)
        placed.validate_layer_layout(num_layers=total_layers(args), mtp_num_layers=args.mtp_num_layers)
    except (AssertionError, ValueError, KeyError) as error:
        raise UsageError(
            f"--pipeline-model-parallel-layout {layout}: Megatron refuses it: {error} (a script must quote its |)"
        ) from error
    return [chunk.count(LayerType.decoder) for chunks in zip(*placed.layout, strict=True) for chunk in chunks]


def set_for_measuring(args: Any, *, layers: int, vocabulary: int, microbatches: int, world: int) -> None:
    """Change the parsed arguments for a measurement of `layers` layers on `world` ranks, without a pipeline."""
    set_layers(args, layers)
    for name, value in _OFF.items():
        if hasattr(args, name):
            setattr(args, name, value)
    args.world_size = world
    args.padded_vocab_size = args.vocab_size = vocabulary
    data_parallel = world // (args.tensor_model_parallel_size * args.context_parallel_size)
    args.global_batch_size = microbatches * args.micro_batch_size * data_parallel
    args.eval_global_batch_size = args.eval_micro_batch_size = None


def set_layers(args: Any, layers: int) -> None:
    """Change the arguments so that the model has `layers` layers, of its kinds in about the same shares."""
    pattern = _pattern(args)
    if pattern:
        args.hybrid_layer_pattern = "".join(pick_neighbours(pattern, layers))
        args.num_layers = None
        return
    if args.recompute_num_layers is not None and args.recompute_method == "block":
        stage = stage_layers(args)
        args.recompute_num_layers = max(1, round(args.recompute_num_layers * layers / stage))
    if isinstance(getattr(args, "moe_layer_freq", None), list):
        args.moe_layer_freq = list(pick_neighbours(args.moe_layer_freq, layers))
    args.num_layers = layers


def pick_neighbours[T](kinds: Sequence[T], count: int) -> Sequence[T]:
    """The run of `count` neighbours among `kinds` whose shares of each kind are nearest to those of all."""
    if count >= len(kinds):
        return kinds
    whole = Counter(kinds)

    def distance(start: int) -> float:
        part = Counter(kinds[start : start + count])
        return sum(abs(part[kind] / count - whole[kind] / len(kinds)) for kind in whole)

    start = min(range(len(kinds) - count + 1), key=distance)
    return kinds[start : start + count]


def validate(args: Any, *, where: str) -> Any:
    """The arguments after Megatron's own checks, which also fill in defaults; UsageError where they do not fit
    together.
    """
    from megatron.training.arguments import validate_args

    with refused_settings(where), contextlib.redirect_stdout(io.StringIO()):
        return validate_args(args)


@contextlib.contextmanager
def refused_settings(where: str) -> Iterator[None]:
    """Raise UsageError where Megatron refuses the settings of the script `where` inside the block."""
    try:
        yield
    except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
        lines = str(error).strip().splitlines() or ["an assertion without a message"]
        raise UsageError(f"{where}: Megatron-LM refuses its settings: {lines[0]}") from error


def _pattern(args: Any) -> str:
    """Letters of a hybrid's layers, without marks of pipeline stages and without layers of multi-token prediction."""
    return _main_pattern(args).replace("|", "")


def _main_pattern(args: Any) -> str:
    text = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None) or ""
    return str(text).partition("/")[0]
