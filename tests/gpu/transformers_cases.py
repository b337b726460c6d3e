"""Runs of transformers' models and TRL's trainer by a plan on a GPU: `python tests/gpu/transformers_cases.py NAME`.

Every case runs the same training twice, replayed and padded as the plan says but eagerly, and compares losses and
weights bit for bit. Kernels are deterministic. A GPU machine without TRL runs the cases of models alone.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from support.trl_plans import plan_for

from thdprof.plan import Plan
from thdprof.transformers import attention, refusals
from thdprof.transformers.boundaries import BATCH_KEY, HostBoundaries
from thdprof.transformers.decoder import GraphedDecoder, without_random_states

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = 512 if DEVICE == "cuda" else 96  # without a GPU the cases only show that they run
PLAN = plan_for(tokens=TOKENS, caps=[4, 12], rows=64)
HALF = 50 if DEVICE == "cuda" else 5
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma3_text")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 256 if DEVICE == "cuda" else 32,
    "intermediate_size": 512 if DEVICE == "cuda" else 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}


EXPERTS = {"num_experts": 16, "num_local_experts": 16, "moe_intermediate_size": 128, "num_experts_per_tok": 4}
ROUTED = {**EXPERTS, "output_router_logits": True, "router_aux_loss_coef": 0.1}


def make_model(family: str, *, dtype: torch.dtype = torch.bfloat16, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZES.items() if family != "qwen2" or k != "head_dim"}
    config = AutoConfig.for_model(family, **{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(DEVICE, dtype).train()


def batches(count: int, *, seed: int = 0):
    """Micro-batches of up to TOKENS tokens, some with more documents than any bucket holds."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        n_tokens = int(rng.integers(TOKENS - TOKENS // 8, TOKENS + 1))
        documents = (3, 1, 11, 2, 20, 8, 4)[number % 7]
        cuts = np.sort(rng.choice(np.arange(1, n_tokens), documents - 1, replace=False))
        cu = np.concatenate(([0], cuts, [n_tokens])).astype(np.int32)
        ids = torch.from_numpy(rng.integers(0, SIZES["vocab_size"], (1, n_tokens))).to(DEVICE)
        positions = torch.from_numpy(np.concatenate([np.arange(n) for n in np.diff(cu)]))[None].to(DEVICE)
        yield {
            "input_ids": ids,
            "labels": ids,
            "position_ids": positions,
            "use_cache": False,
            BATCH_KEY: HostBoundaries(cu_seqlens=cu),
        }


def train(
    model,
    *,
    replay: bool,
    steps: int,
    backend: attention.Backend | str = "auto",
    autocast: bool = False,
    accumulation: int = 2,
    fused: bool = False,
):
    """Losses of every micro-batch and the weights at the end, and the counters."""
    attention.register(backend)
    decoder = GraphedDecoder(refusals.decoder_of(model), PLAN, replay=replay, reduced_by_hooks=False, compile=fused)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, foreach=True)
    found = []
    torch.manual_seed(1)
    with decoder.following(), without_random_states(refusals.decoder_of(model)):
        end_attention = decoder.choose_attention(attention.IMPLEMENTATION)
        for number, batch in enumerate(batches(steps * accumulation)):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                loss = model(**batch).loss
            (loss / accumulation).backward()
            found.append(loss.detach())
            if number % accumulation == accumulation - 1:
                optimizer.step()
                optimizer.zero_grad()
        end_attention()
        stats = decoder.graphed.stats()
    weights = [p.detach().clone() for p in model.parameters()]
    return torch.stack(found).float().cpu(), weights, stats


def compare(make, *, steps: int = 12 if DEVICE == "cuda" else 2, **options) -> None:
    eager = train(make(), replay=False, steps=steps, **options)
    replayed = train(make(), replay=True, steps=steps, **options)
    print(replayed[2])
    differing = [i for i, (a, b) in enumerate(zip(eager[0], replayed[0], strict=True)) if not torch.equal(a, b)]
    assert torch.isfinite(eager[0]).all(), eager[0]
    assert not differing, f"losses differ from micro-batch {differing[0]}: {eager[0]} {replayed[0]}"
    moved = [i for i, (a, b) in enumerate(zip(eager[1], replayed[1], strict=True)) if not torch.equal(a, b)]
    assert not moved, f"{len(moved)} of {len(eager[1])} weights differ"
    if DEVICE == "cuda":
        assert replayed[2].replays.total() > steps, replayed[2]
        assert set(replayed[2].fallbacks) == {"too_many_seqs"}, replayed[2]


