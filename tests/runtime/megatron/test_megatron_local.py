"""Megatron's local graphs, led by a plan: its own managers and recording on a CPU, with replays that run eagerly."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import ClassVar

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig, cuda_graphs
from megatron.core.transformer.enums import CudaGraphModule, InferenceCudaGraphScope
from megatron.core.transformer.module import GraphableMegatronModule
from support.random_states import FakeGenerator
from torch import nn

from thdprof.dispatch import Shape
from thdprof.runtime import Bucket, FallbackReason
from thdprof.runtime.megatron import packed_seq_params, refusals
from thdprof.runtime.megatron.decoder.decoder import Decoder
from thdprof.runtime.megatron.install import runner_of
from thdprof.runtime.megatron.kinds import local

TOKENS, HIDDEN, LAYERS = 24, 8, 3
SMALL, WIDE, LARGE = Bucket(2, TOKENS, TOKENS), Bucket(4, TOKENS, TOKENS), Bucket(8, TOKENS, TOKENS)
BUCKETS = [SMALL, WIDE, LARGE]


def model_config(**changes) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": 2, "cuda_graph_impl": "local", **changes}
    )


class Layer(GraphableMegatronModule):
    """Uses everything that a layer is given, and keeps what it ran with."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.seen: list = []
        self.takes_grad: list[bool] = []

    def create_mcore_cudagraph_manager(self, config) -> None:
        alone = SimpleNamespace(pp=SimpleNamespace(size=lambda: 1))
        self.cudagraph_manager = cuda_graphs.CudaGraphManager(config, pg_collection=alone)

    def forward(self, hidden_states, attention_mask=None, rotary_pos_emb=None, packed_seq_params=None):
        self.seen.append(packed_seq_params)
        self.takes_grad.append(hidden_states.requires_grad)
        ends = packed_seq_params.cu_seqlens_q.long()
        document = torch.bucketize(torch.arange(len(hidden_states)), ends, right=True).reshape(-1, 1, 1)
        table = rotary_pos_emb if attention_mask is None else rotary_pos_emb + attention_mask
        return hidden_states * self.weight * document + table


class Block(Layer):
    """As TransformerBlock: it has a manager too, which only inference asks."""

    pre_process = True

    def __init__(self, config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([Layer(config) for _ in range(LAYERS)])

    def _should_call_local_cudagraph(self, *args, **kwargs) -> bool:
        return False

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        rotary_pos_emb=None,
        inference_context=None,
        packed_seq_params=None,
    ):
        for layer in self.layers:
            hidden_states = layer(
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packed_seq_params,
            )
            if isinstance(hidden_states, tuple):  # of a replay
                hidden_states = hidden_states[0]
        return hidden_states


class Run:
    """A decoder under LocalGraphs, and a step of training around it."""

    def __init__(self, buckets=BUCKETS, config=None, **options) -> None:
        self.table = torch.ones(TOKENS, 1, 1)  # one object for all micro-batches, as RotaryEmbedding caches it
        config = config or model_config()
        config.apply_rope_fusion = True  # whose own check wants Transformer Engine
        self.block = Block(config).train()
        self.decoder = Decoder(self.block, rope=lambda length: self.table[:length])
        self.graphs = local.LocalGraphs(self.decoder, buckets, sample_every=0, **options)
        self.decoder.attach(self.graphs, cp_size=1)

    def forward(self, *documents: int, mask: torch.Tensor | None = None, frozen: bool = False) -> torch.Tensor:
        bounds = torch.tensor([0, *documents]).cumsum(0).tolist()
        x = torch.arange(1.0, TOKENS * HIDDEN + 1).reshape(TOKENS, 1, HIDDEN).requires_grad_(not frozen)
        params = packed_seq_params(bounds, device="cpu")
        self.given = x
        return self.block(hidden_states=x, attention_mask=mask, rotary_pos_emb=self.table, packed_seq_params=params)

    def microbatch(self, *documents: int, mask: torch.Tensor | None = None, frozen: bool = False) -> torch.Tensor:
        out = self.forward(*documents, mask=mask, frozen=frozen)
        out.sum().backward()
        return out

    def entries(self) -> list[int]:
        """Documents in the boundaries of every call of the first layer; all layers saw the same ones."""
        seen = [[len(p.cu_seqlens_q) - 1 for p in layer.seen] for layer in self.block.layers]
        assert all(s == seen[0] for s in seen)
        for number in range(len(seen[0])):
            assert len({id(layer.seen[number].cu_seqlens_q) for layer in self.block.layers}) == 1
        return seen[0]

    def runners(self) -> int:
        return sum(len(layer.cudagraph_manager.cudagraph_runners) for layer in self.block.layers)

    def answers_left(self) -> list[str]:
        return [name for layer in self.block.modules() for name in vars(layer) if name == local.ASKED]


