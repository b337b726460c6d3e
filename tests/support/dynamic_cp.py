"""Trains a GPT under dynamic context parallelism: every micro-batch is shared by a group of ranks of its own size.

    torchrun --nproc-per-node 4 tests/support/dynamic_cp.py --data DATASET --log FILE --plan PLAN VARIANT...

A variant is KIND or KIND:ROUNDS. KIND is `replayed`, `padded` (the same input, eagerly) or `eager` (not padded). ROUNDS
are the sizes of groups that run together, such as 1,2,4,2+1+1; without them Megatron's own scheduler chooses. Whatever
the sizes, a step trains the same documents, and every token of it weighs alike. All variants run in one process group,
one after the other, and each writes one line. `losses` instead of a variant compares every token's loss between sizes.

A loop of one's own needs of this: groups with hybrid_context_parallel, `lay_out` and `packed_seq_params` with
local_cp_size in the forward step, `install` around the steps, and calculate_per_token_loss.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.dynamic_cp_data import Documents, deal_rounds, dealt_steps, rounds_of, steps_of
from support.own_loop import VOCABULARY, config_of, process_groups, wrapped
from thdprof.plan import Plan, load_plan
from thdprof.runtime import Stats
from thdprof.runtime.megatron import install, packed_seq_params

SHARP = 4
"""By how much attention is sharpened before losses are compared, so that a wrong position or piece shows."""


def build(plan: Plan) -> tuple[Any, Any]:
    """The model, wrapped, and its configuration."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    config = config_of(
        hidden_size=512,
        num_attention_heads=16,
        context_parallel_size=plan.training.context_parallel_size,
        hybrid_context_parallel=True,
        max_seqlen_per_dp_cp_rank=plan.training.max_seqlen_per_dp_cp_rank,
        calculate_per_token_loss=True,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_with_transformer_engine_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=plan.training.seq_length,
        position_embedding_type="rope",
    )
    return wrapped(model, config), config


def run_sample(model: Any, documents: Documents, numbers: Sequence[int], *, size: int, room: int) -> tuple[Any, ...]:
    """Losses of this rank's tokens of a micro-batch, their loss mask, and which tokens they are (-1: padding)."""
    rank = torch.distributed.get_rank()
    layout = documents.layout(numbers, cp_size=size, room=room)
    mine = torch.from_numpy(layout.tokens_of(rank % size))
    texts = {name: torch.from_numpy(values) for name, values in documents.texts(numbers).items()}
    part = {name: torch.where(mine < 0, 0, values[mine])[None].cuda() for name, values in texts.items()}
    params = packed_seq_params(
        layout.cu_seqlens,
        cu_seqlens_padded=layout.cu_seqlens_padded,
        pad_between_seqs=True,
        local_cp_size=size,
    )
    output = model(
        part["tokens"],
        part["position_ids"],
        None,
        labels=part["labels"],
        loss_mask=part["loss_mask"],
        packed_seq_params=params,
    )
    return output, part["loss_mask"], mine


