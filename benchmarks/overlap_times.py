"""What graphs of one layer hide of data-parallel communication, by matrix products and NCCL alone, without a trainer.

    python benchmarks/overlap_times.py [--connections 1,8]

Two GPUs of one host. A layer's backward is its matrix products and the addition to float32 gradients, in one CUDA
graph; after it, each of the layer's buckets is checked for NaN (a norm, for which the host waits twice), scaled and
reduced as Megatron's DistributedDataParallel does. A forward waits for its parameters as Megatron's hooks do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

REPEATS, WARM = 7, 3
GRADIENT_BYTES, PARAMETER_BYTES = 4, 2


def shapes(hidden: int, ffn: int) -> list[tuple[int, int]]:
    """Outputs and inputs of a layer's matrices, in the order in which its backward ends them."""
    return [(hidden, ffn), (2 * ffn, hidden), (3 * hidden, hidden), (hidden, hidden)]


def bucket_sizes(hidden: int, ffn: int, least: int = 40_000_000) -> list[int]:
    """Parameters of the buckets that one layer's backward completes, from the second-last layer on."""
    sizes, size = [], hidden * hidden  # the layer after this one left its last matrix over
    for outputs, inputs in shapes(hidden, ffn)[:-1]:
        size += outputs * inputs
        if size >= least:
            sizes.append(size)
            size = 0
    return sizes if not size else [*sizes[:-1], sizes[-1] + size]


class Rank:
    """One rank: its layers' graphs, gradients and parameters."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.torch, self.layers = torch, args.layers
        self.sizes = bucket_sizes(args.hidden, args.ffn)
        elements = sum(self.sizes)
        self.gradients = [torch.zeros(elements, device="cuda") for _ in range(args.layers)]
        self.parameters = [
            torch.full((elements,), 1e-3, device="cuda", dtype=torch.bfloat16) for _ in range(args.layers)
        ]
        wide = max(outputs for outputs, _ in shapes(args.hidden, args.ffn))
        self.tokens = torch.full((args.tokens, wide), 1e-3, device="cuda", dtype=torch.bfloat16)
        self.matrices = shapes(args.hidden, args.ffn)
        self.pool = torch.cuda.graph_pool_handle()
        self.backwards = [self._captured(self._backward, layer) for layer in range(args.layers)]
        self.forwards = [self._captured(self._forward, layer) for layer in range(args.layers)]
        self.handles: list[Any] = []
        self.gathers: dict[int, Any] = {}

    def _captured(self, work: Callable[[int], None], layer: int) -> Any:
        work(layer)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, pool=self.pool):
            work(layer)
        return graph

    def _backward(self, layer: int) -> None:
        begin = 0
        for outputs, inputs in self.matrices:
            weight = self.parameters[layer][begin : begin + outputs * inputs].view(outputs, inputs)
            main_grad = self.gradients[layer][begin : begin + outputs * inputs].view(outputs, inputs)
            grad, activations = self.tokens[:, :outputs], self.tokens[:, :inputs]
            _ = grad @ weight
            main_grad.add_(grad.t() @ activations)
            begin += outputs * inputs

    def _forward(self, layer: int) -> None:
        begin = 0
        for outputs, inputs in reversed(self.matrices):
            weight = self.parameters[layer][begin : begin + outputs * inputs].view(outputs, inputs)
            _ = self.tokens[:, :inputs] @ weight.t()
            begin += outputs * inputs

    def buckets(self, of: Sequence[Any], layer: int) -> list[Any]:
        """The buckets of one layer."""
        return list(of[layer].split(self.sizes))

    def check(self, bucket: Any) -> None:
        """Megatron's check of local gradients: a norm, and two questions that the host waits for."""
        norm = bucket.norm(p=2)
        if bool(self.torch.isnan(norm)) or bool(self.torch.isinf(norm)):
            raise SystemExit("a gradient is not finite")

    def start_reduce(self, layer: int, *, checked: bool, scaled: bool = True) -> None:
        """Start the reduction of one layer's buckets."""
        for bucket in self.buckets(self.gradients, layer):
            if checked:
                self.check(bucket)
            if scaled:
                bucket *= 0.5
            self.handles.append(self._communicate("reduce", bucket))

    def _communicate(self, kind: str, bucket: Any) -> Any:
        distributed = self.torch.distributed
        shard = bucket.chunk(2)[distributed.get_rank()]
        with distributed._coalescing_manager(distributed.group.WORLD, async_ops=True) as manager:
            if kind == "reduce":
                distributed.reduce_scatter_tensor(shard, bucket, async_op=True)
            else:
                distributed.all_gather_into_tensor(bucket, shard, async_op=True)
        return manager

    def wait_all(self) -> None:
        """Wait for everything that was started."""
        for handle in self.handles:
            handle.wait()
        self.handles = []

    def backward(self, per_graph: int, *, checked: bool, scaled: bool = True) -> None:
        """A backward whose reductions start after every `per_graph` layers."""
        waiting = []
        for layer in reversed(range(self.layers)):
            self.backwards[layer].replay()
            waiting.append(layer)
            if layer % per_graph == 0:
                for done in waiting:
                    self.start_reduce(done, checked=checked, scaled=scaled)
                waiting = []
        self.wait_all()

    def forward(self, per_graph: int, *, ahead: bool = False) -> None:
        """A forward that waits for its parameters before every `per_graph` layers; Megatron gathers one bucket ahead
        of what is waited for, or all of them at once where gathers are aligned."""
        count = self.layers * len(self.sizes)
        every = [bucket for layer in range(self.layers) for bucket in self.buckets(self.parameters, layer)]

        def start(number: int) -> None:
            if number < count and number not in self.gathers:
                self.gathers[number] = self._communicate("gather", every[number])

        for number in range(count if ahead else 0):
            start(number)
        for layer in range(self.layers):
            if layer % per_graph == 0:
                end = min(count, (layer + per_graph) * len(self.sizes))
                for number in range(layer * len(self.sizes), end):
                    start(number)
                    self.gathers[number].wait()
                    if not ahead:
                        start(number + 1)
            self.forwards[layer].replay()
        self.gathers = {}

    def rows(self) -> dict[str, Callable[[], None]]:
        """What is timed, by name."""
        whole = self.layers

        def replay(graphs: Sequence[Any]) -> Callable[[], None]:
            return lambda: [graph.replay() for graph in graphs][:0]  # type: ignore[return-value]

        def each(work: Callable[[Any], Any]) -> Callable[[], None]:
            return lambda: [work(b) for layer in range(whole) for b in self.buckets(self.gradients, layer)][:0]  # type: ignore[return-value]

        def reduce_all() -> None:
            for layer in range(whole):
                self.start_reduce(layer, checked=False, scaled=False)
            self.wait_all()

        def gather_all() -> None:
            for layer in range(whole):
                for bucket in self.buckets(self.parameters, layer):
                    self.handles.append(self._communicate("gather", bucket))
            self.wait_all()

        found: dict[str, Callable[[], None]] = {
            "backward alone": replay(self.backwards),
            "forward alone": replay(self.forwards),
            "reduce-scatters alone": reduce_all,
            "all-gathers alone": gather_all,
            "scaling alone": each(lambda bucket: bucket.mul_(0.5)),
            "checks alone": each(self.check),
        }
        for per_graph in dict.fromkeys((whole, 4, 1)):
            name = "whole" if per_graph == whole else f"{per_graph} a graph"
            found |= {
                f"backward, checked, {name}": lambda n=per_graph: self.backward(n, checked=True),
                f"backward, not checked, {name}": lambda n=per_graph: self.backward(n, checked=False),
                f"backward, neither checked nor scaled, {name}": lambda n=per_graph: self.backward(
                    n, checked=False, scaled=False
                ),
                f"forward, one bucket ahead, {name}": lambda n=per_graph: self.forward(n),
                f"forward, all ahead, {name}": lambda n=per_graph: self.forward(n, ahead=True),
            }
        return found


