"""A loop of one's own that takes back a state which it saved: `python tests/gpu/gpu_cases_loaded.py NAME`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # before Transformer Engine is imported

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.own_loop import VOCABULARY, config_of, process_groups, small_gpt, wrapped

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.plan import Plan
from thdprof.runtime.megatron import install, packed_seq_params

TOKENS, STEPS = 256, 6
BOUNDS = ([0, 100, TOKENS], [0, 30, 60, TOKENS], [0, 10, 20, 30, 40, 50, 60, 70, TOKENS])
"""The documents of steps, in turn; the last one's fit no bucket."""


def small_plan(directory: Path, impl: str) -> Plan:
    """Two buckets, of 2 and of 4 documents."""
    (directory / "packs.jsonl").write_text('{"lengths": [100, 156]}\n' * 64)
    analysis = analyze_dataset(directory / "packs.jsonl", loader="single", seq_length=TOKENS, buckets=1)
    values = make_plan(analysis, impl="chunk").model_dump(mode="json", by_alias=True)
    buckets = [{"max_seqs": cap, "max_seqlen": TOKENS, "share": 0.5} for cap in (2, 4)]
    values["graphs"] |= {"impl": impl, "buckets": buckets}
    return Plan.model_validate(values)


def step(model: Any, number: int) -> float:
    """Train a step by plain gradient descent; the loss."""
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(number)).cuda()
    positions = torch.arange(TOKENS, device="cuda")[None]
    model.zero_grad_buffer()
    params = packed_seq_params(BOUNDS[number % len(BOUNDS)])
    loss = model(tokens, positions, None, packed_seq_params=params).float().square().mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(parameter.main_grad.to(parameter.dtype), alpha=-0.1)
    return float(loss)


def saved(model: Any) -> tuple[Any, ...]:
    """Parameters and random states, as copies."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    generators = {name: state.get_state().clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    return [p.detach().clone() for p in model.parameters()], generators, torch.cuda.get_rng_state()


def load(model: Any, state: tuple[Any, ...]) -> None:
    """Take them back: parameters in place, random states as new generators, as from a checkpoint."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    parameters, generators, default = state
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), parameters, strict=True):
            parameter.copy_(value)
    made = {}
    for name, value in generators.items():
        made[name] = torch.Generator(device="cuda")
        made[name].set_state(value)
    get_cuda_rng_tracker().set_states(made)
    torch.cuda.set_rng_state(default)


def loaded(impl: str) -> None:
    """After `recapture` the steps since the save repeat themselves bit for bit, dropout included."""
    with tempfile.TemporaryDirectory() as name, process_groups():
        graphs = "none" if impl == "chunk" else impl
        config = config_of(hidden_dropout=0.1, attention_dropout=0.1, cuda_graph_impl=graphs)
        chunk = wrapped(small_gpt(config, tokens=TOKENS), config)
        with install(chunk, small_plan(Path(name), impl), config) as installation:
            before = [step(chunk, number) for number in range(STEPS)]
            state = saved(chunk)
            first = [step(chunk, number) for number in range(STEPS, 2 * STEPS)]
            load(chunk, state)
            installation.recapture()
            captures = installation.stats().captures
            second = [step(chunk, number) for number in range(STEPS, 2 * STEPS)]
            told = installation.stats()
            print(before, first, second, str(told), sep="\n")
            assert first == second
            assert len({*before, *first}) == 2 * STEPS, "losses that stay the same prove nothing"
            assert told.captures == 2 * captures
            assert told.replays.total() == 2 * STEPS
            assert told.fallbacks.total() == STEPS


def loaded_with_chunk_graphs() -> None:
    loaded("chunk")


def loaded_with_layer_graphs() -> None:
    loaded("transformer_engine")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("ok")