def of(count: int) -> tuple[int, ...]:
    """Lengths of so many documents that fill the tokens."""
    return (*[1] * (count - 1), TOKENS - count + 1)


class Graph(str):
    """Stands for a CUDA graph that Megatron has captured."""

    freed: ClassVar[list[str]] = []

    def reset(self) -> None:
        self.freed.append(str(self))


def create_graphs() -> None:
    """What `create_cudagraphs` does at the end of a step, but for the graphs; with its check of shared inputs."""
    record = cuda_graphs._CudagraphGlobalRecord
    open_inputs: dict[int, int] = {}
    for runner, kind, *recorded in record.cudagraph_record:
        if kind == "bwd":
            assert not any(open_inputs.values()), "fwd_buffer_reuse_ref_count is not 0 before a backward"
            runner.bwd_graph = Graph("backward")
            continue
        for meta in runner.get_arg_metas(*recorded[:2]):
            if (uses := meta.cg_buffer_metadata.input_use_count) > 1:
                open_inputs[id(meta.cg_buffer_metadata)] = open_inputs.get(id(meta.cg_buffer_metadata), uses) - 1
        runner.fwd_graph = Graph("forward")
        runner.cudagraph_created = True
    if record.cudagraph_record:
        record.cudagraph_created = True
    record.cudagraph_record = []
    record._disable_saved_tensors_observer()


