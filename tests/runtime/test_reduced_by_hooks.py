"""Replays inside a DistributedDataParallel: its hooks reduce the gradients that replays have added."""

from __future__ import annotations

import numpy as np
import pytest
from support.cpu_graphs import as_if_on_a_gpu
from support.rank_processes import start_ranks

torch = pytest.importorskip("torch")

from thdprof.runtime import Bucket, GraphedModule, pack  # noqa: E402

TOKENS, HIDDEN = 16, 8
CUTS = [[0, 5, 16], [0, 16], [0, 1, 2, 3, 4, 5, 16], [0, 3, 9, 16]]
"""Boundaries of the micro-batches of a step; the third has more documents than the bucket holds."""


class Stack(torch.nn.Module):
    """Layers whose graphs need no attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x, packed):
        for linear in self.linears:
            x = x + torch.tanh(linear(x))
        return x


class Model(torch.nn.Module):
    """A head behind a stack, which is graphed where `stack` is given."""

    def __init__(self, *, graphs: bool, reduced_by_hooks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = Stack()
        self.head = torch.nn.Linear(HIDDEN, 1)
        self.frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
        run = self.layers
        if graphs:
            buckets = [Bucket(4, TOKENS, TOKENS)]
            run = GraphedModule(self.layers, buckets, sample_every=0, reduced_by_hooks=reduced_by_hooks)
        self.__dict__["run"] = run  # as an attribute of a model of transformers, no submodule of it

    def forward(self, x, packed):
        return self.head(self.run(x, packed)).square().mean()


def steps(model, rank: int, num_steps: int = 3) -> list[torch.Tensor]:
    """The gradients of every step, each of accumulated micro-batches of which the last one is reduced."""
    rng = np.random.default_rng(rank)
    seen = []
    for _ in range(num_steps):
        for number, cuts in enumerate(CUTS):
            x = torch.from_numpy(rng.normal(size=(TOKENS, HIDDEN)).astype(np.float32))
            last = number == len(CUTS) - 1
            if last:
                model(x, pack(cuts)).backward()
            else:
                with model.no_sync():
                    model(x, pack(cuts)).backward()
        seen += [p.grad.clone() for p in model.parameters() if p.requires_grad]
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p -= 0.1 * p.grad
                    p.grad = None
    return seen


def on_a_rank(rank: int, folder: str) -> None:
    patch = pytest.MonkeyPatch()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ddp = torch.nn.parallel.DistributedDataParallel
    found = {"eager": steps(ddp(Model(graphs=False)), rank)}
    as_if_on_a_gpu(patch)
    for name in ("replayed", "replayed, unused looked for", "by itself"):
        model = Model(graphs=True, reduced_by_hooks=name != "by itself")
        options = {} if name == "replayed" else {"find_unused_parameters": True}
        found[name] = steps(ddp(model, **options), rank)
        assert model.run.stats().replays.total() == 9, model.run.stats()
        assert dict(model.run.stats().fallbacks) == {"too_many_seqs": 3}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def gradients(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    start_ranks(on_a_rank, 2, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_gradients_are_reduced_as_without_graphs(gradients):
    for rank in (0, 1):
        assert len(gradients[rank]["eager"]) >= 20
        for name in ("replayed", "replayed, unused looked for"):
            for eager, replayed in zip(gradients[rank]["eager"], gradients[rank][name], strict=True):
                np.testing.assert_allclose(replayed, eager, rtol=1e-5, atol=1e-7)
    for mine, other in zip(gradients[0]["replayed"], gradients[1]["replayed"], strict=True):
        np.testing.assert_array_equal(mine, other)


def test_without_the_hooks_the_gradients_would_be_wrong(gradients):
    pairs = zip(gradients[0]["eager"], gradients[0]["by itself"], strict=True)
    assert not all(np.allclose(eager, alone, rtol=1e-3) for eager, alone in pairs)
