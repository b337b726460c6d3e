"""What it takes ranks of one host to agree on a micro-batch: the exchange from host to host, without a GPU.

    python benchmarks/agreement.py [--ranks 2,4] [--exchanges 2000]

Prints percentiles of the time of one exchange of rank 0, in microseconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def exchange(rank: int, ranks: int, store: str, exchanges: int) -> None:
    """One rank: agree so many times on as many integers as three buckets and two slots need."""
    import torch

    from thdprof.runtime.megatron.rank_agreement import Peers

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    peers, message, taken = Peers(range(ranks)), [1] * 16, []
    for number in range(exchanges + 100):
        began = time.perf_counter()
        peers.largest(message)
        if number >= 100:
            taken.append((time.perf_counter() - began) * 1e6)
    if rank == 0:
        taken.sort()
        told = ", ".join(f"p{p} {taken[len(taken) * p // 100]:.0f} us" for p in (10, 50, 90, 99))
        print(f"{ranks} ranks: {told}; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    """Start the ranks of each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="sizes of groups [2,4]")
    parser.add_argument("--exchanges", type=int, default=2000, help="exchanges of each size [2000]")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        exchange(int(args.rank[0]), int(args.rank[1]), args.rank[2], args.exchanges)
        return
    for ranks in map(int, args.ranks.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", __file__, "--exchanges", str(args.exchanges), "--rank"]
            store = str(Path(folder) / "store")
            started = [subprocess.Popen([*command, str(rank), str(ranks), store]) for rank in range(ranks)]
            if any(process.wait() for process in started):
                raise SystemExit(f"{ranks} ranks: one failed")


if __name__ == "__main__":
    main()
