"""What of the GPU tests' pretraining can be tested on a CPU: arguments, refusals, data and the forward step."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.training")

from support import gpu_training  # noqa: E402
from support.command import load_script  # noqa: E402
from support.gpu_plans import Plans  # noqa: E402
from support.paths import ROOT  # noqa: E402

from thdprof import run  # noqa: E402
from thdprof.dispatch import Bucket  # noqa: E402
from thdprof.plan import OffloadPart, load_plan  # noqa: E402
from thdprof.runtime.megatron import refusals  # noqa: E402
from thdprof.runtime.megatron.refusals import Facts  # noqa: E402


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return Plans(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def parser():
    """Megatron-LM's parser, which takes seconds to make, with the script's own argument."""
    from megatron.training import arguments
    from support import pretrain

    return pretrain.add_arguments(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.fixture
def config_of(parser, monkeypatch, tmp_path):
    """Gives Megatron's configuration, and its arguments, of a run of the GPU tests."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.training import arguments

    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):
        monkeypatch.setattr(rope_utils, name, object(), raising=False)  # asked for, not called
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.setattr(arguments, "add_megatron_arguments", lambda _: parser)
    monkeypatch.setattr(arguments, "_print_args", lambda *_: None)
    for name, value in gpu_training.environment().items():
        monkeypatch.setenv(name, value)

    def configured(plan: Path, model: str, *, impl: str, more=()):
        words = gpu_training.arguments_of(load_plan(plan), model, impl=impl, cache=tmp_path)
        monkeypatch.setattr(sys, "argv", ["pretrain.py", "--record", "run.jsonl", *words, *more])
        args = arguments.parse_args()
        arguments.validate_args(args)
        assert args.record == Path("run.jsonl")
        return arguments.core_transformer_config_from_args(args), args

    return configured


@pytest.mark.parametrize("impl", ["none", "chunk", "transformer_engine", "local"])
@pytest.mark.parametrize("model", gpu_training.MODELS)
def test_what_the_gpu_tests_train_is_not_refused(plans, config_of, model, impl):
    refused = dict.fromkeys((("dropless", "local"), ("mamba with experts", "local")), "dropless")
    plan = plans(2, model=model, impl="chunk" if impl == "none" else impl)
    config, _ = config_of(plan, model, impl=impl)
    facts = Facts(num_chunks=1, replay=impl != "none")
    if (model, impl) not in refused:
        words = gpu_training.arguments_of(load_plan(plan), model, impl=impl, cache=Path("indexes"))
        assert run.compared(load_plan(plan), ["pretrain.py", *words], replay=impl != "none") == ([], [])
        refusals.check(config, load_plan(plan), facts, gpu_training.environment())
    else:
        with pytest.raises(refusals.SettingsError, match=refused[model, impl]):
            refusals.check(config, load_plan(plan), facts, gpu_training.environment())