@pytest.fixture(autouse=True)
def _megatron(monkeypatch):
    """Lets the managers be made, and dispatch choose, without a GPU; replays check their arguments and run eagerly."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_stream=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "default_generators", {None: FakeGenerator()})

    def replay(runner, is_first_microbatch, args, kwargs):
        assert runner.fwd_graph == "forward"
        assert not runner.get_mismatch_errors(args, kwargs)
        out = runner.func(*args, **kwargs)
        return (cuda_graphs._CudagraphRecordNode.apply(runner, out),)

    monkeypatch.setattr(cuda_graphs._CudaGraphRunner, "replay_graph_capture", replay)
    tensor_parallel.random.initialize_rng_tracker(use_cudagraphable_rng=True, force_reset=True)
    yield
    cuda_graphs.delete_cuda_graphs()
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)


def test_every_bucket_is_recorded_in_the_first_step_and_replays_after_it():
    run = Run()
    with run.graphs.stats().expect(replays=4):
        for count in (1, 2, 1, 3):
            run.microbatch(*of(count))
    assert run.entries() == [8, 2, 4, 4]  # the largest first, then the smallest ones left, then the smallest
    assert run.runners() == 3 * LAYERS
    create_graphs()
    with run.graphs.stats().expect(replays=3, fallbacks=1):
        for count in (2, 4, 8, 9):
            run.microbatch(*of(count))
    assert run.entries()[4:] == [2, 4, 8, 9]
    stats = run.graphs.stats()
    assert (stats.captures, stats.replays) == (3 * LAYERS, {SMALL: 4, WIDE: 2, LARGE: 1})
    assert stats.fallbacks == {FallbackReason.too_many_seqs: 1}
    assert run.runners() == 3 * LAYERS


def test_captures_are_counted_once_and_after_the_step():
    run = Run()
    run.microbatch(*of(1))
    assert run.graphs.stats().captures == 0
    create_graphs()
    assert run.graphs.stats().captures == LAYERS
    run.microbatch(*of(1))
    assert run.graphs.stats().captures == LAYERS


def test_a_bucket_that_was_not_recorded_is_never_asked_for(caplog):
    run = Run()
    run.microbatch(*of(8))
    run.microbatch(*of(8))
    create_graphs()
    with caplog.at_level(logging.WARNING), run.graphs.stats().expect(replays=2):
        run.microbatch(*of(1))
        run.microbatch(*of(3))
    assert run.entries() == [8, 8, 8, 8]
    assert caplog.messages == [
        "local graphs: the recording step met 1 of 3 buckets; micro-batches of the others (2, 4 documents) replay a "
        "larger one or run eagerly: give a step more micro-batches, or the plan fewer buckets"
    ]


def test_where_no_recorded_bucket_holds_it_a_micro_batch_runs_eagerly(caplog):
    short, long = Bucket(8, 8, TOKENS), Bucket(2, TOKENS, TOKENS)
    run = Run([short, long])
    run.microbatch(8, 8, 8)
    create_graphs()
    with caplog.at_level(logging.WARNING), run.graphs.stats().expect(fallbacks=1):
        run.microbatch(20, 4)
    assert run.graphs.stats().fallbacks == {FallbackReason.capture_failed: 1}
    assert run.entries() == [8, 2]
    assert caplog.messages[1].startswith("runs eagerly (capture_failed): ")


def test_numbers_are_those_of_a_model_without_graphs():
    steps = [(1, 5, 9, 2), (3, 8, 20, 1), (4, 1, 2, 9)]
    run, plain = Run(), Run.__new__(Run)
    plain.table, plain.block = run.table, Block(model_config(cuda_graph_impl="none")).train()
    compared = 0
    for step in steps:
        for count in step:
            assert torch.equal(run.microbatch(*of(count)), plain.microbatch(*of(count)))
            assert torch.equal(run.given.grad, plain.given.grad)  # which goes on to the embedding
            assert run.given.grad.any()
            compared += 1
        create_graphs()
    assert compared == 12
    assert run.graphs.stats().fallbacks == {FallbackReason.too_many_seqs: 3}
    for ours, theirs in zip(run.block.layers.parameters(), plain.block.layers.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
        assert ours.grad.any()


def test_behind_a_frozen_embedding_every_recorded_layer_has_an_input_that_takes_a_gradient():
    """Megatron's warm-up of a layer fails where no input of it takes one, and a replay is given what was recorded."""
    run = Run()
    for count in (1, 3):
        run.microbatch(*of(count), frozen=True)
    create_graphs()
    run.microbatch(*of(1), frozen=True)
    with torch.no_grad():
        run.forward(*of(1), frozen=True)
    run.microbatch(*of(9), frozen=True)  # which no bucket holds
    assert run.given.grad is None
    first, *others = (layer.takes_grad for layer in run.block.layers)
    assert first == [True, True, True, False, False]
    assert others == [[True, True, True, False, True]] * (LAYERS - 1)
    assert all(layer.weight.grad.any() for layer in run.block.layers)


@pytest.mark.parametrize("created", [False, True])
def test_evaluation_and_passes_without_gradients_go_past_the_managers(created):
    run = Run([LARGE])
    run.microbatch(*of(1))
    if created:
        create_graphs()
    run.block.eval()
    run.forward(*of(3))
    run.block.train()
    with torch.no_grad():
        run.forward(*of(4))
    assert run.entries() == [8, 3, 4]
    assert run.runners() == LAYERS
    assert run.graphs.stats().fallbacks == {FallbackReason.not_training: 2}
    assert run.answers_left() == []


def test_the_bypass_ends_with_the_pass_also_where_it_fails():
    run = Run([LARGE])
    run.block.layers[1].forward = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.forward(*of(9))
    assert run.answers_left() == []
    assert run.runners() == 0
    assert run.block.layers[0]._should_call_local_cudagraph()
    with run.graphs._past_managers():
        assert not any(layer._should_call_local_cudagraph() for layer in run.block.layers)
        assert vars(run.block).get(local.ASKED) is None