def family(name: str, **changes) -> None:
    compare(lambda: make_model(name, **changes))


def backends() -> None:
    for backend in attention.available():
        print(backend)
        compare(lambda: make_model("qwen3"), backend=backend)
        compare(lambda: make_model("mistral", sliding_window=96), backend=backend)


def autocast() -> None:
    compare(lambda: make_model("llama", dtype=torch.float32), autocast=True)


def checkpointing() -> None:
    for reentrant in (False, True):

        def make(reentrant: bool = reentrant):
            model = make_model("qwen3")
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
            return model

        compare(make)


def fused() -> None:
    """Layers that torch.compile has fused, inside graphs and in the padded eager twin."""
    compare(lambda: make_model("qwen3"), backend="torch", fused=True)

    def recomputed():
        model = make_model("qwen3")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    compare(recomputed, backend="torch", fused=True)


def lora() -> None:
    from peft import LoraConfig, get_peft_model

    def make(dropout: float):
        model = make_model("qwen3")
        torch.manual_seed(2)
        return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout)).train()

    compare(lambda: make(0.0))
    compare(lambda: make(0.1))


def experts() -> None:
    """Layers with experts: adapters of attention under checkpoints, compiled layers, and the loss of routers in all."""
    from peft import LoraConfig, get_peft_model

    def make(checkpointing: bool):
        model = make_model("qwen3_moe", **ROUTED)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(2)
        adapters = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
        return get_peft_model(model, adapters).train()

    compare(lambda: make(checkpointing=False))
    compare(lambda: make(checkpointing=True))
    if DEVICE == "cuda":  # on a processor transformers asks for torch's version, which torch.compile cannot follow
        compare(lambda: make(checkpointing=True), backend="torch", fused=True)
        compare(lambda: make_model("qwen3_moe", **ROUTED), backend="torch", fused=True)


def _sft(directory: Path, *, replay: bool, plan: Plan, stats: Path | None = None, resume: bool = False, **arguments):
    from support import trl_training

    from thdprof.transformers import PlanCallback

    peft_config, fused = arguments.pop("peft_config", None), arguments.pop("fused", False)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if DEVICE == "cuda" else {}
    name = arguments.pop("family", "qwen3")
    model = trl_training.small_model(name, layers=3, **sizes, **(EXPERTS if name == "qwen3_moe" else {}))
    if name == "qwen3_moe":
        model = model.to(torch.bfloat16)
    data = trl_training.dataset_of(trl_training.documents(1500, longest=TOKENS // 2))
    callback = PlanCallback(plan, replay=replay, stats=stats, compile=fused)
    usual = {
        "max_length": TOKENS, "gradient_accumulation_steps": 2, "max_steps": 2 * HALF, "bf16": DEVICE == "cuda",
        "learning_rate": 1e-3, "lr_scheduler_type": "constant", "save_strategy": "no",
    }  # fmt: skip
    run = trl_training.trainer(
        model, data, directory, callbacks=[callback], peft_config=peft_config,
        eval_dataset=trl_training.dataset_of(trl_training.documents(40, seed=5)), **{**usual, **arguments},
    )  # fmt: skip
    run.train(resume_from_checkpoint=str(directory / f"checkpoint-{HALF}") if resume else None)
    weights = {n: p.detach().clone().cpu() for n, p in run.model.named_parameters() if p.requires_grad}
    logged = [
        (e["step"], e.get("loss"), e.get("eval_loss")) for e in run.state.log_history if "loss" in e or "eval_loss" in e
    ]
    return logged, weights, callback.last, run


def _same(first, second) -> None:
    assert first[0] == second[0], [pair for pair in zip(first[0], second[0], strict=True) if pair[0] != pair[1]][:3]
    assert all(torch.equal(first[1][n], second[1][n]) for n in first[1])


def _sft_plan(**changes) -> Plan:
    return plan_for(tokens=TOKENS, caps=[16, 64], rows=64, global_batch_size=2, seed=42, drop_last=False, **changes)


def sft(**arguments) -> None:
    """100 steps of SFTTrainer: logged losses and weights, with evaluation between."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        arguments = {"eval_strategy": "steps", "eval_steps": 25 if DEVICE == "cuda" else 4, **arguments}
        eager = _sft(path / "a", replay=False, plan=_sft_plan(), **arguments)
        replayed = _sft(path / "b", replay=True, plan=_sft_plan(), stats=path / "stats.jsonl", **arguments)
        print(replayed[2])
        print(replayed[0][-1], (path / "stats.jsonl").read_text())
        _same(eager, replayed)
        if DEVICE == "cuda":
            assert replayed[2].replays.total() > 100
            assert "thdprof/replayed" in replayed[3].state.log_history[0]


def sft_lora() -> None:
    from peft import LoraConfig

    sft(peft_config=LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0))


def sft_checkpointing() -> None:
    sft(gradient_checkpointing=True)


def sft_fused() -> None:
    sft(fused=True)


def sft_experts() -> None:
    """Qwen3-MoE with TRL's usual loss of routers, adapters of attention, and checkpoints."""
    from peft import LoraConfig

    adapters = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], lora_dropout=0.0)
    sft(family="qwen3_moe", peft_config=adapters, gradient_checkpointing=True)


