"""Two exchanges of tokens between ranks that share dropless experts, in static shapes: each a CUDA graph, timed alone.

    torchrun --nproc-per-node 2 benchmarks/exchanges.py --room 1.5

`gather` sends tokens to all and returns sums, as with `graphs.expert_room`; `all-to-all` sends rows to their experts.
"""

import argparse
import statistics
import timeit
from functools import partial

import torch
import torch.distributed as dist


def main() -> None:
    """Time both, and print them on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 4096, "hidden": 2048, "topk": 8, "rounds": 30, "room": 1.5}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"[{default}]")
    args, on_gpu = parser.parse_args(), torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = torch.randn(args.tokens, args.hidden, device=(device := f"cuda:{rank}" if on_gpu else "cpu")).bfloat16()
    everyone, rows = own.repeat(ranks, 1), ranks * int(args.room * args.tokens * args.topk / ranks)
    sent, received = (torch.zeros(rows, args.hidden, device=device).bfloat16() for _ in range(2))
    ways = {
        "gather": lambda: (dist.all_gather_into_tensor(everyone, own), dist.reduce_scatter_tensor(own, everyone)),
        "all-to-all": lambda: (dist.all_to_all_single(received, sent), dist.all_to_all_single(sent, received)),
    }
    for name, exchange in ways.items():
        exchange()
        if on_gpu:
            with torch.cuda.device(device), torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
                exchange()
            exchange = graph.replay
        wait = partial(lambda passed: (passed(), own[0, 0].item(), received[0, 0].item()), exchange)
        times = timeit.repeat(wait, number=1, repeat=args.rounds)
        if rank == 0:
            print(f"| {name} | {1000 * statistics.median(times):.3f} ms there and back |", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