def test_a_second_micro_batch_before_the_first_ones_backward_runs_eagerly():
    run = Run([LARGE])
    for created in (False, True):
        first = run.forward(*of(2))
        run.microbatch(*of(3))  # would write over the first one's activations
        first.sum().backward()
        assert run.entries()[-2:] == [8, 3], created
        create_graphs()
    assert run.graphs.stats().fallbacks == {FallbackReason.no_free_slot: 2}
    assert run.runners() == LAYERS


def test_buckets_record_no_tensor_in_common():
    """The rotary table and a cached mask are one object for all micro-batches: `create_graphs` checks their uses."""
    run, mask = Run(), torch.zeros(TOKENS, 1, 1)
    for count in (1, 2, 3):
        run.microbatch(*of(count), mask=mask)
    create_graphs()
    assert run.graphs.stats().captures == 3 * LAYERS
    assert len(run.graphs._recorded) == 3


def test_random_states_that_a_checkpoint_replaced_are_refused_until_graphs_are_recorded_anew():
    tracker = [FakeGenerator()]
    run = Run(generators=lambda: tracker)
    for count in (1, 9, 1):
        run.microbatch(*of(count))
    create_graphs()
    run.microbatch(*of(1))
    tracker[0] = tracker[0].clone_state()
    with pytest.raises(RuntimeError, match="random state 1 of 2 was replaced"):
        run.forward(*of(1))
    run.graphs.recapture()
    run.microbatch(*of(1))


def test_closing_drops_the_graphs_and_keeps_the_layers_past_the_managers():
    run = Run()
    for count in (1, 9):
        run.microbatch(*of(count))
    create_graphs()
    Graph.freed.clear()
    run.graphs.close()
    assert sorted(Graph.freed) == sorted(["forward", "backward"] * LAYERS)  # whoever still refers to the runners
    assert run.runners() == 0
    assert run.answers_left() == ["_should_call_local_cudagraph"] * LAYERS  # they would record anew
    record = cuda_graphs._CudagraphGlobalRecord
    assert (record.cudagraph_created, record.cudagraph_record, record._saved_tensors_observer) == (False, [], None)
    assert cuda_graphs.CudaGraphManager.global_mempool is None
    assert run.graphs.pool_bytes() == 0
    run.microbatch(*of(1))  # past the managers still
    assert run.runners() == 0
    run.graphs.close()
    run.decoder.detach()
    local.LocalGraphs(Decoder(run.block), BUCKETS)  # installed anew
    assert run.answers_left() == []


def test_an_unpacked_micro_batch_goes_past_the_managers():
    """Their graphs do not know it, and Megatron would stop training."""
    run = Run()
    run.microbatch(*of(1))
    create_graphs()
    run.decoder._own_forward = lambda **given: [layer._should_call_local_cudagraph() for layer in run.block.layers]
    given = {"hidden_states": None, "attention_mask": None, "packed_seq_params": None}
    assert run.block(**given) == [False] * LAYERS
    assert run.answers_left() == []


def test_closing_while_the_first_step_is_recorded():
    run = Run()
    run.microbatch(*of(1))
    assert len(cuda_graphs._CudagraphGlobalRecord.cudagraph_record) == 2 * LAYERS
    run.graphs.close()
    assert cuda_graphs._CudagraphGlobalRecord.cudagraph_record == []
    assert run.runners() == 0


def test_recapture_records_anew():
    run = Run([LARGE])
    for times in (1, 2):
        run.microbatch(*of(1))
        assert len(cuda_graphs._CudagraphGlobalRecord.cudagraph_record) == 2 * LAYERS
        create_graphs()
        assert run.graphs.stats().captures == times * LAYERS
        run.graphs.recapture()
        assert cuda_graphs.CudaGraphManager.global_mempool is not None
        assert cuda_graphs._CudagraphGlobalRecord._saved_tensors_observer is not None


