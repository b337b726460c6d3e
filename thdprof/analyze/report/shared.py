"""What reports share: plain tables and their printing, and sentences on data, model, memory, captures and training."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from thdprof.analyze.predictions import Capture, Memory, Overlap, Times, Worth
from thdprof.plan import DatasetPart, SpreadPart
from thdprof.training import Model
from thdprof.words import WIDEST, join_words, memory_size, percent, wrap_text, write_count, write_range, write_savings


def print_parts(parts: Iterable[str | Table | Text], console: Console) -> None:
    """Write the parts of a report to `console`, sentences and tables in lines of at most `WIDEST` characters."""
    for part in list(parts):
        if isinstance(part, Table):
            if console.measure(part).maximum > WIDEST:
                _narrow(part)
            console.print(part, highlight=False, width=WIDEST)
            continue
        text = Text(part) if isinstance(part, str) else part
        for line in wrap_text(text.plain):
            console.print(Text(line, style=text.style), highlight=False, soft_wrap=True)


def _narrow(table: Table) -> None:
    """Break the titles of columns at their hyphens and blanks; the table then breaks cells where that is not enough."""
    for column in table.columns:
        parts = re.findall(r"[^-\s]+-?", str(column.header))
        column.header = "\n".join(textwrap.wrap(" ".join(parts), 12)).replace("- ", "-")
        column.overflow = "fold"


def plain_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """A table without lines, of columns that are aligned to the left, then of columns aligned to the right."""
    table = Table(*left, box=None, pad_edge=False)
    for name in right:
        table.add_column(name, justify="right")
    return table


def name_dataset(data: DatasetPart) -> str:
    """The first file, how many there are besides, and the format."""
    source = data.uris[0] if len(data.uris) == 1 else f"{data.uris[0]} and {data.num_files - 1} more"
    return f"{source} ({data.format})"


def dataset_to_dict(data: DatasetPart) -> dict[str, Any]:
    """The dataset as an object of JSON, whose first key is the format."""
    return {"format": data.format, **data.model_dump(exclude_none=True)}


def model_sentence(model: Model, *, gpu: str | None, source: str | None) -> str:
    """The model in one line, with the GPU that times are of and where the model was read."""
    parts = [*_shape(model), f"TP {model.tensor_model_parallel_size}{' with SP' if model.sequence_parallel else ''}"]
    if model.expert_model_parallel_size > 1:
        parts.append(f"EP {model.expert_model_parallel_size}")
    parts.append(model.precision if model.fp8_recipe is None else f"{model.precision} with FP8 {model.fp8_recipe}")
    if model.autocast:
        parts[-1] += " by autocast over float32 weights"
    if model.recompute_granularity is not None:
        parts.append(f"recompute {model.recompute_granularity}")
    if model.lora_dim is not None:
        parts.append(f"adapters of rank {model.lora_dim}")
    on, origin = "" if gpu is None else f" on {gpu}", "" if source is None else f" (from {source})"
    return f"model: {', '.join(parts)}{on}{origin}"


def _shape(model: Model) -> list[str]:
    layers = "1 layer" if model.num_layers == 1 else f"{model.num_layers} layers"
    parts = [f"{layers} {model.hybrid_layer_pattern}" if model.hybrid_layer_pattern else layers]
    parts.append(f"hidden {model.hidden_size}")
    if model.hybrid_layer_pattern is None or "*" in model.hybrid_layer_pattern:
        heads = f"{model.num_attention_heads} heads"
        if model.multi_latent_attention:
            parts.append(f"{heads} (latent, rank {model.kv_lora_rank})")
        else:
            groups = f" in {model.query_groups} groups" if model.query_groups < model.num_attention_heads else ""
            parts.append(f"{heads}{groups} of {model.head_dim}")
    if model.moe_layers < model.num_layers and (
        model.hybrid_layer_pattern is None or "-" in model.hybrid_layer_pattern
    ):
        parts.append(f"ffn {model.ffn_size}{' gated' if model.gated_linear_unit else ''}")
    if model.num_experts is not None:
        parts.append(f"{model.num_experts} experts of {model.expert_ffn_size}, {model.moe_router_topk} a token")
    if model.vocab_size is not None:
        parts.append(f"vocabulary {model.vocab_size}")
    return parts


def spread_sentence(spread: SpreadPart) -> str:
    """The fallbacks under the recommended graphs, and the graphs that each draw alone would get."""
    ends = spread.least, spread.most
    eager, largest = [percent(end.fallback_rate.step) for end in ends], [f"{end.max_seqs:,}" for end in ends]
    return (
        f"over {spread.draws} draws: {' to '.join(dict.fromkeys(eager))} of steps have an eager micro-batch by these "
        f"graphs; the largest graph by each draw alone is for {' to '.join(dict.fromkeys(largest))} documents"
    )


def times_sentences(times: Times, worth: Worth | None) -> list[str]:
    """The times of the median micro-batch, and what the plan is worth; none without times."""
    if times.decoder_replay_ms is None or times.decoder_eager_ms is None:
        return []
    outside = "" if times.outside_decoder_ms is None else f"; outside the decoder {times.outside_decoder_ms:.1f} ms"
    lines = [
        f"median micro-batch, one rank: decoder replayed {times.decoder_replay_ms:.1f} ms, eagerly "
        f"{write_range(times.decoder_eager_ms, 'ms')}{outside}",
        f"of {times.basis}",
    ]
    if worth is not None:
        line = (
            f"{write_range(worth.tokens_per_second, 'tokens/s')} on {write_count(worth.gpus, 'GPU')} "
            f"({write_range(worth.eager_tokens_per_second)} eagerly); over {write_count(worth.steps, 'step')} "
            f"{write_range(worth.gpu_hours, 'GPU-hours')}, {write_savings(worth.gpu_hours_saved, 'GPU-hours')}"
        )
        if worth.saved is not None:
            line += f", worth {write_range(worth.saved)} at {worth.gpu_hour_price:g} each"
        lines.append(line)
    return lines


def memory_sentence(memory: Memory) -> str:
    """The peak, its moment and its parts."""
    eager = {
        "training": f"{write_count(memory.eager_in_flight, 'eager micro-batch', 'eager micro-batches')} in flight",
        "capture": "a warm-up pass",
        "verification": "eager run and compared gradients",
    }
    parts = {
        "weights, gradients and optimizer": memory.state_bytes,
        "graphs": memory.graph_bytes,
        "static buffers": memory.static_bytes,
        eager[memory.moment]: memory.eager_bytes,
        "experts behind graphs": memory.experts_bytes,
        "outside the decoder": memory.outside_bytes,
    }
    shown = [f"{memory_size(size / 2**30)} {name}" for name, size in parts.items() if size]
    moments = {
        "training": "in the worst step",
        "capture": "at the last capture, before the optimizer's step",
        "verification": "where a micro-batch is verified",
    }
    return (
        f"peak memory: about {memory_size(memory.peak_bytes / 2**30)} on pipeline rank {memory.pipeline_rank}, "
        f"{moments[memory.moment]}: {join_words(shown)}"
    )


def trainer_weights_sentence(model: Model) -> str:
    """The precision in which Hugging Face's Trainer is taken to keep weights."""
    if model.autocast:
        how = "float32 (TRL loads a model by its name so, unless model_init_kwargs has a dtype)"
    else:
        how = f"{model.precision} (`autocast: true` in --settings: in float32)"
    return f"assumed: weights, gradients and Adam's moments in {how}"


