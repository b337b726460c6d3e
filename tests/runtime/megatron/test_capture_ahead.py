"""The call that shows captures what training's micro-batches are like, beside the one that a model makes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.analyze import analyze_dataset, make_plan  # noqa: E402
from thdprof.dispatch import Bucket  # noqa: E402
from thdprof.runtime.dispatched_module import DispatchedModule  # noqa: E402
from thdprof.runtime.megatron import packed_seq_params, rank_agreement  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder, rope_of  # noqa: E402
from thdprof.runtime.megatron.decoder.parts import takes_gradient  # noqa: E402
from thdprof.runtime.megatron.opening import (  # noqa: E402
    MetadataForm,
    Openings,
    why_not_ahead,
)

TOKENS, HIDDEN = 16, 8
BOUNDS = [0, 4, 16]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    where = tmp_path_factory.mktemp("data") / "packs.jsonl"
    where.write_text('{"lengths": [4, 12]}\n' * 8)
    return make_plan(analyze_dataset(where, loader="single", seq_length=TOKENS), impl="chunk")


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Lets tensors of the CPU stand for those of a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")


class Opened(DispatchedModule):
    """Remembers the calls for which it would capture, and runs nothing."""

    def __init__(self, decoder, **options):
        opened, said = [], []
        super().__init__(decoder, [Bucket(4, TOKENS, TOKENS)], sample_every=0, say=said.append, **options)
        self.opened, self.said = opened, said

    def _open(self, call):
        self.opened.append(call)
        self._stats.captures += 1

    def _replay(self, bucket, call):
        return call.tensors[0] * 1


def config(**changes) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, use_cpu_initialization=True, **changes
    )


def model_of(of_config, *, pre_process=True, position_embedding_type="rope") -> GPTModel:
    return GPTModel(
        config=of_config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=32,
        max_sequence_length=TOKENS,
        position_embedding_type=position_embedding_type,
        pre_process=pre_process,
        post_process=False,
    )


def attached(model, *, shards=1):
    decoder = Decoder(model.decoder, rope_of(model))
    run = Opened(decoder, token_shards=shards)
    decoder.attach(run, cp_size=1)
    return decoder, run


def scripts_params(**changes) -> PackedSeqParams:
    """As pretrain_gpt.py makes them."""
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    return PackedSeqParams(
        **{
            "qkv_format": "thd",
            "cu_seqlens_q": bounds,
            "cu_seqlens_kv": bounds,
            "max_seqlen_q": 12,
            "max_seqlen_kv": 12,
            "tokens_per_sample": TOKENS,
            **changes,
        }
    )


FORMS = [
    (MetadataForm(), lambda: packed_seq_params(BOUNDS, device="cpu")),
    (MetadataForm(padded=True), lambda: packed_seq_params(BOUNDS, cu_seqlens_padded=BOUNDS, device="cpu")),
    (MetadataForm(tokens_per_sample=TOKENS), scripts_params),
]


@pytest.mark.usefixtures("parallel_state", "on_a_gpu")
@pytest.mark.parametrize(("form", "params"), FORMS)
@pytest.mark.parametrize("position_embedding_type", ["rope", "learned_absolute"])
def test_the_call_before_training_is_the_one_that_gpt_model_makes(plan, form, params, position_embedding_type):
    of_config = config()
    model = model_of(of_config, position_embedding_type=position_embedding_type).train()
    decoder, run = attached(model)
    said: list[str] = []
    openings = Openings(plan, of_config, shards=1, form=form)
    openings.capture([(decoder, run, takes_gradient(model))], say=said.append)
    assert run.holds_graphs()
    (told,) = said
    assert told.startswith("captured 1 graph pairs in ")
    tokens = torch.arange(TOKENS)[None]
    output = model(tokens, tokens, None, packed_seq_params=params())
    assert output.shape == (TOKENS, 1, HIDDEN)
    assert len(run.opened) == 1, run.said
    assert run.stats().replays.total() == 1


@pytest.mark.usefixtures("parallel_state", "on_a_gpu")
def test_a_later_stage_gets_its_input_from_the_stage_before(plan):
    of_config = config(params_dtype=torch.float32, pipeline_dtype=torch.bfloat16)
    model = model_of(of_config, pre_process=False).train()
    decoder, run = attached(model, shards=2)
    openings = Openings(plan, of_config, shards=2, form=MetadataForm())
    openings.capture([(decoder, run, takes_gradient(model))], say=run.said.append)
    assert model.decoder.input_tensor is None  # as it was
    received = torch.zeros(TOKENS // 2, 1, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    model.set_input_tensor(received)
    model(None, None, None, packed_seq_params=packed_seq_params(BOUNDS, device="cpu"))
    assert len(run.opened) == 1, run.said


@pytest.mark.usefixtures("parallel_state", "on_a_gpu")
def test_another_form_than_was_expected_is_told(plan):
    of_config = config()
    model = model_of(of_config).train()
    decoder, run = attached(model)
    openings = Openings(plan, of_config, shards=1, form=MetadataForm())
    openings.capture([(decoder, run, True)], say=run.said.append)
    tokens = torch.arange(TOKENS)[None]
    model(tokens, tokens, None, packed_seq_params=scripts_params())
    assert len(run.opened) == 2
    assert "tokens_per_sample=16" in run.said[-1]
    assert run.stats().replays.total() == 1


@pytest.mark.usefixtures("parallel_state")
def test_a_frozen_embedding_gives_hidden_states_without_a_gradient():
    model = model_of(config())
    assert takes_gradient(model)
    model.embedding.requires_grad_(requires_grad=False)
    assert not takes_gradient(model)
    assert takes_gradient(SimpleNamespace(decoder=SimpleNamespace(pre_process=True)))


def test_residuals_in_float32_make_hidden_states_float32(plan):
    of_config = SimpleNamespace(
        fp32_residual_connection=True, params_dtype=torch.bfloat16, pipeline_dtype=None, hidden_size=HIDDEN
    )
    decoder = SimpleNamespace(block=SimpleNamespace(pre_process=True, parameters=nn.Linear(1, 1).parameters))
    made = Openings(plan, of_config, shards=2, form=MetadataForm()).hidden_states(decoder, takes_grad=False)
    assert (made.shape, made.dtype, made.requires_grad) == ((TOKENS // 2, 1, HIDDEN), torch.float32, False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"capture": "first_use"}, "graphs.capture is first_use"),
        ({"impl": "local"}, "Megatron makes its local graphs at the end of the first step"),
        ({"impl": "none", "buckets": []}, "the plan captures nothing"),
    ],
)
def test_plans_that_capture_later_say_why(plan, changes, reason):
    changed = plan.model_copy(update={"graphs": plan.graphs.model_copy(update=changes)})
    assert why_not_ahead(changed) == reason


def test_ranks_without_peers_decide_alone():
    agreed = rank_agreement.agree_over_groups([], torch.device("cpu"))
    assert agreed(True)
    assert not agreed(False)


@pytest.mark.usefixtures("parallel_state")
def test_a_capture_that_failed_on_any_rank_has_failed():
    group = torch.distributed.group.WORLD  # of this process; the reduction itself is Gloo's
    agreed = rank_agreement.agree_over_groups([group, group], torch.device("cpu"))
    assert [agreed(ok) for ok in (True, False, True)] == [True, False, True]
