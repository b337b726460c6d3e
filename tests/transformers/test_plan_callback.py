"""PlanCallback in TRL's SFTTrainer, on a processor: what it changes, what it counts, what it refuses."""

from __future__ import annotations

import dataclasses
import gc
import importlib
import pickle
import subprocess
import sys
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
from support.rank_processes import start_ranks
from support.trl_plans import plan_for

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

import torch
from support.trl_training import dataset_of, documents, losses, small_model, trainer
from transformers import TrainerCallback

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.compare.statistics import compare, read_stats
from thdprof.errors import UsageError
from thdprof.megatron_limits import trainer as trainer_limits
from thdprof.runtime import Stats
from thdprof.runtime.stats import TimedPass
from thdprof.transformers import PlanCallback, attention, refusals
from thdprof.transformers.callback import with_covered_tail

ROWS = documents(60)


@pytest.fixture(scope="module")
def plan():
    """The plan of two epochs of ROWS with two micro-batches a step."""
    found = analyze_dataset(
        [len(row) for row in ROWS], loader="trainer", packer="best_fit_decreasing", seq_length=64,
        gradient_accumulation=2, train_epochs=2,
    )  # fmt: skip
    return make_plan(found)


def run(directory, *callbacks, model=None, **arguments):
    arguments = {"gradient_accumulation_steps": 2, "num_train_epochs": 2, **arguments}
    model = small_model() if model is None else model
    return trainer(model, dataset_of(ROWS), directory, callbacks=callbacks, **arguments)


def test_a_run_by_a_plan_has_the_losses_of_one_without(plan, tmp_path):
    evaluated = {"eval_dataset": dataset_of(documents(10, seed=3)), "eval_strategy": "epoch"}
    alone = run(tmp_path / "a", **evaluated)
    alone.train()
    followed = run(tmp_path / "b", PlanCallback(plan), **evaluated)
    followed.train()
    assert len(losses(alone)) >= 10
    assert losses(followed) == pytest.approx(losses(alone), rel=1e-5)
    evaluations = [[e["eval_loss"] for e in r.state.log_history if "eval_loss" in e] for r in (alone, followed)]
    assert len(evaluations[0]) == 2
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-5)


class Logger(TrainerCallback):
    """Stands for a callback that the Trainer made before the user's, such as that of TensorBoard."""

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def test_counters_reach_the_log_and_every_logger(plan, tmp_path):
    logger = Logger()
    followed = run(tmp_path, logger, PlanCallback(plan))
    followed.train()
    steps = [entry for entry in logger.seen if "loss" in entry]
    assert [entry["thdprof/microbatches"] for entry in steps][:3] == [2, 4, 6]
    assert all(entry["thdprof/replayed"] == 0 for entry in steps)
    assert steps[-1]["thdprof/eager/no_cuda"] == steps[-1]["thdprof/microbatches"]
    assert followed.state.log_history[0]["thdprof/eager/no_cuda"] == 2


def test_the_statistics_are_those_that_the_plan_predicts(plan, tmp_path):
    callback = PlanCallback(plan, stats=tmp_path / "stats.jsonl")
    followed = run(tmp_path, callback)
    followed.train()
    comparison = compare(plan, read_stats(tmp_path / "stats.jsonl"), tolerance=0.0)
    assert (comparison.basis, comparison.microbatches) == ("decided", plan.microbatches.count)
    assert comparison.observed_fallback_rate == comparison.predicted_fallback_rate
    assert [b.observed_share for b in comparison.buckets] == [b.predicted_share for b in comparison.buckets]
    assert callback.stats is None
    assert callback.last.microbatches == plan.microbatches.count