def test_what_the_gpu_tests_of_experts_train_is_not_refused(plans, config_of, monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    for name in (
        "permute",
        "permute_with_probs",
        "sort_chunks_by_index",
        "sort_chunks_by_index_with_probs",
        "unpermute",
    ):
        monkeypatch.setattr(moe_utils, f"fused_{name}", object())  # asked for, not called
    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    cases = load_script("tests/gpu/test_experts_gpu.py", "tested_experts_gpu").CASES
    assert len(cases) > 4
    for name, (words, preprocess) in cases.items():
        plan = plans(2, model="dropless", impl="transformer_engine", preprocess=preprocess)
        config, _ = config_of(plan, "dropless", impl="none", more=words.split())
        given = gpu_training.arguments_of(load_plan(plan), "dropless", impl="none", cache=Path("indexes"))
        assert run.compared(load_plan(plan), ["pretrain.py", *given, *words.split()]) == ([], []), name
        refusals.check(config, load_plan(plan), Facts(num_chunks=1), gpu_training.environment())


@pytest.mark.parametrize(
    ("model", "modules", "delayed"),
    [("dense", ["qkv_linear", "core_attn", "attn_proj"], False), ("dropless", ["expert_fc1", "moe_act"], True)],
)
def test_megatrons_own_offloading_is_asked_for_as_the_plan_says(plans, config_of, monkeypatch, model, modules, delayed):
    from megatron.training import arguments

    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    monkeypatch.setattr(arguments, "is_te_min_version", lambda *_: True, raising=False)
    offload = {"modules": modules, "fraction": 0.5, "delayed_commit": delayed}
    plan = plans(2, model=model, impl="transformer_engine", offload=offload)
    more = gpu_training.core_offload_options(OffloadPart(**offload))
    config, _ = config_of(plan, model, impl="transformer_engine", more=more)
    words = gpu_training.arguments_of(load_plan(plan), model, impl="transformer_engine", cache=Path("indexes"))
    assert run.compared(load_plan(plan), ["pretrain.py", *words, *more]) == ([], [])
    refusals.check(config, load_plan(plan), Facts(num_chunks=1), gpu_training.environment())


def test_training_reads_what_the_plan_was_made_of(plans, config_of, monkeypatch):
    from support import pretrain

    _, args = config_of(plans(1), "dense", impl="chunk")
    monkeypatch.setattr(pretrain, "get_args", lambda: args)
    monkeypatch.setattr(pretrain.groups, "get_tensor_model_parallel_rank", lambda: 0)
    for place in ("first", "last"):
        monkeypatch.setattr(pretrain.groups, f"is_pipeline_{place}_stage", lambda **_: True)
    table = plans.analysis.microbatches
    rows, *_ = pretrain.datasets([args.train_iters * args.global_batch_size, 0, 0])
    seen = []
    for number in range(args.train_iters * args.global_batch_size):
        batch = pretrain.flatten_batch_for_packed_sequences(torch.utils.data.default_collate([rows[number]]))
        seen.append((batch["cu_seqlens"].numel() - 1, int(batch["max_seqlen"]), batch["tokens"].numel()))
    assert seen == list(zip(table.n_seqs, table.max_seqlen, table.n_tokens, strict=True))
    assert len({n_seqs for n_seqs, _, _ in seen}) > 2


@pytest.mark.parametrize("model", ["dense", "mamba"])
def test_a_micro_batch_reaches_the_model_with_its_boundaries(plans, config_of, monkeypatch, model):
    from megatron.core import rerun_state_machine
    from megatron.training import training
    from support import pretrain
    from support.megatron_ranks import ranks

    _, args = config_of(plans(1), model, impl="chunk")
    for module in (pretrain, training):
        monkeypatch.setattr(module, "get_args", lambda: args)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, **_: self)
    rerun_state_machine.destroy_rerun_state_machine()  # which other tests have made in passing
    rerun_state_machine.initialize_rerun_state_machine(mode=rerun_state_machine.RerunMode.DISABLED)

    class Model(torch.nn.Module):
        vp_stage = None

        def forward(self, tokens, positions, mask, *, labels, loss_mask, packed_seq_params):
            self.seen = tokens, packed_seq_params
            return torch.ones_like(loss_mask)

    stub = Model()
    with ranks(1, 0, context=1, hybrid=False):
        rows, *_ = pretrain.datasets([8, 0, 0])
        batches = iter(torch.utils.data.DataLoader(rows, batch_size=1))
        for row in range(4):
            output, loss_of = pretrain.forward_step(batches, stub)
            tokens, params = stub.seen
            length = plans.analysis.microbatches.n_seqs[row]
            assert params.cu_seqlens_q.shape == (length + 1,)
            assert params.max_seqlen_q == plans.analysis.microbatches.max_seqlen[row]
            assert (params.seq_idx is not None) == (model == "mamba")
            assert tokens.shape == (1, args.seq_length)
            loss, num_tokens, told = loss_of(output)
            assert loss == num_tokens == told["lm loss"][1] == rows[row]["loss_mask"].sum()
    rerun_state_machine.destroy_rerun_state_machine()


def test_every_steps_loss_and_gradient_norm_are_recorded_exactly(monkeypatch, tmp_path):
    from support import pretrain

    from thdprof.runtime.stats import Stats

    class Held:
        closed = False

        def stats(self):
            return Stats(captures=3)

        def prediction_stats(self):
            return [Stats(replays=Counter({Bucket(2, 8, 8): 4}))]

        def pool_bytes(self):
            return 5

        host_bytes = offload_freed_bytes = pool_bytes

        def close(self):
            self.closed = True

    told = ({"lm loss": torch.tensor(0.1)}, 0, False, False, 0, torch.tensor(1 / 3), 0, 0)
    monkeypatch.setattr(pretrain, "Installation", Held)
    monkeypatch.setattr(pretrain.training, "train_step", lambda *_: told)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7)
    pretrain.record(tmp_path / "run.jsonl")
    model, quantized = (
        torch.nn.Linear(2, 2, bias=False),
        SimpleNamespace(scale=torch.ones(1), amax_history=torch.ones(1)),
    )
    model.weight.main_grad, model.fp8_meta = torch.zeros(2, 2), {"scaling_fwd": quantized, "num_gemms": 1}
    assert pretrain.training.train_step("step", "data", [model]) is told
    quantized.scale.fill_(2.0)
    assert pretrain.training.train_step("step", "data", [model]) is told
    held = Held()
    held.close()
    assert held.closed
    step, later, memory = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [float.fromhex(step[name]) for name in ("loss", "grad_norm")] == [float(told[0]["lm loss"]), float(told[5])]
    changed = {kind for kind, digest in step["states"].items() if later["states"][kind] != digest}
    assert changed == {"scaling_fwd, factors"}
    assert {*step["states"]} - changed == {"gradients", "scaling_fwd, histories", "weights"}
    assert memory == {
        "captures": 3,
        "predicting": [4],
        "pool_bytes": 5,
        "host_bytes": 5,
        "offload_freed_bytes": 5,
        "peak_bytes": 7,
    }
