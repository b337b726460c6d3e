"""The example of a loop of one's own on megatron-core: what can be tested without a GPU."""

from __future__ import annotations

import itertools

import pytest
from support.command import load_script

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from thdprof.analyze import analyze_dataset, make_plan  # noqa: E402
from thdprof.analyze.sources.demo import write_demo  # noqa: E402
from thdprof.errors import UsageError  # noqa: E402

EXAMPLE = "examples/train_megatron_core.py"
example = load_script(EXAMPLE, "tested_train_megatron_core")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("example") / "demo"
    write_demo(directory)
    return directory


def analysed(demo, **settings):
    common = {"seq_length": 512, "global_batch_size": 16, "data_parallel_size": 2, "train_samples": 160}
    return analyze_dataset(demo / "megatron", **{**common, **settings})


@pytest.mark.parametrize("size", [1, 2])
def test_every_rank_trains_the_micro_batches_that_the_plan_counted(demo, tmp_path, size):
    analysis = analysed(demo, micro_batch_size=size)
    table, plan = analysis.microbatches, make_plan(analysis, impl="chunk")
    checked = 0
    for rank in range(2):
        frame = table.to_pandas()
        mine = frame[frame["dp_rank"] == rank].sort_values(["step", "microbatch"])
        batches = itertools.islice(example.micro_batches(plan, rank, tmp_path), len(mine))
        for batch, expected in zip(batches, mine.itertuples(), strict=True):
            lengths = batch["cu_seqlens"].squeeze(0).diff()
            assert (len(lengths), int(lengths.max())) == (expected.n_seqs, expected.max_seqlen)
            assert batch["tokens"].shape == batch["labels"].shape == (1, expected.n_tokens)
            checked += 1
    assert checked == len(table) == 160 // size


def test_plans_that_it_cannot_train_are_refused(demo, tmp_path):
    for settings in ({"loader": "cyclic"}, {"context_parallel_size": 2}):
        plan = make_plan(analysed(demo, **settings), impl="chunk")
        with pytest.raises(UsageError, match="by --loader single, without context parallelism"):
            next(example.micro_batches(plan, 0, tmp_path))


def test_torchrun_lets_every_option_through():
    """torchrun takes an option of the script for its own where it could abbreviate one of its own."""
    from torch.distributed.run import get_args_parser

    for name in vars(example.arguments(["--plan", "plan.yaml"])):
        word = f"--{name}"
        parsed = get_args_parser().parse_args(["--nproc-per-node", "2", "script.py", word])
        assert parsed.training_script_args == [word]