def test_a_resumed_run_ends_as_one_that_was_never_stopped(plan, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    whole = run(tmp_path, PlanCallback(plan), **saving)
    whole.train()
    names = list(small_model().state_dict())
    assert list(whole.model.state_dict()) == names
    resumed = run(tmp_path, PlanCallback(plan), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(resumed)[4:] == losses(whole)[4:]
    for mine, own in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, own)


class Failing(TrainerCallback):
    """Ends a run by an error after its second step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise RuntimeError("the disk is full")


def test_an_error_in_training_gives_the_model_back(plan, tmp_path):
    callback, model = PlanCallback(plan), small_model()
    with pytest.raises(RuntimeError, match="the disk is full"):
        run(tmp_path, callback, Failing(), model=model).train()
    assert "forward" not in model.model.__dict__
    assert model.model.config._attn_implementation == "eager"
    assert callback.stats is None


def test_a_run_after_one_that_an_unseen_error_has_ended_follows_its_own_plan(plan, tmp_path):
    model = small_model()
    broken = run(tmp_path, Failing(), model=model)
    broken.add_callback(PlanCallback(plan))  # too late to see how `train` ends
    with pytest.raises(RuntimeError, match="the disk is full"):
        broken.train()
    callback = PlanCallback(plan)
    run(tmp_path, callback, model=model).train()
    assert callback.last.microbatches == plan.microbatches.count
    assert "forward" not in model.model.__dict__
    assert model.model.config._attn_implementation == "eager"


@pytest.mark.parametrize("failing", [False, True])
def test_a_trainer_has_its_own_train_again_when_it_ends(plan, tmp_path, failing):
    callback = PlanCallback(plan)
    followed = run(tmp_path, callback, *[Failing()] * failing, max_steps=3)
    assert "train" in vars(followed)
    with pytest.raises(RuntimeError, match="the disk is full") if failing else nullcontext():
        followed.train()
    assert "train" not in vars(followed)
    assert callback.stats is None


def test_a_wrapper_that_others_put_around_train_stays(plan, tmp_path):
    followed = run(tmp_path, PlanCallback(plan), max_steps=1)
    own, calls = followed.train, []

    def counted(*args, **kwargs):
        calls.append(args)
        return own(*args, **kwargs)

    followed.train = counted
    followed.train()
    followed.train()
    assert followed.train is counted
    assert len(calls) == 2
    assert "forward" not in followed.model.model.__dict__


def test_a_trainer_that_was_dropped_after_an_unseen_error_is_freed_with_its_model(plan, tmp_path):
    dropped = []
    for callback in (None, PlanCallback(plan)):
        broken = run(tmp_path, Failing())
        if callback is not None:
            broken.add_callback(callback)  # too late to see how `train` ends
        with pytest.raises(RuntimeError, match="the disk is full"):
            broken.train()
        assert ("forward" in broken.model.model.__dict__) == (callback is not None)
        dropped.append([weakref.ref(broken), weakref.ref(broken.model.model)])
        del broken, callback
    gc.collect()
    assert [[reference() for reference in found] for found in dropped] == [[None, None], [None, None]]


class Collecting(TrainerCallback):
    """Drops what it holds after the first step, and notes the model's attention after each."""

    def __init__(self, held):
        self.held, self.seen = held, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if self.held:
            self.held.clear()
            gc.collect()
        self.seen.append(model.config._attn_implementation)


def test_a_run_that_nothing_has_ended_changes_no_other_run_when_it_is_collected(plan, tmp_path):
    """Also where the next model has the same config object."""
    first = run(tmp_path, Failing())
    first.add_callback(PlanCallback(plan))  # too late to see how `train` ends
    with pytest.raises(RuntimeError, match="the disk is full"):
        first.train()
    second, seen = type(first.model)(first.model.config), weakref.ref(first.model.model)
    collecting, callback = Collecting([first]), PlanCallback(plan)
    del first
    run(tmp_path, callback, collecting, model=second).train()
    assert seen() is None
    assert len(collecting.seen) > 2
    assert {*collecting.seen} == {attention.IMPLEMENTATION}
    assert callback.last.microbatches == plan.microbatches.count


@pytest.mark.parametrize("replay", [True, False])
def test_compiled_layers_train_as_they_are(plan, tmp_path, monkeypatch, replay):
    """By graphs that are traced and run without Inductor, whose C++ takes half a minute; GPU tests run its kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager" if replay else "eager"))
    torch.compiler.reset()
    alone = run(tmp_path, max_steps=2)
    alone.train()
    model = small_model()
    callback = PlanCallback(plan, replay=replay, compile=True)
    followed = run(tmp_path, callback, model=model, max_steps=2)
    with counted_compilations() as counted:
        followed.train()
    assert 1 <= counted() <= 3  # the layers share one compiled forward, with static and with changing boundaries
    assert losses(followed) == pytest.approx(losses(alone), rel=1e-5)
    assert all("forward" not in layer.__dict__ for layer in model.model.layers)


@contextmanager
def counted_compilations():
    """Yields a function that returns how many graphs torch.compile has made since the block's beginning."""
    counters = torch._dynamo.utils.counters
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]


def test_adapters_and_checkpointing_train_as_without_a_plan(plan, tmp_path):
    from peft import LoraConfig

    options = {"gradient_checkpointing": True, "max_steps": 4}
    found = []
    for callbacks in ((), (PlanCallback(plan),)):
        config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
        followed = run(tmp_path, *callbacks, peft_config=config, **options)
        followed.train()
        found.append(losses(followed))
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def refused(plan, tmp_path, *, model=None, callback=None, **arguments) -> str:
    followed = run(tmp_path, callback or PlanCallback(plan), model=model, **arguments)
    with pytest.raises(UsageError) as told:
        followed.train()
    assert followed.state.global_step == 0
    return str(told.value)