def forward_step_of(plan: Plan, documents: Documents) -> Callable[..., Any]:
    """The function that Megatron's schedule calls for every sample."""
    room = plan.training.max_seqlen_per_dp_cp_rank or 0

    def token_loss(mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        loss, num_tokens = (output.view(-1).float() * mask.view(-1)).sum(), mask.sum()
        return loss, num_tokens.int(), {"loss": torch.stack([loss.detach().double(), num_tokens.double()])}

    def forward_step(samples: Iterator[dict[str, Any]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        sample = next(samples)
        size = int(sample["local_cp_size"])  # Megatron's, on the host
        output, mask, _ = run_sample(model, documents, sample["documents"], size=size, room=room)
        return output, partial(token_loss, mask)

    return forward_step


def train(plan: Plan, documents: Documents, kind: str, sizes: str, steps: int | None) -> dict[str, Any]:
    """Losses and gradient norms of a variant's steps, and what every rank counted."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=True, force_reset_rng=True)
    if kind == "eager":
        plan = plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"impl": "none"})})
    model, config = build(plan)
    settings = OptimizerConfig(lr=1e-4, bf16=True, params_dtype=torch.bfloat16)
    optimizer = get_megatron_optimizer(settings, [model], use_gloo_process_groups=False)
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    world = torch.distributed.get_world_size()
    dealt = dealt_steps(plan, documents, rounds_of(sizes, world) if sizes else None)
    losses, grad_norms = [], []
    with install(model, plan, config, replay=kind != "padded") as installation:
        for samples, groups in itertools.islice(dealt, steps):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            told = get_forward_backward_func()(
                forward_step_func=forward_step_of(plan, documents),
                data_iterator=iter([(samples, groups)]),
                model=[model],
                num_microbatches=1,
                seq_length=plan.training.seq_length,
                micro_batch_size=1,
                forward_only=False,
            )
            grad_norms.append(float(optimizer.step()[1]))
            total = sum(part["loss"] for part in told)
            torch.distributed.all_reduce(total)
            losses.append(float(total[0] / total[1]))
        ranks: list[Any] = [None] * world
        torch.distributed.all_gather_object(ranks, installation.stats())
    counted = {"ranks": [rank.to_dict() for rank in ranks], "together": Stats.of_ranks(ranks).to_dict()}
    return {"losses": losses, "grad_norms": grad_norms, **counted}


def compare_losses(plan: Plan, documents: Documents) -> dict[str, Any]:
    """The documents of one step at every size: each token's loss, which it had, and gradients, beside the smallest."""
    model, config = build(plan)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_qkv.weight" in name or "output_layer.weight" in name:
                parameter.mul_(SHARP)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    room = plan.training.max_seqlen_per_dp_cp_rank or 0
    fits = [n for n in steps_of(plan)[0].tolist() if 0 < documents.padded[n] <= room]
    begins = torch.from_numpy(documents.lengths).cumsum(0) - torch.from_numpy(documents.lengths)
    found, told = {}, {}
    with install(model, plan, config) as installation:
        for size in sorted({bucket.cp_size for bucket in plan.graphs.buckets}):
            cycle = itertools.repeat((size,) * (ranks // size))
            samples, groups = deal_rounds(fits, documents.padded, cycle, ranks=ranks, room=room)
            losses = torch.zeros(int(documents.lengths.sum()), device="cuda")
            held = torch.zeros_like(losses)
            model.zero_grad_buffer()
            for numbers in (samples[placed[rank][0]]["documents"] for placed in groups):
                output, mask, mine = run_sample(model, documents, numbers, size=size, room=room)
                (output * mask).sum().backward()
                own = torch.cat([begins[n] + torch.arange(int(documents.lengths[n])) for n in numbers])
                where = own[mine[mine >= 0]].cuda()
                losses[where] = output.detach().reshape(-1)[(mine >= 0).cuda()].float()
                held[where] = 1
            grads = model.buffers[0].grad_data.clone()
            for total in (losses, held, grads):
                torch.distributed.all_reduce(total)
            found[size] = losses, held, grads
        replayed = sorted({bucket.cp_size for bucket in installation.stats().replays})
    losses, held, grads = found[min(found)]
    spread = losses[held > 0].std().item()
    for size, (other, seen, gradients) in found.items():
        told[size] = {
            "same tokens": bool(torch.equal(seen, held)) and seen.max().item() == 1,
            "mean difference": (other - losses).abs()[held > 0].mean().item() / spread,
            "gradients": ((gradients - grads).norm() / grads.norm()).item(),
        }
    return {"replayed": replayed, "spread": spread, "sizes": told}


def main() -> None:
    """Run the variants of the command line; rank 0 writes a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", required=True)
    parser.add_argument("--data", required=True, help="the Megatron dataset of whose lengths the plan was made")
    parser.add_argument("--record", required=True, type=Path)
    parser.add_argument("--steps", type=int, help="of eager variants [all]")
    parser.add_argument("variants", nargs="+")
    args = parser.parse_args()
    plan = load_plan(args.plan)
    documents = Documents(args.data, plan)
    with process_groups(context_parallel_size=plan.training.context_parallel_size, hybrid_context_parallel=True):
        for variant in args.variants:
            kind, _, sizes = variant.partition(":")
            if kind == "losses":
                told = compare_losses(plan, documents)
            else:
                told = train(plan, documents, kind, sizes, args.steps if kind == "eager" else None)
            if torch.distributed.get_rank() == 0:
                with args.record.open("a") as file:
                    file.write(json.dumps({"variant": variant, **told}) + "\n")
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