def test_memory_is_that_of_megatrons_pool(monkeypatch):
    run = Run()
    pool = cuda_graphs.CudaGraphManager.global_mempool
    segments = [
        {"total_size": 5, "segment_pool_id": pool, "device": 0},
        {"total_size": 7, "segment_pool_id": (0, 0), "device": 0},
        {"total_size": 11, "segment_pool_id": pool, "device": 1},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert run.graphs.pool_bytes() == 5


def test_only_one_bucket_replays_where_that_is_asked_for():
    run = Run()
    for count in (1, 1, 1):
        run.microbatch(*of(count))
    create_graphs()
    with run.graphs.only(WIDE):
        run.microbatch(*of(1))
    with run.graphs.only(None):
        run.microbatch(*of(1))
    assert run.entries() == [8, 2, 4, 4, 1]


def test_too_late_or_without_managers():
    plain = nn.Identity()
    with pytest.raises(refusals.SettingsError) as failure:
        local.LocalGraphs(Decoder(plain), BUCKETS)
    assert str(failure.value) == "no layer has a graph manager: build the model with cuda_graph_impl 'local'"
    run = Run()
    run.microbatch(*of(1))
    run.decoder.detach()
    for _ in range(2):  # recorded, then made
        with pytest.raises(refusals.SettingsError) as failure:
            local.LocalGraphs(Decoder(run.block), BUCKETS)
        assert str(failure.value) == "Megatron has recorded graphs already: install before the first training step"
        create_graphs()
        run.block = Block(model_config())


def test_install_chooses_it():
    plan = SimpleNamespace(
        graphs=SimpleNamespace(impl="local", capture="startup"),
        captured=[WIDE],
        training=SimpleNamespace(data_parallel_size=1, experts="none"),
    )
    config = model_config()
    run = runner_of(Decoder(Block(config)), plan, config, slots=1, common={"overflow": "eager"})
    assert isinstance(run, local.LocalGraphs)
    assert run._buckets == (WIDE,)


def test_what_is_recorded_follows_from_the_shapes(rng):
    """As many micro-batches as buckets record all of them, if each holds them; none takes one that is too small."""
    small = Shape(1, 1, TOKENS)
    for number in range(1, 6):
        buckets = tuple(Bucket(2**i, TOKENS, TOKENS) for i in range(number))
        recorded: list[Bucket] = []
        for _ in buckets:
            recorded.append(local.bucket_to_record(small, buckets, recorded))
        assert recorded == [buckets[-1], *buckets[:-1]]
        assert local.bucket_to_record(small, buckets, recorded) == buckets[0]
    tried = 0
    for _ in range(2000):
        drawn = {Bucket(int(rng.integers(1, 9)), int(rng.integers(1, 9)), 8) for _ in range(rng.integers(1, 5))}
        buckets, recorded = tuple(sorted(drawn)), []
        for _ in range(rng.integers(1, 7)):
            shape = Shape(int(rng.integers(1, 9)), int(rng.integers(1, 9)), 8)
            holding = [b for b in buckets if shape.n_seqs <= b.max_seqs and shape.max_seqlen <= b.max_seqlen]
            if not holding:
                continue
            taken = local.bucket_to_record(shape, buckets, recorded)
            assert taken in holding
            assert taken not in recorded or set(holding) <= set(recorded)
            if not recorded:
                assert taken == holding[-1]
            recorded.append(taken)
            found = local.recorded_bucket(holding[0], shape, recorded)
            assert found == next(b for b in holding if b in recorded)
            tried += 1
    assert tried > 1000


def a_plan(**changes):
    return SimpleNamespace(
        training=SimpleNamespace(
            **{
                "pipeline_parallel_size": 1,
                "virtual_pipeline_size": None,
                "microbatch_group": 1,
                "context_parallel_size": 1,
                "data_parallel_size": 1,
                "max_seqlen_per_dp_cp_rank": None,
                "packer": "first_fit_decreasing",
                "has_dynamic_cp": False,
                "experts": "none",
                **changes,
            }
        ),
        graphs=SimpleNamespace(
            impl="local",
            modules=[],
            buckets=[],
            slots=[[1]] * changes.get("pipeline_parallel_size", 1),
            no_grad="eager",
            offload=None,
            layers_per_graph=None,
            expert_room=None,
        ),
    )


REFUSED = {
    "pipeline_model_parallel_size": (
        2,
        "pipeline_model_parallel_size is 2: Megatron's layer graphs then take turns by micro-batch, and one that runs "
        "eagerly would let them overwrite each other; set graphs.impl to chunk",
    ),
    "expert_model_parallel_size": (
        4,
        "expert_model_parallel_size is 4: ranks that share experts may record other buckets, and making graphs "
        "communicates; set graphs.impl to chunk",
    ),
    "expert_tensor_parallel_size": (
        2,
        "expert_tensor_parallel_size is 2, tensor_model_parallel_size 1: ranks that share experts may record other "
        "buckets; set graphs.impl to chunk",
    ),
    "cuda_graph_modules": (
        [CudaGraphModule.attn],
        "cuda_graph_modules is ['attn']: only graphs of whole layers are led; set it to []",
    ),
    "inference_cuda_graph_scope": (
        InferenceCudaGraphScope.block,
        "inference_cuda_graph_scope is 'block': layers have no graphs of their own then; set it to 'layer'",
    ),
    "mtp_num_layers": (
        1,
        "mtp_num_layers is 1: the layers of multi-token prediction have graphs too, and take boundaries that are not "
        "padded; set graphs.impl to chunk",
    ),
    "gtp_weight_remat_size": (
        2,
        "gtp_weight_remat_size is 2: weights are gathered and their gradients given back by Python between the layers' "
        "passes, which a replay does not run; set tensor_parallel_num_weight_shards to tensor_model_parallel_size",
    ),
    "cuda_graph_impl": ("none", "cuda_graph_impl is 'none', graphs.impl local needs 'local'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_word_for_word(name):
    value, text = REFUSED[name]
    config = model_config()
    config.apply_rope_fusion = True
    refusals.check(config, a_plan(), refusals.Facts(num_chunks=1), {})
    setattr(config, name, value)
    plan = a_plan(pipeline_parallel_size=config.pipeline_model_parallel_size)
    with pytest.raises(refusals.SettingsError) as failure:
        refusals.check(config, plan, refusals.Facts(num_chunks=1), {})
    assert str(failure.value) == f"thdprof cannot install graphs:\n- {text}"


FACTS = {
    "wrapper": ("", "the model is not wrapped: Megatron's graphs add to main_grad; wrap it in DistributedDataParallel"),
    "graph_safe_rng": (
        False,
        "the RNG tracker's states cannot be registered with a graph: call model_parallel_cuda_manual_seed(..., "
        "te_rng_tracker=True), or --te-rng-tracker",
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_refused_facts_word_for_word(name):
    value, text = FACTS[name]
    config = model_config()
    config.apply_rope_fusion = True
    with pytest.raises(refusals.SettingsError) as failure:
        refusals.check(config, a_plan(), refusals.Facts(num_chunks=1, **{name: value}), {})
    assert str(failure.value) == f"thdprof cannot install graphs:\n- {text}"


def test_the_rules_are_of_local_graphs_alone():
    config = model_config(cuda_graph_impl="none")
    config.apply_rope_fusion, config.mtp_num_layers, config.expert_model_parallel_size = True, 1, 4
    plan = a_plan()
    plan.graphs.impl, plan.graphs.capture = "chunk", "startup"
    plan.microbatches = SimpleNamespace(n_tokens_constant=True)
    refusals.check(config, plan, refusals.Facts(num_chunks=1, wrapper=""), {})


def test_megatron_itself_refuses_an_rng_that_graphs_cannot_replay():
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    with pytest.raises(AssertionError, match="RNG tracker does not support cudagraphs!"):
        Block(model_config())
