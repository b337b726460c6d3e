"""A model's decoder layers as a graphed stack: the numbers are those of the model by itself."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from support.cpu_graphs import as_if_on_a_gpu
from support.trl_plans import plan_for

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from support.trl_training import small_model

from thdprof.errors import UsageError
from thdprof.transformers import attention, refusals
from thdprof.transformers.boundaries import BATCH_KEY, HostBoundaries
from thdprof.transformers.decoder import GraphedDecoder, gathered, without_random_states

TOKENS = 48
PLAN = plan_for(tokens=TOKENS, caps=[3, 6], rows=8)
FAMILIES = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 9}),
    ("gemma", {}),
    ("gemma2", {"sliding_window": 9, "attn_logit_softcapping": 20.0}),
    ("gemma3_text", {"sliding_window": 9}),
    ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [0]}),
    ("qwen3_moe", {"num_experts_per_tok": 3, "output_router_logits": True}),
    ("mixtral", {"num_local_experts": 5, "output_router_logits": True, "router_aux_loss_coef": 0.1}),
    ("olmoe", {"clip_qkv": 2.0, "output_router_logits": True}),
]
BATCHES = [[20, 28], [48], [5, 6, 7, 8, 9], [1] * 10 + [30], [11, 13, 3], [40]]
"""Documents of each micro-batch; the fourth has more than any bucket holds."""


def batch_of(lengths: list[int], *, seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (1, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return {"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False, "num_items_in_batch": 40}


def with_boundaries(batch: dict, lengths: list[int]) -> dict:
    cu = np.cumsum([0, *lengths]).astype(np.int32)
    return {**batch, BATCH_KEY: HostBoundaries(cu_seqlens=cu)}


def test_layers_share_a_set_of_arguments_where_all_of_them_are_the_same():
    one, two = torch.ones(2), torch.ones(2)
    arguments, tensors = gathered([{"mask": one}, {"mask": two}, {"mask": one}, {"mask": one, "more": two}])
    assert arguments.sets == (0, 1, 0, 2)
    assert [tensor is given for tensor, given in zip(tensors, (one, two), strict=True)] == [True, True]


def followed(model, **options):
    """The decoder of `model` by the plan, with thdprof's attention."""
    attention.register()
    decoder = GraphedDecoder(refusals.decoder_of(model), PLAN, **{"replay": True, "reduced_by_hooks": False, **options})
    decoder.changes.callback(decoder.choose_attention(attention.IMPLEMENTATION))
    return decoder


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=[name for name, _ in FAMILIES])
def test_replayed_losses_and_gradients_are_the_models_own(family, changes, monkeypatch):
    plain = small_model(family, **changes).train()
    model = copy.deepcopy(plain)
    expected = []
    for number, lengths in enumerate(BATCHES):
        loss = plain(**batch_of(lengths, seed=number)).loss
        loss.backward()
        expected.append(loss.item())
    as_if_on_a_gpu(monkeypatch)
    decoder = followed(model)
    names = list(model.state_dict())
    found = []
    with decoder.following():
        for number, lengths in enumerate(BATCHES):
            loss = model(**with_boundaries(batch_of(lengths, seed=number), lengths)).loss
            loss.backward()
            found.append(loss.item())
        assert list(model.state_dict()) == names
        stats = decoder.graphed.stats()
        assert stats.replays.total() == 5, stats
        assert dict(stats.fallbacks) == {"too_many_seqs": 1}
        assert stats.decided.total() == 6
    assert found == pytest.approx(expected, rel=1e-5)
    compared = 0
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, rtol=1e-4, atol=1e-6)
        compared += 1
    assert compared >= 20


def test_afterwards_the_model_is_as_it_was():
    model = small_model().train()
    decoder = followed(model)
    with decoder.following():
        assert "forward" in refusals.decoder_of(model).__dict__
    decoder.give_back()
    assert {"forward", "layers"}.isdisjoint(refusals.decoder_of(model).__dict__)
    assert model.config._attn_implementation == "eager"


def test_batches_without_boundaries_run_with_the_models_own_attention():
    model = small_model().eval()
    batch = {**batch_of([20, 28]), "attention_mask": torch.ones(1, 48, dtype=torch.long)}
    expected = model(**batch).logits
    decoder = followed(model)
    with decoder.following(), torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, expected)
    assert decoder.graphed.stats().microbatches == 0


def test_evaluation_reads_the_boundaries_of_the_collator():
    model = small_model().eval()
    batch = batch_of([20, 28])
    expected = model(**batch).logits
    decoder = followed(model)
    cu = torch.tensor([0, 20, 48], dtype=torch.int32)
    collated = {**batch, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 28, "max_length_k": 28}
    with decoder.following(), torch.no_grad():
        torch.testing.assert_close(model(**collated).logits, expected)


def test_a_replay_that_is_switched_off_pads_as_the_graphs_do():
    model = small_model().train()
    plain = copy.deepcopy(model)
    decoder = followed(model, replay=False)
    seen = []
    decoder.graphed.module.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: seen.append(
            (args[0].shape[1], len(kwargs["cu_seq_lens_q"]), kwargs["max_length_q"])
        ),
        with_kwargs=True,
    )
    with decoder.following():
        for lengths in ([20, 22], [1] * 10, [10] * 4):
            loss = model(**with_boundaries(batch_of(lengths), lengths)).loss
            assert loss.item() == pytest.approx(plain(**batch_of(lengths)).loss.item(), rel=1e-5)
    assert seen == [(48, 4, 48), (48, 12, 38), (48, 7, 48)]


def test_layers_get_boundaries_and_lengths_as_their_kernels_need_them_to_read_nothing_back():
    model = small_model().train()
    decoder, seen = followed(model), []
    for layer in decoder.graphed.module.layers:
        layer.register_forward_pre_hook(lambda layer, args, kwargs: seen.append(kwargs), with_kwargs=True)
    with decoder.following():
        model(**with_boundaries(batch_of([20, 22]), [20, 22]))
    assert len(seen) == len(decoder.graphed.module.layers)
    for kwargs in seen:
        assert {type(kwargs[name]) for name in ("max_length_q", "max_length_k")} == {int}
        assert {kwargs[name].dtype for name in ("cu_seq_lens_q", "cu_seq_lens_k")} == {torch.int32}


def test_checkpoints_leave_random_states_alone_inside_a_capture(monkeypatch):
    model = small_model().train()
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    own, read = torch.get_rng_state, []
    monkeypatch.setattr(torch, "get_rng_state", lambda: read.append(1) or own())
    inner = refusals.decoder_of(model)
    with without_random_states(inner):
        model(**batch_of([20, 22]))
    assert read == []
    model(**batch_of([20, 22]))
    assert len(read) == len(inner.layers)


def test_a_model_that_changes_hidden_states_between_layers_is_refused():
    model = small_model().train()
    inner = refusals.decoder_of(model)
    own = type(inner).forward

    class Between(type(inner)):
        def forward(self, input_ids=None, **kwargs):
            hidden = self.embed_tokens(input_ids)
            for layer in self.layers[: self.config.num_hidden_layers]:
                hidden = layer(hidden, attention_mask=None) * 2
            return own(self, inputs_embeds=hidden)

    inner.__class__ = Between
    decoder = followed(model)
    with decoder.following(), pytest.raises(UsageError, match="changes hidden states between its decoder layers"):
        model(**with_boundaries(batch_of([48]), [48]))