def sft_liger() -> None:
    sft(use_liger_kernel=True)


def sft_resume() -> None:
    """A run that is resumed from its checkpoint ends with the losses and weights of one that was never stopped."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        saving = {"save_strategy": "steps", "save_steps": HALF}
        whole = _sft(path / "a", replay=True, plan=_sft_plan(), **saving)
        resumed = _sft(path / "a", replay=True, plan=_sft_plan(), resume=True, **saving)
        assert [e for e in whole[0] if e[0] > HALF] == [e for e in resumed[0] if e[0] > HALF]
        assert all(torch.equal(whole[1][n], resumed[1][n]) for n in whole[1])


def ddp() -> None:
    """Under torchrun: gradients are reduced as in a run without graphs, so that all ranks end with equal weights."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        plan = plan_for(
            tokens=TOKENS, caps=[16, 64], rows=64, global_batch_size=4, data_parallel_size=2, seed=42, drop_last=False
        )
        options = {"max_steps": 20} | ({} if DEVICE == "cuda" else {"use_cpu": True, "ddp_backend": "gloo"})
        eager = _sft(path / "a", replay=False, plan=plan, **options)
        replayed = _sft(path / "b", replay=True, plan=plan, **options)
        print(replayed[2])
        _same(eager, replayed)
        sums = torch.stack([w.double().sum() for w in replayed[1].values()]).to(DEVICE)
        each = [torch.empty_like(sums) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(each, sums)
        assert all(torch.equal(e, each[0]) for e in each)
        torch.distributed.destroy_process_group()


CASES = {
    **{f"family_{name}": (lambda name=name: family(name)) for name in FAMILIES},
    "family_qwen3_moe": lambda: family("qwen3_moe", **EXPERTS),
    "family_mixtral": lambda: family("mixtral", **ROUTED),
    "family_olmoe": lambda: family("olmoe", **ROUTED, head_dim=SIZES["hidden_size"] // 4),
    "family_mistral_window": lambda: family("mistral", sliding_window=96),
    "backends": backends,
    "autocast": autocast,
    "checkpointing": checkpointing,
    "fused": fused,
    "lora": lora,
    "experts": experts,
    "sft": sft,
    "sft_lora": sft_lora,
    "sft_checkpointing": sft_checkpointing,
    "sft_fused": sft_fused,
    "sft_experts": sft_experts,
    "sft_liger": sft_liger,
    "sft_resume": sft_resume,
    "ddp": ddp,
}

if __name__ == "__main__":
    import traceback

    torch.use_deterministic_algorithms(True)  # with warn_only, flash attention's backward stays as it is
    failed = []
    for case in sys.argv[1:]:
        try:
            CASES[case]()
        except Exception:
            traceback.print_exc()
            failed.append(case)
        print(f"{case}: {'failed' if case in failed else 'passed'}", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "ok", flush=True)
    sys.exit(bool(failed))
