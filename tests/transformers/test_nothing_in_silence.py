"""What thdprof's attention, boundaries and graphs do not have is refused by its name, and unread settings are named."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest
from support.cpu_graphs import as_if_on_a_gpu
from support.trl_plans import plan_for

pytest.importorskip("torch")
pytest.importorskip("trl", reason="needs the extra transformers")

import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from support.trl_training import dataset_of, documents, small_model, trainer
from trl import SFTConfig

from thdprof.errors import UsageError
from thdprof.transformers import PlanCallback, attention, refusals
from thdprof.transformers.boundaries import BATCH_KEY, HostBoundaries, host_boundaries
from thdprof.transformers.decoder import GraphedDecoder

TOKENS = 48
PLAN = plan_for(tokens=TOKENS, caps=[3, 6], rows=8)


def reasons(model, **options) -> list[str]:
    options = {"backend": "flash_attn", "own_attention": False, "on_gpu": True, **options}
    return list(refusals.refuse_model(model, **options))


def layers_of(model):
    return refusals.decoder_of(model).layers


# --- attention that is not causal -------------------------------------------------------------------------------------


def with_a_layer_that_looks_ahead():
    model = small_model("llama")
    layers_of(model)[1].self_attn.is_causal = False
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: small_model("llama", is_causal=False), "config.is_causal is False"),
        (with_a_layer_that_looks_ahead, "layers.1.self_attn.is_causal is False"),
        *(
            (lambda f=f: small_model(f, use_bidirectional_attention=True), "config.use_bidirectional_attention is True")
            for f in ("gemma", "gemma2", "gemma3_text")
        ),
    ],
)
@pytest.mark.parametrize("own_attention", [False, True])
def test_attention_to_later_tokens_is_refused(make, reason, own_attention):
    (line,) = reasons(make(), own_attention=own_attention)
    assert line.startswith(f"{reason}: tokens would attend to later ones")


def test_causal_models_of_all_families_are_not_refused():
    models = [small_model(family).bfloat16() for family in refusals.FAMILIES]
    assert [reasons(model) for model in models] == [[]] * len(refusals.FAMILIES)


def test_settings_of_single_attention_layers_are_refused_as_those_of_the_config():
    model = small_model("gemma2", attn_logit_softcapping=None)
    assert reasons(model, backend="torch") == []
    layers_of(model)[1].self_attn.attn_logit_softcapping = 30.0
    layers_of(model)[1].self_attn.attention_dropout = 0.1
    dropout, softcap = reasons(model, backend="torch")
    assert dropout.startswith("attention_dropout 0.1: the attention of torch has none")
    assert softcap.startswith("attn_logit_softcapping 30.0")


# --- arguments of attention -------------------------------------------------------------------------------------------


def attended(model, **arguments):
    """Logits of `model` with thdprof's attention over two documents of 20 and 28 tokens."""
    attention.register()
    model.config._attn_implementation = attention.IMPLEMENTATION
    cu = torch.tensor([0, 20, TOKENS], dtype=torch.int32)
    given = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 28, "max_length_k": 28, "use_cache": False}
    positions = torch.cat([torch.arange(20), torch.arange(28)])[None]
    ids = torch.arange(TOKENS)[None] + 3
    return model(**{"input_ids": ids, "position_ids": positions, **given, **arguments}).logits


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"is_causal": False}, "LlamaAttention hands attention is_causal=False:"),
        ({"attention_mask": torch.zeros(1, 1, TOKENS, TOKENS)}, "LlamaAttention hands attention attention_mask:"),
        ({"score_mod": abs, "block_mask": 0}, "LlamaAttention hands attention score_mod, block_mask:"),
        ({"use_cache": True, "past_key_values": "of 4 tokens"}, "attention has 52 keys for 48 queries"),
    ],
)
def test_an_argument_that_changes_attention_is_refused_by_its_name(arguments, named):
    model = small_model("llama").train()
    if "past_key_values" in arguments:
        from transformers import DynamicCache

        arguments = {**arguments, "past_key_values": DynamicCache()}
        for layer in range(2):
            arguments["past_key_values"].update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8), layer)
    with pytest.raises(UsageError, match=named):
        attended(model, **arguments)


