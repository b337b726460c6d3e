"""Trains a GPT with megatron-core in a loop of its own, by a plan.

    thdprof demo demo
    thdprof analyze demo/megatron --seq-length 4096 --global-batch-size 8 --impl chunk -o plan.yaml
    torchrun --nproc-per-node 1 examples/train_megatron_core.py --plan plan.yaml --stats stats.jsonl
    thdprof compare plan.yaml stats.jsonl

Every rank opens the data itself, before the first step: no decision is sent to others, and no stage waits for it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state as groups
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import flatten_batch_for_packed_sequences, get_model_config
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from thdprof import Plan, load_plan
from thdprof.errors import ThdprofError, UsageError
from thdprof.runtime import Stats
from thdprof.runtime.megatron import SettingsError, VersionError, install, packed_seq_params


def micro_batches(plan: Plan, rank: int, cache: Path) -> Iterator[dict[str, torch.Tensor]]:
    """What data-parallel rank `rank` trains, on the host: the rows of a micro-batch as one, with their boundaries."""
    run = plan.training
    if plan.dataset.format != "megatron" or run.loader != "single" or run.context_parallel_size > 1:
        raise UsageError("this example trains Megatron datasets by --loader single, without context parallelism")
    tokenizer = SimpleNamespace(vocab_size=256, eod=0, pad=-1, unique_identifiers={})  # all that the dataset asks for
    data = GPTDatasetConfig(
        random_seed=run.seed, sequence_length=run.seq_length, split=run.split, tokenizer=tokenizer,
        blend=([uri.removesuffix(".idx") for uri in plan.dataset.uris], run.weights), inter_document_masking=True,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        add_extra_token_to_sequence=run.add_extra_token, path_to_cache=str(cache),
    )  # fmt: skip
    samples = [run.train_samples, *2 * [None if run.train_samples is None else 0]]  # none for validation and test
    rows, *_ = BlendedMegatronDatasetBuilder(GPTDataset, samples, lambda: True, data).build()
    sampler = MegatronPretrainingSampler(len(rows), 0, run.micro_batch_size, rank, run.data_parallel_size)
    loader = torch.utils.data.DataLoader(rows, batch_sampler=sampler, num_workers=2)
    return map(flatten_batch_for_packed_sequences, loader)


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedules call for a micro-batch: the output, and what makes its loss."""
    batch = next(batches)
    names = ["tokens", "position_ids"] if groups.is_pipeline_first_stage() else []
    names += ["labels", "loss_mask"] if groups.is_pipeline_last_stage() else []
    here = {name: batch[name].pin_memory().cuda(non_blocking=True) for name in names}
    given = {name: here.get(name) for name in ("labels", "loss_mask")}
    params = packed_seq_params(batch["cu_seqlens"].squeeze(0))  # boundaries on the host: no decision waits for the GPU
    output = model(here.get("tokens"), here.get("position_ids"), None, packed_seq_params=params, **given)

    def token_loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        mask = here["loss_mask"].view(-1)
        loss, num_tokens = (output.view(-1).float() * mask).sum(), mask.sum()
        return loss, num_tokens.int(), {"loss": torch.stack([loss.detach(), num_tokens])}

    return output, token_loss


def build(args: argparse.Namespace, plan: Plan) -> tuple[torch.nn.Module, Any]:
    """The model of this pipeline stage, wrapped, and its optimizer."""
    config = TransformerConfig(
        num_layers=args.layers, hidden_size=args.hidden, num_attention_heads=args.heads, add_bias_linear=False,
        tensor_model_parallel_size=args.tp, sequence_parallel=args.tp > 1, hidden_dropout=0.0, attention_dropout=0.0,
        pipeline_model_parallel_size=plan.training.pipeline_parallel_size, pipeline_dtype=torch.bfloat16, bf16=True,
        params_dtype=torch.bfloat16, apply_rope_fusion=True,
        cuda_graph_impl="none" if plan.graphs.impl == "chunk" else plan.graphs.impl,
    )  # fmt: skip
    model = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(), vocab_size=args.vocabulary,
        max_sequence_length=plan.training.seq_length, position_embedding_type="rope",
        pre_process=groups.is_pipeline_first_stage(), post_process=groups.is_pipeline_last_stage(),
    )  # fmt: skip
    wrapping, module = DistributedDataParallelConfig(grad_reduce_in_fp32=True), Float16Module(config, model.cuda())
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # gradients must be tied to no stream that a capture may not wait for
        wrapped = DistributedDataParallel(config, wrapping, module)
    torch.cuda.synchronize()
    settings = OptimizerConfig(lr=1e-4, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(settings, [wrapped], use_gloo_process_groups=False)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    return wrapped.train(), optimizer


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True, help="what thdprof analyze wrote for a Megatron dataset")
    parser.add_argument("--replay", choices=["on", "off"], default="on", help="off: the same input, eagerly [on]")
    parser.add_argument("--stats", type=Path, help="append the counters of all ranks, for thdprof compare")
    for name, value in {"layers": 24, "hidden": 1024, "heads": 16, "vocabulary": 256, "tp": 1, "steps": None}.items():
        parser.add_argument(f"--{name}", type=int, default=value, help=f"[{value or 'all of the plan'}]")
    return parser.parse_args(argv)


def main() -> None:
    """Train all of the plan's steps on this rank's GPU, and write what fell back."""
    args = arguments()
    plan = load_plan(args.plan)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    groups.initialize_model_parallel(args.tp, plan.training.pipeline_parallel_size)
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=True)
    run, rank = plan.training, groups.get_data_parallel_rank()
    count = run.global_batch_size // (run.micro_batch_size * run.data_parallel_size)
    model, optimizer = build(args, plan)
    batches = micro_batches(plan, rank, Path(args.plan).with_suffix(".cache"))
    with install(model, plan, get_model_config(model), replay=args.replay == "on", say=print) as installation:
        for step in range(args.steps or plan.microbatches.steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            told = get_forward_backward_func()(
                forward_step_func=forward_step, data_iterator=batches, model=[model], num_microbatches=count,
                seq_length=run.seq_length * run.micro_batch_size, micro_batch_size=1, forward_only=False,
            )  # fmt: skip
            _, norm, _ = optimizer.step()
            if told and rank == groups.get_tensor_model_parallel_rank() == 0:  # the last stage has the losses
                loss, num_tokens = sum(part["loss"] for part in told).tolist()
                print(f"step {step + 1}: loss {loss / num_tokens:.6f}, gradient norm {float(norm):.6f}", flush=True)
        ranks: list[Any] = [None] * run.data_parallel_size
        torch.distributed.all_gather_object(ranks, installation.stats(), group=groups.get_data_parallel_group())
    if torch.distributed.get_rank() == 0 and args.stats is not None:
        Stats.of_ranks(ranks).append_jsonl(args.stats)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except (ThdprofError, SettingsError, VersionError) as error:
        sys.exit(f"train_megatron_core: {error}")
