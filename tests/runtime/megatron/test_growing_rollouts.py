"""Rollouts that grow in Megatron-LM's loop: a decoder of megatron-core's layers on a CPU, by stand-in graphs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.training.training")

from megatron.training import training  # noqa: E402
from support.cpu_graphs import as_if_on_a_gpu  # noqa: E402
from support.layer_graphs import HIDDEN, TOKENS, make_block  # noqa: E402
from support.trl_plans import plan_for  # noqa: E402

from thdprof.plan import load_plan  # noqa: E402
from thdprof.runtime.megatron import decoder_surroundings, packed_seq_params  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder  # noqa: E402
from thdprof.runtime.megatron.kinds import chunk  # noqa: E402
from thdprof.runtime.megatron.trainers import megatron_lm, training_loops  # noqa: E402

pytestmark = pytest.mark.usefixtures("parallel_state")
STEPS = 100
SHORT = [[4, 4, 4, 4], [3, 3, 3, 3, 4]]
GROWN = [[[8, 8], [6, 6, 4]], [[10, 6], [6, 5, 5]]]
"""Documents of the two micro-batches of a step, before rollouts grow and after it."""


@pytest.fixture
def loop(monkeypatch):
    """Megatron's training loop, which runs micro-batches of `loop.steps` through a block, and what it logs."""
    as_if_on_a_gpu(monkeypatch)
    monkeypatch.setattr(chunk, "generators", tuple)
    found = SimpleNamespace(lines=[], steps=[], run=None)

    def setup(*args, **kwargs):
        found.block = make_block()
        for parameter in found.block.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        return [found.block], None, None

    def install(model, plan, config, **how):
        decoder = Decoder(model[0])
        around = replace(decoder_surroundings.surround_decoder(model[0]), while_capturing=nullcontext)
        found.run = chunk.ChunkGraphs(decoder, plan.captured, surroundings=around, name="chunk 0")
        decoder.attach(found.run, cp_size=1)
        return SimpleNamespace(
            stats=lambda number: [found.run.stats()][number], prediction_stats=list, pool_bytes=found.run.pool_bytes,
            host_bytes=found.run.host_bytes, replays=True, close=found.run.close,
        )  # fmt: skip

    def train(*args, **kwargs):
        for number, step in enumerate(found.steps, start=1):
            for lengths in step:
                x = torch.randn(TOKENS, 1, HIDDEN).requires_grad_()
                bounds = [0, *accumulate(lengths)]
                params = packed_seq_params(bounds, max_seqlen=max(lengths), device="cpu")
                y = found.block(hidden_states=x, attention_mask=None, packed_seq_params=params)
                y.square().sum().backward()
            training.training_log({}, {}, 1e-4, number)

    for name, value in {
        "setup_model_and_optimizer": setup,
        "train": train,
        "training_log": lambda *args, **kwargs: None,
        "print_rank_0": found.lines.append,
        "get_tensorboard_writer": lambda: None,
        "get_wandb_writer": lambda: None,
        "get_args": lambda: SimpleNamespace(use_gloo_process_groups=False),
    }.items():
        monkeypatch.setattr(training, name, value)
    monkeypatch.setattr(training_loops, "install", install)
    monkeypatch.setattr(megatron_lm.versions, "check", lambda *packages: None)
    return found


def train_by(loop, path, steps):
    """Train as Megatron-LM's scripts do; returns the run's counters and the lines on data that has moved on."""
    loop.steps, loop.lines[:] = steps, []
    with megatron_lm.following(load_plan(path), path=path):
        training.setup_model_and_optimizer("type")
        training.train("forward step")
    return loop.run.stats(), [line for line in loop.lines if "the data is not what the plan was made from" in line]


def test_rollouts_that_grow_are_named_once_and_the_next_start_holds_them(loop, tmp_path):
    plan = plan_for(tokens=TOKENS, caps=[5], rows=8000, tail_policy="none")
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= {"impl": "chunk", "buckets": [{"max_seqs": 5, "max_seqlen": 4, "share": 1.0}]}
    type(plan).model_validate(values).save(tmp_path / "plan.yaml")
    stats, said = train_by(loop, tmp_path / "plan.yaml", [SHORT] * STEPS + GROWN * STEPS)
    assert (stats.replays.total(), dict(stats.fallbacks)) == (2 * STEPS, {"document_too_long": 4 * STEPS})
    (line,) = said
    assert line.startswith("WARNING: thdprof, step 200: ")
    assert (
        "the plan lacks 3 documents of 10 tokens, for 200 of 200 micro-batches that fit no bucket in the last 100 "
        "steps (2 to 3 documents of at most 10 tokens); no longer replayed: 5 documents of 4 tokens"
    ) in line
    assert line.endswith(f"start next by the revised plan, {tmp_path / 'plan-revised.yaml'}")
    stats, said = train_by(loop, tmp_path / "plan-revised.yaml", GROWN * STEPS)
    assert (stats.replays.total(), dict(stats.fallbacks), said) == (4 * STEPS, {}, [])
    assert not (tmp_path / "plan-revised-revised.yaml").exists()