def test_a_layer_that_turns_to_later_tokens_while_training_is_refused():
    with pytest.raises(UsageError, match="LlamaAttention hands attention is_causal=False"):
        attended(with_a_layer_that_looks_ahead())


def test_sinks_are_refused():
    with pytest.raises(UsageError, match="GptOssAttention hands attention s_aux"):
        attended(small_model("gpt_oss", num_local_experts=2, num_experts_per_tok=1))


@pytest.mark.parametrize("family", refusals.FAMILIES)
def test_arguments_that_change_nothing_pass(family):
    model = small_model(family)
    harmless = {"is_causal": True, "num_items_in_batch": 40, "output_attentions": False, "score_mod": None}
    harmless |= {"shift_labels": torch.zeros(1, TOKENS), "return_token_accuracy": True, "output_router_logits": False}
    harmless |= {"attention_mask": torch.ones(1, TOKENS, dtype=torch.long), "seq_idx": torch.zeros(1, TOKENS)}
    torch.testing.assert_close(attended(model, **harmless), attended(model), rtol=0, atol=0)


def test_a_mask_of_four_dimensions_is_refused_where_layers_are_captured(monkeypatch):
    as_if_on_a_gpu(monkeypatch)
    batch = {**row(40), "attention_mask": torch.zeros(1, 1, 40, 40)}
    with pytest.raises(UsageError, match="hands attention attention_mask"):
        followed(small_model().train(), batch, [0, 40])


# --- boundaries -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused_before_the_first_step(method):
    model = get_peft_model(small_model("llama"), method(task_type="CAUSAL_LM", num_virtual_tokens=8))
    (line,) = reasons(model)
    assert line.startswith(f"peft_type {model.active_peft_config.peft_type.value}: virtual tokens shift")


def test_adapters_are_refused_where_hooks_read_the_text():
    assert reasons(get_peft_model(small_model(), LoraConfig(r=4, target_modules="all-linear"))) == []
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=[3])
    (line,) = reasons(get_peft_model(small_model(), adapter))
    assert line.startswith("alora_invocation_tokens of LORA")


def followed(model, batch, cu):
    """The loss of `batch` by the plan, with boundaries `cu`."""
    attention.register()
    decoder = GraphedDecoder(refusals.decoder_of(model), PLAN, replay=True, reduced_by_hooks=False)
    with ExitStack() as stack, decoder.following():
        stack.callback(decoder.choose_attention(attention.IMPLEMENTATION))
        boundaries = HostBoundaries(cu_seqlens=np.array(cu, dtype=np.int32))
        return model(**batch, use_cache=False, **{BATCH_KEY: boundaries}).loss


def row(tokens):
    ids = torch.arange(tokens)[None] + 3
    return {"input_ids": ids, "labels": ids}


def test_boundaries_must_end_where_the_hidden_states_do():
    assert followed(small_model().train(), row(40), [0, 10, 40]).isfinite()
    for cu, rows in (([0, 10, 39], 1), ([0, 41], 1), ([0, 40, 80], 2), ([0, 40], 2)):
        batch = {name: value.repeat(rows, 1) for name, value in row(40).items()}
        with pytest.raises(UsageError, match=f"end at {cu[-1]}, but its hidden states are {rows} x 40 tokens"):
            followed(small_model().train(), batch, cu)


def test_tokens_that_the_model_adds_are_refused_in_training():
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    model = get_peft_model(small_model("llama"), adapter).train()
    with pytest.raises(UsageError, match="end at 40, but its hidden states are 1 x 48 tokens"):
        followed(model, {**row(40), "attention_mask": torch.ones(1, 40, dtype=torch.long)}, [0, 40])