def measure(args: argparse.Namespace) -> None:
    """One rank's measurements; rank 0 prints them."""
    import torch

    rank, store = int(args.rank[0]), args.rank[1]
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{store}", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    this = Rank(args)
    for name, work in this.rows().items():
        taken = []
        for number in range(WARM + REPEATS):
            torch.distributed.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            if number >= WARM:
                taken.append((time.perf_counter() - began) * 1000)
        if rank == 0:
            least, most = min(taken), max(taken)
            print(f"| {name} | {statistics.median(taken):.2f} | {least:.2f} to {most:.2f} |", flush=True)
    if rank == 0:
        reduced = sum(this.sizes) * this.layers * GRADIENT_BYTES / 1e9
        print(f"\n{reduced:.2f} GB of gradients in {this.layers} x {this.sizes} elements", flush=True)
    torch.distributed.barrier()
    torch.cuda.synchronize()
    os._exit(0)  # graphs and communicators end with the process


def main() -> None:
    """Start two ranks for each number of connections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", default="1,8", help="values of CUDA_DEVICE_MAX_CONNECTIONS [1,8]")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=10880, help="of a gated linear unit")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        measure(args)
        return
    shape = [f"--{name}={getattr(args, name)}" for name in ("layers", "hidden", "ffn", "tokens")]
    for connections in args.connections.split(","):
        print(f"\nCUDA_DEVICE_MAX_CONNECTIONS={connections}\n\n| row | ms | least to most |\n|---|---|---|", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", __file__, *shape, "--rank"]
            environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
            started = [
                subprocess.Popen([*command, str(rank), str(Path(folder) / "store")], env=environment)
                for rank in range(2)
            ]
            codes = [process.wait() for process in started]
            if any(codes):
                raise SystemExit("a rank failed")


if __name__ == "__main__":
    main()
