"""Graphs of dropless experts: whole layers where these can be captured, elsewhere up to the router, with the reason."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from thdprof.analyze import analyze_dataset, make_plan
from thdprof.analyze.buckets.saved_tensors import layer_tensors, pass_bytes
from thdprof.analyze.report.analysis import to_dict
from thdprof.analyze.times.decoder import Decoder, Device, Work
from thdprof.analyze.times.gpus import GPUS
from thdprof.plan import load_plan
from thdprof.training import Model

QWEN = Model(
    num_layers=8,
    hidden_size=2048,
    num_attention_heads=32,
    num_query_groups=4,
    kv_channels=128,
    qk_layernorm=True,
    gated_linear_unit=True,
    normalization="RMSNorm",
    hidden_dropout=0.0,
    add_bias_linear=False,
    num_experts=128,
    moe_router_topk=8,
    moe_ffn_hidden_size=768,
    vocab_size=151936,
)
"""8 layers of the shape of Qwen3-30B-A3B."""
LENGTHS = [400] * 640
RUN = {"seq_length": 4096, "loader": "single", "packer": "best_fit_decreasing", "global_batch_size": 8, "gpu": "h200"}


SLICED = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
"""Two ranks, each of which has a slice of every expert."""


def plan_of(model=QWEN, *, impl=None, **options):
    analysis = analyze_dataset(LENGTHS, model=model, impl=impl, **{**RUN, **options})
    return analysis, make_plan(analysis, impl=impl)


@pytest.mark.parametrize(
    ("impl", "expected"),
    [(None, "module"), ("chunk", "chunk"), ("module", "module"), ("transformer_engine", "transformer_engine")],
)
def test_whole_layers_are_captured_by_every_kind_that_can(impl, expected):
    analysis, plan = plan_of(impl=impl)
    assert (plan.graphs.impl, plan.graphs.modules, plan.training.experts) == (expected, [], "dropless")
    assert analysis.router_reason is None
    assert to_dict(analysis)["recommendation"]["captures"] is None
    assert analysis.verdict.ruling == "graphs pay"


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"expert_model_parallel_size": 2}, {}, "expert_model_parallel_size is 2, and numbers of rows"),
        (SLICED, {}, None),
        (SLICED, {"impl": "chunk"}, None),
        ({**SLICED, "expert_tensor_parallel_size": 2}, {}, None),
        ({**SLICED, "expert_tensor_parallel_size": 1}, {}, None),
        ({**SLICED, "expert_tensor_parallel_size": 4}, {}, "expert_tensor_parallel_size is 4, and ranks with other"),
        (SLICED, {"impl": "transformer_engine"}, "graphs.impl is transformer_engine where 2 ranks share every expert"),
        (
            {**SLICED, "moe_ffn_hidden_size": 24},
            {},
            "hidden_size is 2048 and moe_ffn_hidden_size 24, which 2 ranks share, and torch's grouped products take",
        ),
        ({**SLICED, "moe_ffn_hidden_size": 24, "expert_tensor_parallel_size": 1}, {}, None),
        ({**SLICED, "expert_model_parallel_size": 2}, {}, "expert_model_parallel_size is 2, and numbers of rows"),
        (
            {"fp8_recipe": "tensorwise"},
            {"max_fallback_rate": 0.0},
            "fp8 is 'tensorwise', and experts inside a graph run by torch's grouped",
        ),
        ({"precision": "fp16"}, {}, "precision is fp16, and experts"),
        ({"add_bias_linear": True}, {}, "add_bias_linear is True, and grouped products add no bias"),
        ({"lora_dim": 8}, {}, "lora_target_modules has linear_fc1 or linear_fc2, and adapters"),
        ({"lora_dim": 8, "lora_target_modules": ("linear_qkv",)}, {}, None),
        ({"moe_ffn_hidden_size": 20}, {}, "hidden_size is 2048 and moe_ffn_hidden_size 20, and torch's grouped"),
        ({}, {"gpu": "a100"}, "the GPU is no Hopper GPU, and torch's grouped products were checked"),
    ],
)
def test_what_keeps_experts_out_is_the_reason_and_ends_graphs_at_the_router(changes, options, reason):
    model = replace(QWEN, num_layers=2, **changes)
    analysis, plan = plan_of(model, **options)
    if reason is None:
        assert (analysis.router_reason, plan.graphs.modules) == (None, [])
        return
    assert analysis.router_reason.startswith(reason)
    assert (plan.graphs.impl, plan.graphs.modules) == ("transformer_engine", ["attn", "moe_router"])
    why = to_dict(analysis)["recommendation"]["captures"]["why"]
    assert reason in why
    assert len(why) < 400


FLAGS = (
    "--num-layers 2 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 4 --num-experts 8 --seq-length 64 "
    "--micro-batch-size 1 --global-batch-size 2 --te-rng-tracker --dataloader-inter-document-masking --bf16 "
    "--vocab-size 1024 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --swiglu"
)


SLICES = "--tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("out", "more", "reason"),
    [
        ("", "", None),
        ("", "--moe-shared-expert-intermediate-size 512 --moe-router-load-balancing-type aux_loss", None),
        ("--moe-grouped-gemm", "", "moe_grouped_gemm is False"),
        ("--disable-bias-linear", "", "add_bias_linear is True"),
        ("--moe-token-dispatcher-type alltoall", "", "moe_token_dispatcher_type is 'allgather'"),
        ("", "--moe-expert-capacity-factor 1.5", "moe_expert_capacity_factor is '1.5'"),
        ("", "--moe-shared-expert-overlap", None),
        ("", SLICES, None),
        ("", f"{SLICES} --moe-shared-expert-intermediate-size 512", None),
        ("", f"{SLICES} --moe-shared-expert-intermediate-size 512 --moe-shared-expert-overlap", "moe_shared_expert_"),
        ("", f"{SLICES} --expert-tensor-parallel-size 4", "expert_tensor_parallel_size is 4, and ranks with other"),
        ("", "--moe-latent-size 64", "moe_latent_size is 64"),
        ("", "--overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm is True"),
        ("", "--overlap-moe-expert-parallel-comm --delay-wgrad-compute", "overlap_moe_expert_parallel_comm is True"),
        ("", "--fp8-format hybrid --fp8-recipe tensorwise", "fp8 is "),
    ],
)
def test_a_launch_script_says_what_keeps_experts_out(out, more, reason, tmp_path, thdprof):
    (tmp_path / "rows.jsonl").write_text("[20, 30]\n[60]\n" * 8)
    (tmp_path / "run.sh").write_text(
        f"WORLD_SIZE={4 if SLICES in more else 1}\npretrain_gpt.py {FLAGS.replace(out, '') if out else FLAGS} {more}\n"
    )
    plan = ["--json", "-o", tmp_path / "plan.yaml"]
    done = thdprof("analyze", tmp_path / "rows.jsonl", "--megatron-args", tmp_path / "run.sh", "--gpu", "h100", *plan)
    told = json.loads(done.stdout)
    captures = told["recommendation"]["captures"]
    assert (captures is None) == (reason is None), captures
    if reason is not None:
        assert f"experts run eagerly: {reason}" in captures["why"]
    assert told["refused"] == []  # the plan that was made can be trained


SFT = {"output_dir": "out", "packing": True, "max_length": 64, "per_device_train_batch_size": 1, "bf16": True}
CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    ("loaded", "changes", "gpu", "refused"),
    [
        ({"dtype": "bfloat16"}, {}, "h100", ""),
        ({"dtype": "bfloat16", "experts_implementation": "grouped_mm"}, {"model_type": "mixtral"}, "h200", ""),
        ({"dtype": "bfloat16", "experts_implementation": "eager"}, {}, "h100", "experts_implementation 'eager'"),
        ({}, {}, "h100", "experts' weights are in float32"),
        ({"dtype": "bfloat16"}, {}, "a100", "experts on this GPU"),
        (
            {"dtype": "bfloat16"},
            {"model_type": "gpt_oss"},
            "h100",
            "the model's model_type 'gpt_oss': its attention has",
        ),
    ],
)
def test_a_trainers_plan_holds_whole_layers_and_says_what_its_callback_would_refuse(
    loaded, changes, gpu, refused, tmp_path, thdprof
):
    (tmp_path / "rows.jsonl").write_text("[20, 30]\n[60]\n" * 8)
    (tmp_path / "args.json").write_text(json.dumps({**SFT, "model_init_kwargs": loaded}))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    files = [
        "--training-args",
        tmp_path / "args.json",
        "--model",
        tmp_path / "config.json",
        "-o",
        tmp_path / "plan.yaml",
    ]
    done = thdprof("analyze", tmp_path / "rows.jsonl", *files, "--gpu", gpu, "--data-parallel-size", 1, "--json")
    assert done.returncode == (3 if refused else 0), done.stderr
    told = json.loads(done.stdout)
    assert [line.startswith(refused) for line in told["refused"]] == [True] * bool(refused)
    plan = load_plan(tmp_path / "plan.yaml")
    assert (plan.graphs.impl, plan.graphs.modules, plan.training.experts) == ("module", [], "dropless")


def test_replays_are_modelled_from_grouped_products_of_all_experts():
    """One layer took 4.9 ms in plain torch, whose gradients are not added in float32 and whose sums are atomic."""
    decoder, work = Decoder(QWEN, GPUS["h200"]), Work(tokens=4096, squared=2e6, max_seqs=12, grouped=True)
    layer = decoder._grouped_experts(work)
    ms = sum(one.us for one in (*layer.forward, *layer.backward)) / 1000
    added = 128 * 3 * 768 * 2048 * 10 / 4.8e9  # milliseconds of adding them, at the memory's whole rate
    assert 4.9 * 0.7 < ms - added < 4.9 * 1.15
    few = Decoder(replace(QWEN, num_experts=8), GPUS["h200"])._grouped_experts(work)
    assert sum(one.us for one in few.backward) < sum(one.us for one in layer.backward) - 1000  # fewer weights


def test_slices_of_experts_multiply_all_rows_in_part_of_the_width_and_exchange_tokens():
    fast, slow = GPUS["h200"], replace(GPUS["h200"], link_gbps=GPUS["h200"].link_gbps / 2)
    sliced, whole = replace(QWEN, **SLICED), replace(QWEN, **SLICED, expert_tensor_parallel_size=1)

    def gpu_ms(model, tokens=4096, gpu=fast, **work):
        work = {"squared": 2e6, "max_seqs": 12, "grouped": True, **work}
        return Decoder(model, gpu).time(Work(tokens=tokens, **work)).gpu_ms

    def of_rows(model, tokens=4096):
        return gpu_ms(model, tokens) - gpu_ms(replace(model, moe_router_topk=4), tokens)

    assert of_rows(sliced) == pytest.approx(of_rows(replace(QWEN, moe_ffn_hidden_size=384)))
    assert of_rows(whole) == pytest.approx(of_rows(QWEN, 2048))  # its own tokens'
    for grouped, sent in ((True, 4096), (False, 4096 * 8)):  # tokens; eagerly a row for each of their experts
        run = {"grouped": grouped}
        slower = [gpu_ms(model, gpu=slow, **run) - gpu_ms(model, **run) for model in (sliced, whole)]
        (one,), (slowed,) = (Device(gpu).collective(sent * 2048 * 2e-6, 2) for gpu in (fast, slow))
        assert slower[0] - slower[1] == pytest.approx(8 * 4 * (slowed.us - one.us) / 1000)  # twice in each pass


def test_slices_of_experts_hold_all_rows_the_gathered_tokens_and_a_slices_gradient():
    model = replace(QWEN, num_layers=2, **SLICED)
    layer = layer_tensors(model, "attention+moe")
    assert {"mlp.experts.linear_fc1": 8 * 2048 * 2.0, "mlp.experts.linear_fc2": 8 * 768}.items() <= {
        one.module: one.bytes_per_token for one in layer
    }.items()
    hidden, gradient = 4000 * 2048 * 2, 128 * 2 * (768 // 2) * 2048 * 2
    expected = pass_bytes([layer] * 2, 4000) + gradient + 2 * hidden + 32 * 2**20
    assert plan_of(model)[0].costs.slot_bytes == expected
    alone = replace(model, expert_tensor_parallel_size=1)
    expected = pass_bytes([layer_tensors(alone, "attention+moe")] * 2, 4000) + 2 * gradient + 32 * 2**20
    assert plan_of(alone)[0].costs.slot_bytes == expected


def test_whole_layers_save_most_of_what_launching_takes():
    whole, _ = plan_of()
    ended, _ = plan_of(replace(QWEN, precision="fp16"))
    assert whole.times.eager_step_ms[1] == pytest.approx(ended.times.eager_step_ms[1], rel=0.01)
    assert whole.times.relative_step_time[1] < 0.6 < ended.times.relative_step_time[1]
    assert not any("beside dropless experts" in warning for warning in whole.warnings)
    assert any("these were measured in one layer alone, of" in warning for warning in whole.warnings)
    assert not any("slices of experts" in warning for warning in whole.warnings)
    assert any("slices of experts never" in warning for warning in plan_of(replace(QWEN, **SLICED))[0].warnings)