def capture_sentence(capture: Capture) -> str:
    """How long the captures take, and of what."""
    low, high = (f"{seconds:.1f}" for seconds in capture.seconds)
    seconds = low if low == high else f"{low} to {high}"
    return (
        f"capture: {write_count(capture.graphs, 'graph')} in {seconds} s, {capture.passes:,} forward and backward "
        "passes, once in the run"
    )


def overlap_sentence(overlap: Overlap) -> str:
    """What graphs of a few layers save of a step; or that whole chunks are as good."""
    links = "of each GPU between hosts" if overlap.across_hosts else "between the GPUs of a host"
    basis = f"{links} (assumed; data_parallel_gbps in --settings gives another)"
    communication = (
        f"{overlap.communication_ms:.1f} ms of data-parallel communication at {overlap.gbps:.0f} GB/s "
        f"{'(data_parallel_gbps)' if overlap.gbps_given else basis}"
    )
    if overlap.layers_per_graph is None:
        return (
            "overlap: cutting chunks into graphs of fewer layers would not pay (modelled), out of a step's "
            f"{communication}"
        )
    layers = "1 layer" if overlap.layers_per_graph == 1 else f"{overlap.layers_per_graph} layers"
    least, most = (f"{ms:.1f}" for ms in sorted(overlap.gained_ms))
    gain = f"{least} to {most} ms a step (modelled; the least with CUDA_DEVICE_MAX_CONNECTIONS=1)"
    if least == most:
        gain = f"about {most} ms a step (modelled)"
    return f"overlap: with --impl chunk, graphs of {layers} save {gain}, out of {communication}"


def training_command(plan: Path | str, *, of_trainer: bool, of_script: bool, experts: bool = False) -> str:
    """What the user types to train by `plan`: for Hugging Face's Trainer, for a script of Megatron's, or else.

    Layers with experts were not seen to work compiled.
    """
    if of_trainer:
        compiled = "" if experts else ", compile=True"
        return f'SFTTrainer(..., callbacks=[PlanCallback("{plan}"{compiled})]), from thdprof.transformers'
    if of_script:
        return f"torchrun ... -m thdprof.run --plan {plan} SCRIPT.py ..., with the script's own arguments"
    return f"train by {plan} (README.md)"
