"""Every token's loss must not depend on how many ranks share its document: `torchrun ... dynamic_cp_case.py OPTIONS`.

The options are those of examples/pretrain_dynamic_cp.py. The documents of one step run at every size, replayed and
eagerly; attention is made sharp first, so that a wrong position or a wrong piece of a document shows.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import pretrain_dynamic_cp as example
import pretrain_packed_gpt as base

from thdprof.runtime.megatron import install, packed_seq_params


def main() -> None:
    args = example.arguments()
    plan = example.plan_of(args)
    ranks = plan.training.data_parallel_size * plan.training.context_parallel_size
    sizes = example.sizes_of(args, plan, ranks)
    example.prepare(sizes)
    example.start(args, sizes)
    example.seed(args)
    config = base.build_config(args, sizes, "none")
    config.hybrid_context_parallel = config.calculate_per_token_loss = True
    (model,) = base.build_chunks(args, config, sizes, plan.training.seq_length)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "linear_qkv.weight" in name or "output_layer.weight" in name:
                parameter.mul_(4)
    documents = example.Documents(args.data, plan)
    rank, room = torch.distributed.get_rank(), plan.training.max_seqlen_per_dp_cp_rank
    fits = [n for n in example.steps_of(plan)[0].tolist() if 0 < documents.padded[n] <= room]
    with install([model], plan, config) as installation:
        found = {}
        for size in sorted({b.cp_size for b in plan.graphs.buckets}):
            cycle = itertools.repeat((size,) * (ranks // size))
            samples, groups = example.deal_rounds(fits, documents.padded, cycle, ranks=ranks, room=room)
            losses = torch.zeros(int(documents.lengths.sum()), device="cuda")
            held = torch.zeros_like(losses)
            model.zero_grad_buffer()
            for placed in groups:
                (sample,) = placed[rank]
                run_sample(model, documents, samples[sample]["documents"], size, room, rank % size, losses, held)
            for total in (losses, held):
                torch.distributed.all_reduce(total)
            grads = model.buffers[0].grad_data.clone()
            torch.distributed.all_reduce(grads)
            found[size] = losses, held, grads
        stats = installation.stats()
    if rank == 0:
        print(stats)
        assert {b.cp_size for b in stats.replays} == set(found), str(stats)
        compare(found)
        print("ok")
    example.stop()


def run_sample(model, documents, numbers, size, room, place, losses, held) -> None:
    """Forward and backward of one micro-batch; its tokens' losses go to their places in the dataset."""
    device = losses.device
    layout = documents.layout(numbers, cp_size=size, room=room)
    mine = torch.from_numpy(layout.tokens_of(place))
    texts = {name: torch.from_numpy(values) for name, values in documents.texts(numbers).items()}
    part = {name: torch.where(mine < 0, 0, values[mine])[None].to(device) for name, values in texts.items()}
    params = packed_seq_params(
        layout.cu_seqlens,
        cu_seqlens_padded=layout.cu_seqlens_padded,
        pad_between_seqs=True,
        local_cp_size=size,
        device=device,
    )
    output = model(
        part["tokens"], part["position_ids"], None, labels=part["labels"], loss_mask=part["loss_mask"],
        packed_seq_params=params,
    )  # fmt: skip
    (output * part["loss_mask"]).sum().backward()
    begins = torch.from_numpy(documents.lengths).cumsum(0) - torch.from_numpy(documents.lengths)
    own = torch.cat([begins[n] + torch.arange(int(documents.lengths[n])) for n in numbers])
    real = mine >= 0
    where = own[mine[real]].to(device)
    losses[where] = output.detach().reshape(-1)[real.to(device)].float()
    held[where] = 1


def compare(found) -> None:
    """Sizes beside the smallest: each token once, losses and gradients alike but for rounding."""
    first = min(found)
    losses, held, grads = found[first]
    assert torch.isfinite(losses).all()
    assert held.max() == 1
    spread = losses[held > 0].std().item()
    assert spread > 0.5, spread  # or a wrong one would not show
    for size, (other, seen, gradients) in found.items():
        assert torch.equal(seen, held), f"size {size}: other tokens were trained"
        difference = (other - losses).abs()[held > 0]
        relative = ((gradients - grads).norm() / grads.norm()).item()
        told = f"size {size}: mean {difference.mean():.2e}, most {difference.max():.2e}, gradients {relative:.2e}"
        print(f"{told}; losses spread {spread:.2f}")
        assert difference.mean() < 0.02 * spread, told
        assert relative < 0.05, told


if __name__ == "__main__":
    main()