def test_a_plan_of_another_run_is_refused_with_every_reason(plan, tmp_path):
    told = refused(plan, tmp_path, per_device_train_batch_size=2, max_length=32, data_seed=3)
    assert "micro_batch_size" not in told
    assert "per_device_train_batch_size: the plan was made for 1, the run has 2" in told
    assert "max_length: the plan was made for 64, the run has 32" in told


def test_a_run_in_another_order_is_told_so(plan, tmp_path, caplog):
    run(tmp_path, PlanCallback(plan), data_seed=3, max_steps=1).train()
    assert "data_seed (seed): the plan was made for 42, the run has 3" in caplog.text
    assert "samples of the run (max_steps): the plan was made for 2 epochs (" in caplog.text


@pytest.mark.parametrize("planned", ["random", "sequential"])
def test_sequential_sampling_is_followed_and_told_from_a_random_order(planned, plan, tmp_path, caplog):
    planned_run = dataclasses.replace(plan.training, sampling=planned)
    run(
        tmp_path, PlanCallback(plan.model_copy(update={"training": planned_run})), max_steps=1,
        train_sampling_strategy="sequential",
    ).train()  # fmt: skip
    told = "train_sampling_strategy: the plan was made for random, the run has sequential" in caplog.text
    assert told == (planned == "random")
    _, other_order = refusals.compare_settings(plan.model_copy(update={"training": planned_run}), {}, 1)
    assert any("train_sampling_strategy" in line for line in other_order) == (planned == "sequential")


def test_an_order_that_is_not_known_is_refused(plan, tmp_path):
    told = refused(plan, tmp_path, accelerator_config={"split_batches": True})
    assert "accelerator_config split_batches True" in told


def test_rows_without_boundaries_are_refused_at_the_first_micro_batch(tmp_path):
    plan = plan_for(tokens=64, caps=[8], rows=8, micro_batch_size=2, global_batch_size=4, seed=42, drop_last=False)
    told = refused(plan, tmp_path, packing_strategy="wrapped", per_device_train_batch_size=2)
    assert "came without document boundaries on the host" in told
    assert "set padding_free=True" in told


def test_another_family_is_refused_by_its_name(plan, tmp_path):
    told = refused(plan, tmp_path, model=small_model("gpt_neox"))
    assert "model_type 'gpt_neox' was not checked in graphs: known are gemma, gemma2" in told


def test_checkpointing_with_dropout_is_refused(plan, tmp_path):
    told = refused(plan, tmp_path, model=small_model(attention_dropout=0.1), gradient_checkpointing=True)
    assert "gradient checkpointing together with dropout (attention_dropout 0.1)" in told


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"impl": "chunk"}, "graphs.impl is chunk"),
        ({"offload": {"modules": ["all"]}}, "graphs.offload is set"),
        ({"layers_per_graph": 2}, "graphs.layers_per_graph is set"),
    ],
)
def test_plans_of_megatron_are_refused(plan, changes, reason):
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= changes
    assert reason in " ".join(trainer_limits.refuse_plan(type(plan).model_validate(values)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"fsdp": "full_shard"}, "FSDP shards parameters"),
        ({"deepspeed": "ds.json"}, "DeepSpeed keeps parameters"),
        ({"n_gpu": 2}, "DataParallel copies the model"),
        ({"torch_compile": True}, "torch_compile is set"),
        ({"activation_offloading": True}, "activation_offloading is set"),
        ({"activation_checkpointing_kwargs": {"offload": True}}, "activation_checkpointing_kwargs has offload"),
        ({"parallelism_config": object()}, "parallelism_config is set"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"per_device_train_batch_size": 2}, "padding_free is False with several rows"),
        ({"weights_dtype": "float32", "bf16": False}, "set bf16=True, or load the model in bfloat16"),
    ],
)
def test_what_surrounds_the_model_is_refused_by_name(changes, reason):
    usual = {"padding_free": False, "packing": False, "per_device_train_batch_size": 1, "n_gpu": 1}
    assert list(trainer_limits.refuse_arguments(usual, {})) == []
    assert reason in " ".join(trainer_limits.refuse_arguments({**usual, **changes}, {}))


def test_the_dtype_of_weights_is_that_of_the_model_and_not_of_its_adapters():
    peft = pytest.importorskip("peft")
    assert refusals.find_weights_dtype(small_model()) == "float32"
    model = small_model().to(torch.bfloat16)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))  # keeps adapters in float32
    assert {str(p.dtype) for p in adapted.parameters()} == {"torch.float32", "torch.bfloat16"}
    assert refusals.find_weights_dtype(adapted) == "bfloat16"