def test_a_batch_with_token_types_tells_no_boundaries():
    batch = {**row(6), "position_ids": torch.arange(6)[None]}
    assert host_boundaries(batch).cu_seqlens.tolist() == [0, 6]
    assert host_boundaries({**batch, "token_type_ids": torch.zeros(1, 6)}) is None


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_outputs_of_layers_are_refused_where_graphs_replace_them(name):
    with pytest.raises(UsageError, match=f"called with {name}=True"):
        followed(small_model().train(), {**row(40), name: True}, [0, 40])


# --- hooks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_on_layers_are_refused_by_the_name_of_the_layer(kind):
    model = small_model()
    getattr(layers_of(model)[1].mlp, kind)(lambda *given: None)
    assert reasons(model) == ["modules with hooks, which a replay does not run: layers.1.mlp; remove the hooks"]


def test_hooks_that_move_weights_are_refused():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = small_model()
    for number in (0, 1):
        add_hook_to_module(layers_of(model)[number], ModelHook())
    assert reasons(model) == ["modules with hooks, which a replay does not run: layers.0, layers.1; remove the hooks"]


def test_hooks_on_gradients_are_refused():
    model = small_model()
    weight = layers_of(model)[0].mlp.up_proj.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: None)  # which replays run
    assert reasons(model) == []
    weight.register_hook(lambda gradient: gradient * 2)
    (line,) = reasons(model)
    assert line.startswith("layers.0.mlp.up_proj.weight has a gradient hook")


def test_hooks_outside_of_the_layers_are_left_to_run():
    model = small_model()
    model.register_forward_hook(lambda *given: None)
    refusals.decoder_of(model).embed_tokens.register_forward_hook(lambda *given: None)
    assert reasons(model) == []


def test_hooks_of_an_earlier_call_for_hidden_states_do_not_count():
    model = small_model()
    assert len(model(torch.arange(4)[None], output_hidden_states=True).hidden_states) == 3
    assert sum(len(module._forward_hooks) for module in layers_of(model).modules()) >= 2
    assert reasons(model) == []


# --- settings that nobody has read ------------------------------------------------------------------------------------


@dataclass
class LaterConfig(SFTConfig):
    shiny: bool = False
    plain: int = 3


def usual(directory, **changes):
    return LaterConfig(output_dir=str(directory), report_to="none", bf16=False, packing=True, max_length=64, **changes)


@pytest.mark.parametrize("family", refusals.FAMILIES)
def test_a_usual_run_has_no_unread_setting(family, tmp_path):
    args = usual(tmp_path, learning_rate=1e-3, num_train_epochs=2, seed=3, eval_strategy="epoch", optim="sgd")
    model = small_model(family)
    model.config.base_model_tp_plan = {"layers.*": "colwise"}  # transformers sets it where embeddings are tied
    assert refusals.unread_settings(args, args.to_dict(), model) == []


def test_settings_that_nobody_has_read_are_named(tmp_path):
    args = usual(tmp_path, shiny=True, auto_find_batch_size=True)
    model = small_model("llama", pretraining_tp=2, rope_flavour="mint")
    found = refusals.unread_settings(args, args.to_dict(), model)
    assert found == ["auto_find_batch_size=True", "shiny=True", "config.pretraining_tp=2", "config.rope_flavour='mint'"]


@pytest.mark.parametrize("changes", [{}, {"chunk_size_feed_forward": 2}])
def test_unread_settings_are_one_warning_before_the_first_step(changes, tmp_path, caplog):
    rows = documents(10)
    plan = plan_for(tokens=64, caps=[8], rows=8, micro_batch_size=1, seed=42, drop_last=False)
    run = trainer(small_model(**changes), dataset_of(rows), tmp_path, callbacks=[PlanCallback(plan)], max_steps=1)
    with caplog.at_level(logging.WARNING, logger="thdprof"):
        run.train()
    lines = [record.getMessage() for record in caplog.records if "never looked at" in record.getMessage()]
    assert [("config.chunk_size_feed_forward=2;" in line) for line in lines] == [True] * len(changes)
