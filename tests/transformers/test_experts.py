"""Models of transformers with experts, captured whole: what their layers return, read and save, and what is refused."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext
from functools import partial

import numpy as np
import pytest
from support.cpu_graphs import as_if_on_a_gpu
from support.trl_plans import plan_for

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

import torch
from peft import LoraConfig, get_peft_model
from support.trl_training import dataset_of, documents, losses, small_model, trainer
from torch.utils._python_dispatch import TorchDispatchMode

from thdprof.errors import UsageError
from thdprof.megatron_limits.trainer import WITH_EXPERTS, refuse_experts, refuse_model_type
from thdprof.transformers import PlanCallback, attention, refusals
from thdprof.transformers.boundaries import BATCH_KEY, HostBoundaries
from thdprof.transformers.decoder import GraphedDecoder, changed_layers

TOKENS = 48
PLAN = plan_for(tokens=TOKENS, caps=[3, 6], rows=8)
PASSES = ((False, None), (True, False), (True, None), (False, False), (False, True), (True, True))
"""Whether layers are compiled, and whether their checkpoints are reentrant; None: there are none."""
LENGTHS = ([20, 22], [5, 6, 7, 8, 9], [1] * 10 + [30])


def batch_of(lengths, *, seed=0, **more):
    ids = torch.randint(0, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False, **more}
    return batch, {**batch, BATCH_KEY: HostBoundaries(cu_seqlens=cu)}


def followed(model, **options):
    attention.register()
    decoder = GraphedDecoder(refusals.decoder_of(model), PLAN, replay=True, reduced_by_hooks=False, **options)
    decoder.changes.callback(decoder.choose_attention(attention.IMPLEMENTATION))
    return decoder


@pytest.fixture
def without_inductor(monkeypatch, request):
    """On a processor transformers asks for torch's version, which torch.compile cannot follow; on a GPU it does not.

    One family's backward is traced beside its forward, which takes two thirds of the time.
    """
    from transformers.integrations import moe

    backend = "aot_eager" if "qwen3_moe" in request.node.name else "eager"
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    monkeypatch.setattr(moe, "is_torch_less_or_equal", lambda *_, **__: False)
    torch.compiler.reset()
    with torch._functorch.config.patch(donated_buffer=False):  # stand-ins of graphs run backwards again
        yield


class NothingRead(TorchDispatchMode):
    """Fails where a number on the device becomes one of Python, or a shape that depends on it."""

    READS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "is_nonzero")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in self.READS):
            raise AssertionError(f"{function} reads on the host")
        return function(*args, **(kwargs or {}))


CHECKPOINTS_ITSELF = refusals.checkpoints_itself(refusals.decoder_of(small_model("qwen3_moe")).layers[0])


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_layers_read_nothing_on_the_host_but_with_eager_experts(family, implementation):
    model = small_model(family).bfloat16().train()
    model.set_experts_implementation(implementation)
    layer, rope = refusals.decoder_of(model).layers[0], refusals.decoder_of(model).rotary_emb
    attention.register()
    model.config._attn_implementation = attention.IMPLEMENTATION
    hidden = torch.randn(1, TOKENS, 32, dtype=torch.bfloat16, requires_grad=True)
    cu = torch.tensor([0, 20, TOKENS], dtype=torch.int32)
    places = rope(hidden, torch.arange(TOKENS)[None])
    raises = pytest.raises(AssertionError, match="reads on the host") if implementation == "eager" else nullcontext()
    with NothingRead(), raises:
        result = layer(hidden, position_embeddings=places, cu_seq_lens_q=cu, max_length_q=28)
        result.sum().backward()
    refused = [*refusals.refuse_model(model, backend="torch", own_attention=False, on_gpu=True)]
    assert [line.split(":")[0] for line in refused] == ["experts_implementation 'eager'"] * (implementation == "eager")


def test_checkpoints_that_lose_router_logits_are_refused(monkeypatch):
    model = small_model("qwen3_moe")
    model.gradient_checkpointing_enable()
    layer = type(refusals.decoder_of(model).layers[0])

    def forward_with_checkpointing(*args, **kwargs):
        raise AssertionError

    def refused():
        return [line for line in refusals.refuse_model(model, backend="torch", own_attention=False, on_gpu=True)
                if "which loses their router logits" in line]  # fmt: skip

    assert len(refused()) == CHECKPOINTS_ITSELF
    monkeypatch.setattr(layer, "forward", forward_with_checkpointing)
    assert len(refused()) == 1


@pytest.mark.parametrize(
    ("family", "compile", "checkpointing"),
    [
        *((family, compile, checkpointing) for family in WITH_EXPERTS for compile, checkpointing in PASSES[:2]),
        *(("qwen3_moe", *of_pass) for of_pass in PASSES[2:]),
    ],
)
def test_logits_of_routers_and_their_loss_are_the_models_own(
    family, compile, checkpointing, monkeypatch, without_inductor
):
    """By compiled layers too, without Inductor, and with both kinds of checkpoints."""
    if checkpointing is not None and CHECKPOINTS_ITSELF:
        pytest.skip("this transformers' checkpoints lose router logits, and are refused")
    dtype = torch.bfloat16 if compile else torch.float32  # in which alone transformers compiles grouped products
    plain = small_model(family, router_aux_loss_coef=0.5).to(dtype).train()
    if checkpointing is not None:
        plain.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        plain.enable_input_require_grads()
    model, as_found = copy.deepcopy(plain), []
    if checkpointing:  # of which transformers itself loses the logits' gradients
        plain.gradient_checkpointing_disable()
    as_if_on_a_gpu(monkeypatch)
    decoder = followed(model, compile=compile)
    with decoder.following():
        for number, lengths in enumerate(LENGTHS):
            expected, given = batch_of(lengths, seed=number, output_router_logits=True)
            results = plain(**expected), model(**given)
            for result in results:
                result.loss.backward()
            own, mine = results
            assert mine.aux_loss.item() == pytest.approx(own.aux_loss.item(), rel=1e-2 if compile else 1e-5)
            for a, b in zip(mine.router_logits, own.router_logits, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2 if compile else 1e-4, atol=2e-2 if compile else 1e-5)
            as_found.append(len(mine.router_logits))
        assert model(**batch_of(LENGTHS[0])[1]).router_logits is None
        replays = 0 if checkpointing else 2  # no stand-in of a capture serves reentrant checkpoints
        assert decoder.graphed.stats().replays.total() == replays
    assert as_found == [2, 2, 2]
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, rtol=5e-2 if compile else 1e-3, atol=5e-3 if compile else 1e-6)
    decoder.give_back()
    assert {type(layer.mlp.gate).__name__ for layer in refusals.decoder_of(model).layers}.isdisjoint({"Keeping"})


def test_evaluation_has_router_logits_too():
    model = small_model("qwen3_moe", output_router_logits=True).eval()
    expected, given = batch_of(LENGTHS[0])
    masked = {**expected, "attention_mask": torch.ones_like(expected["input_ids"])}  # which tells no boundaries
    with torch.no_grad():
        plain = model(**expected), model(**masked)
        with followed(model).following():
            found = model(**given), model(**masked)
    for own, mine in zip(plain, found, strict=True):
        torch.testing.assert_close(mine.aux_loss, own.aux_loss)
        torch.testing.assert_close(mine.logits, own.logits, rtol=1e-4, atol=1e-5)
        assert [len(logits) for logits in mine.router_logits] == [sum(LENGTHS[0])] * 2


def test_an_evaluation_whose_logits_transformers_keeps_by_hooks_leaves_replays_as_they_were(monkeypatch):
    model = small_model("qwen3_moe").train()
    as_if_on_a_gpu(monkeypatch)
    decoder = followed(model)
    expected, given = batch_of(LENGTHS[0], output_router_logits=True)
    masked = {**expected, "attention_mask": torch.ones_like(expected["input_ids"])}  # which tells no boundaries
    with decoder.following():
        losses = []
        for _ in range(2):
            losses.append(model(**given).loss)
            losses[-1].backward()
            with torch.no_grad():
                evaluated = model.eval()(**masked)
            assert len(evaluated.router_logits) == 2
            model.train()
        assert decoder.graphed.stats().replays.total() == 2
    assert losses[0].item() == losses[1].item()


@pytest.mark.parametrize("compile", [False, True])
def test_a_run_of_trl_with_its_usual_loss_of_routers_has_the_losses_of_one_without(compile, tmp_path, without_inductor):
    if CHECKPOINTS_ITSELF:
        pytest.skip("this transformers' checkpoints lose router logits, and are refused")
    dtype, within = (torch.bfloat16, 1e-2) if compile else (torch.float32, 1e-4)
    plan = plan_for(tokens=64, caps=[8, 20], rows=8, global_batch_size=2, seed=42, drop_last=False)
    found = []
    for callbacks in ((), (PlanCallback(plan, compile=compile),)):
        adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], lora_dropout=0.0)
        run = trainer(
            small_model("qwen3_moe").to(dtype), dataset_of(documents(40)), tmp_path, callbacks=callbacks,
            peft_config=adapters, gradient_checkpointing=True, gradient_accumulation_steps=2, max_steps=4,
            eval_dataset=dataset_of(documents(10, seed=3)), eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
        run.train()
        logged = run.state.log_history
        found.append([losses(run), *([e[n] for e in logged if n in e] for n in ("aux_loss", "eval_loss"))])
        assert [len(part) for part in found[-1]] == [4, 4, 2]
    for mine, own in zip(found[1], found[0], strict=True):
        assert mine == pytest.approx(own, rel=within)


def test_a_run_with_eager_experts_is_refused_with_the_call_that_changes_it(tmp_path):
    model = small_model("qwen3_moe")
    model.set_experts_implementation("eager")
    run = trainer(model, dataset_of(documents(10)), tmp_path, callbacks=[PlanCallback(PLAN)], max_steps=1)
    with pytest.raises(UsageError, match=r"call model.set_experts_implementation\('grouped_mm'\)"):
        run.train()


@pytest.mark.parametrize(
    ("implementation", "dtype", "groups", "reason"),
    [
        ("eager", None, None, "'eager': the host reads which experts have tokens; load the model with"),
        ("deepgemm", None, None, "'deepgemm': not checked in graphs"),
        (None, "float32", True, "experts' weights are in float32: torch's grouped products read on the host"),
        ("grouped_mm", "float16", True, "experts' weights are in float16"),
        ("grouped_mm", "bfloat16", False, "checked in graphs on Hopper GPUs alone"),
        ("grouped_mm", "bfloat16", True, ""),
        ("batched_mm", "float32", False, ""),
        (None, None, None, ""),
    ],
)
def test_experts_whose_products_read_on_the_host_are_refused(implementation, dtype, groups, reason):
    lines = [*refuse_experts(implementation, weights_dtype=dtype, groups_products=groups)]
    assert len(lines) == bool(reason)
    assert reason in " ".join(lines)


def test_adapters_of_experts_and_noise_under_checkpoints_are_refused():
    model = small_model("qwen3_moe").bfloat16()
    usual = {"backend": "torch", "own_attention": False, "on_gpu": True}
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    (line,) = refusals.refuse_model(adapted, **usual)
    assert line.startswith("target_parameters of LORA (down_proj, gate.weight, gate_up_proj): adapters of experts and")
    noisy = small_model("mixtral", router_jitter_noise=0.1).bfloat16()
    assert [*refusals.refuse_model(noisy, **usual)] == []
    noisy.gradient_checkpointing_enable()
    *_, line = refusals.refuse_model(noisy, **usual)
    assert "checkpointing together with dropout (router_jitter_noise 0.1)" in line


def test_sinks_are_the_reason_against_gpt_oss():
    assert "'gpt_oss': its attention has sinks" in " ".join(refuse_model_type("gpt_oss"))


def test_compiled_layers_may_look_up_the_gpus_capability(monkeypatch, without_inductor):
    @torch._dynamo.disable  # as torch treats its own function
    def get_device_capability(device=None):
        return 9, device or 0

    class Layer(torch.nn.Module):
        def forward(self, hidden):
            return hidden + 1 if torch.cuda.get_device_capability(hidden.device) >= (8, 0) else hidden

    monkeypatch.setattr(torch.cuda, "get_device_capability", get_device_capability)
    layers = torch.nn.ModuleList([Layer()])
    with ExitStack() as stack:
        with monkeypatch.context() as with_gpu:
            for name, value in (("is_available", True), ("device_count", 2), ("current_device", 1)):
                with_gpu.setattr(torch.cuda, name, lambda value=value: value)
            stack.enter_context(changed_layers(layers, None, compile=True))
            with changed_layers(torch.nn.ModuleList(), None, compile=True):
                assert torch.cuda.get_device_capability("cuda:1") == torch.cuda.get_device_capability() == (9, 1)
        assert torch.cuda.get_device_capability(torch.device("cuda:0")) == (9, 0)
        assert layers[0](torch.zeros(2)).tolist() == [1, 1]
    assert torch.cuda.get_device_capability is get_device_capability