def test_a_cache_is_refused_where_the_trainer_leaves_it_on():
    usual = {"per_device_train_batch_size": 1, "n_gpu": 1, "use_cache": True}
    assert "use_cache is True" in " ".join(trainer_limits.refuse_arguments(usual, {}))
    trls = {**usual, "padding_free": True, "packing": False}  # SFTTrainer runs its models without
    assert list(trainer_limits.refuse_arguments(trls, {})) == []


@pytest.mark.parametrize("name", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_what_accelerates_launcher_asks_for_is_refused_too(name):
    usual = {"padding_free": True, "packing": False, "per_device_train_batch_size": 2, "n_gpu": 1}
    assert len(list(trainer_limits.refuse_arguments(usual, {name: "true"}))) == 1


def of_model(model, backend="torch", **options) -> str:
    return " ".join(
        refusals.refuse_model(model, backend=backend, **{"own_attention": False, "on_gpu": True, **options})
    )


def test_attention_that_the_kernels_cannot_do_is_refused():
    assert of_model(small_model()) == ""
    assert "no variable-length attention is installed" in of_model(small_model(), None)
    assert "attention_dropout 0.1: the attention of torch has none" in of_model(small_model(attention_dropout=0.1))
    gemma = small_model("gemma2")
    assert "attn_logit_softcapping 50.0 (Gemma 2): the attention of torch cannot" in of_model(gemma)
    assert of_model(gemma, "flash_attn") == ""


def test_layers_compile_with_torchs_own_attention_alone():
    assert list(refusals.refuse_compiling(backend="torch", own_attention=False)) == []
    told = list(refusals.refuse_compiling(backend="transformer_engine", own_attention=False))
    assert told == [
        "compile=True with the attention of transformer_engine: layers compile with torch's alone; "
        "give attention='torch'"
    ]
    assert "the attention of the model" in " ".join(refusals.refuse_compiling(backend=None, own_attention=True))


def test_an_attention_that_is_not_installed_is_refused():
    with pytest.raises(UsageError, match="attention 'flash_attn': choose one of auto, flash_attn, torch"):
        attention.register("flash_attn")


def test_graphs_cover_every_token_whatever_the_plan_says():
    plan = plan_for(tokens=64, caps=[8], rows=4, tail_policy="none")
    assert with_covered_tail(plan).graphs.tail_policy == "extend_last"
    plan = plan_for(tokens=64, caps=[8], rows=4)
    assert with_covered_tail(plan) is plan


def import_callback_anew(rank):
    """Run as a process that has imported what else the callback needs, which takes seconds."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("thdprof", "megatron")]:
        del sys.modules[name]
    importlib.import_module("thdprof.transformers")
    assert "thdprof.transformers.callback" in sys.modules
    assert "megatron" not in sys.modules


def test_the_callback_needs_no_megatron():
    start_ranks(import_callback_anew, 1)


def test_without_transformers_the_extra_is_named():
    code = "import sys\nsys.modules['transformers'] = None\nimport thdprof.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install '.[transformers]' in a checkout" in done.stderr


def test_what_the_ranks_found_is_added_up(plan, monkeypatch, tmp_path):
    bucket = plan.captured[0]
    ranks = [Stats(replays=Counter({bucket: 10}), verified=Counter({bucket: 5})) for _ in range(2)]
    for rank, found in zip(ranks, (1, 3), strict=True):
        rank.mismatches[bucket], rank.suspicions[bucket], rank.decided[bucket] = found, 2 * found, 11
    ranks[0].passes.append(TimedPass(bucket=bucket, n_seqs=2, squared_tokens=9.0, ms=7.0))

    def gather(out, own):
        out[:] = pickle.loads(pickle.dumps([own, *ranks[1:]]))

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(PlanCallback, "stats", ranks[0])
    callback = PlanCallback(plan, stats=tmp_path / "stats.jsonl")
    callback.on_train_end(SimpleNamespace(world_size=2), SimpleNamespace(global_step=5), None)
    total, found = callback.last, compare(plan, read_stats(tmp_path / "stats.jsonl"), tolerance=1.0)
    assert (total.replays, total.decided, total.replay_ms) == ({bucket: 20}, {bucket: 22}, 7.0)
    assert total.findings == {"verified": 10, "mismatches": 4, "suspicions": 8}
    assert (found.verified, found.mismatches, found.suspicions, found.holds) == (10, 4, 8, False)
