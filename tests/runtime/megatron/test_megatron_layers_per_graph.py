"""`graphs.layers_per_graph`: chunk graphs in groups of layers, between which Megatron gathers and reduces."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from support import recorded_graphs  # noqa: E402
from support.recorded_graphs import RecordedGraph  # noqa: E402
from support.refusals import FACTS, complaints, config  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.analyze import analyze_dataset, make_plan  # noqa: E402
from thdprof.dispatch import Bucket  # noqa: E402
from thdprof.plan import OffloadPart  # noqa: E402
from thdprof.runtime import graphed  # noqa: E402
from thdprof.runtime.megatron import decoder_surroundings  # noqa: E402
from thdprof.runtime.megatron.decoder import packed_seq_params  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder  # noqa: E402
from thdprof.runtime.megatron.install import runner_of  # noqa: E402
from thdprof.runtime.megatron.kinds import chunk  # noqa: E402
from thdprof.runtime.megatron.kinds.chunk import layer_groups  # noqa: E402
from thdprof.runtime.megatron.refusals import SettingsError  # noqa: E402

TOKENS, HIDDEN, LAYERS = 8, 4, 4
BUCKET = Bucket(max_seqs=4, max_seqlen=TOKENS, n_tokens=TOKENS)


class Layer(nn.Module):
    """Returns what a TransformerLayer returns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, *, hidden_states, packed_seq_params):
        last = packed_seq_params.cu_seqlens_q[-1]
        return hidden_states + torch.tanh(self.linear(hidden_states)) * last, None


class Block(nn.Module):
    """Runs its layers and its norm as a TransformerBlock does."""

    def __init__(self, num_layers=LAYERS, *, pre_process=True):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))
        self.final_layernorm = nn.LayerNorm(HIDDEN)
        self.pre_process, self.input_tensor = pre_process, None

    def forward(self, hidden_states, attention_mask, *, packed_seq_params):
        if not self.pre_process:
            hidden_states = self.input_tensor
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states=hidden_states, packed_seq_params=packed_seq_params)
        return self.final_layernorm(hidden_states)


class DataParallel:
    """Hangs the hooks of megatron-core's DistributedDataParallel on a block, over one bucket a layer, and logs what
    the buckets would communicate beside the replays of graphs.
    """

    def __init__(self, block):
        from megatron.core.distributed import distributed_data_parallel as ddp

        self.log, self.nodes = [], []
        self.reduced_after = {}
        ours = SimpleNamespace(
            use_forward_hook=True,
            param_to_bucket_group={},
            ddp_config=SimpleNamespace(align_param_gather=False, overlap_grad_reduce=True),
            overlap_param_gather_with_optimizer_step=False,
            force_all_reduce=False,
            _finish_param_sync_for_bucket_group=lambda group: group.finish_param_sync(),  # called from 0.20 on
        )
        for name, part in [*((f"layer {n}", layer) for n, layer in enumerate(block.layers)), ("norm", block)]:
            for parameter in part.parameters():
                ours.param_to_bucket_group.setdefault(parameter, self._group(name))
        for parameter in block.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
            parameter.grad_added_to_main_grad = False
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
            node.register_hook(ddp.DistributedDataParallel._make_backward_post_hook(ours, parameter))
            self.nodes.append(node)
        hook = ddp.DistributedDataParallel._make_forward_pre_hook(ours)
        for module in block.modules():
            module.register_forward_pre_hook(hook)

    def _group(self, name):
        def ready(parameter, force_all_reduce):
            assert parameter._cudagraph_wgrad_ready_event.recorded
            self._note(f"reduce {name}")
            parameter.main_grad.mul_(0.5)  # in place, as with a rank whose gradients are zeros

        return SimpleNamespace(finish_param_sync=lambda **_: self._note(f"gather {name}"), register_grad_ready=ready)

    def _note(self, what):
        if self.log[-1:] != [what]:
            self.log.append(what)

    def watch(self, graphs):
        for number, graph in enumerate(graphs):
            replay = graph.replay
            graph.replay = lambda replay=replay, number=number: (self._note(f"graph {number}"), replay())


class Event:
    """An event that says whether it was recorded."""

    recorded = False

    def record(self, stream=None):
        self.recorded = True


@pytest.fixture
def plan(tmp_path):
    rows = "".join(f'{{"lengths": [{4 * (1 + i % 3)}, 4]}}\n' for i in range(64))
    (tmp_path / "packs.jsonl").write_text(rows)
    return make_plan(analyze_dataset(tmp_path / "packs.jsonl", loader="single", seq_length=16), impl="chunk")


@pytest.fixture
def on_a_cpu(monkeypatch):
    recorded_graphs.put_in_place(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(chunk, "generators", tuple)
    monkeypatch.setattr(decoder_surroundings, "expert_metrics", tuple)


def attached(block, layers_per_graph, **options):
    decoder = Decoder(block)
    run = chunk.ChunkGraphs(
        decoder,
        [BUCKET],
        layers_per_graph=layers_per_graph,
        sample_every=0,
        surroundings=decoder_surroundings.surround_decoder(block),
        **options,
    )
    decoder.attach(run, cp_size=1)
    return run


def call(block, seed=0):
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(TOKENS, 1, HIDDEN)).astype(np.float32))
    x.requires_grad_()
    params = packed_seq_params.packed_seq_params([0, 3, TOKENS], device="cpu")
    if block.pre_process:
        return x, block(hidden_states=x, attention_mask=None, packed_seq_params=params)
    block.input_tensor = x
    return x, block(hidden_states=None, attention_mask=None, packed_seq_params=params)


@pytest.mark.usefixtures("on_a_cpu")
def test_a_group_waits_for_its_own_parameters_and_reduces_when_its_backward_is_queued():
    block = Block()
    parallel = DataParallel(block)
    run = attached(block, 2)
    call(block)[1].sum().backward()
    parallel.watch(RecordedGraph.made)
    parallel.log.clear()
    _, y = call(block, 1)
    assert parallel.log == ["gather layer 0", "gather layer 1", "graph 0", "gather layer 2", "gather layer 3",
                            "gather norm", "graph 1"]  # fmt: skip
    parallel.log.clear()
    y.sum().backward()
    first, second = parallel.log.index("graph 2"), parallel.log.index("graph 3")
    assert first == 0
    assert set(parallel.log[1:second]) == {"reduce norm", "reduce layer 3", "reduce layer 2"}
    assert set(parallel.log[second + 1 :]) == {"reduce layer 1", "reduce layer 0"}
    assert run.stats().replays[BUCKET] == 2


@pytest.mark.usefixtures("on_a_cpu")
def test_a_whole_chunk_gathers_before_and_reduces_after_everything():
    block = Block()
    parallel = DataParallel(block)
    attached(block, None)
    call(block)[1].sum().backward()
    parallel.watch(RecordedGraph.made)
    parallel.log.clear()
    _, y = call(block, 1)
    y.sum().backward()
    forward, backward = parallel.log.index("graph 0"), parallel.log.index("graph 1")
    assert all(what.startswith("gather") for what in parallel.log[:forward])
    assert forward == LAYERS + 1
    assert backward == forward + 1
    assert len(set(parallel.log[backward + 1 :])) == LAYERS + 1


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("layers_per_graph", [1, 2, None])
def test_verified_groups_gather_and_reduce_as_others_do(monkeypatch, caplog, layers_per_graph, exact):
    """Eager passes start no reduction and no gathering, and gradients are compared as they were before theirs."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: exact)
    logs, sums = [], []
    for every in (0, 1):
        block = Block()
        parallel = DataParallel(block)
        run = attached(block, layers_per_graph, verify_every=every)
        call(block)[1].square().sum().backward()
        for seed in range(1, 4):
            call(block, seed)[1].square().sum().backward()
        run.stats()
        assert run.stats().replays[BUCKET] == 4
        assert run.stats().verified.total() == 4 * every
        assert not run.stats().mismatches
        logs.append(parallel.log)
        sums.append([p.main_grad for p in block.parameters()])
        run.close()
    assert logs[0] == logs[1]
    assert sum(line.startswith("reduce") for line in logs[0]) >= 4 * (LAYERS + 1)
    for without, watched in zip(*sums, strict=True):
        assert torch.equal(without, watched)
    assert not caplog.records


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("pre_process", [True, False])
@pytest.mark.parametrize("layers_per_graph", [1, 2, 3, LAYERS, 100, None])
def test_groups_give_the_numbers_of_the_block(layers_per_graph, pre_process):
    results = []
    for block in (Block(pre_process=pre_process), Block(pre_process=pre_process)):
        for parameter in block.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        run = attached(block, layers_per_graph) if not results else None
        found = []
        for seed in range(3):
            x, y = call(block, seed)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        if run is not None:
            assert run.stats().replays[BUCKET] == 3
            run.close()
            assert not any("_cudagraph_wgrad_ready_event" in vars(p) for p in block.parameters())
        results.append([*found, *(p.main_grad if run is not None else p.grad for p in block.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    pieces = 1 if layers_per_graph is None else -(-LAYERS // layers_per_graph)
    assert len(RecordedGraph.made) == 2 * pieces


def test_every_module_of_the_decoder_is_in_one_group():
    block = Block(5)
    groups = layer_groups(block, 2)
    assert groups.cuts == (block.layers[2], block.layers[4])
    together = [part for group in groups.parts for part in group]
    assert len(together) == len(set(together)) == len(list(block.modules()))
    assert block.final_layernorm in groups.parts[-1]
    assert block.layers[1].linear in groups.parts[0]


def test_layers_of_two_graphs_that_share_a_parameter_are_refused():
    block = Block(4)
    block.layers[2].linear.weight = block.layers[0].linear.weight
    with pytest.raises(SettingsError, match=r"layers_per_graph is 1.*share a parameter.*set it to null"):
        layer_groups(block, 1)
    with pytest.raises(SettingsError, match="share a parameter"):
        layer_groups(block, 2)
    layer_groups(block, 3)
    layer_groups(block, 4)


def planned(plan, **graphs):
    return plan.model_copy(update={"graphs": plan.graphs.model_copy(update=graphs)})


REFUSED = [
    (
        {"impl": "local"},
        {"cuda_graph_impl": "local"},
        "graphs.layers_per_graph is 2 with graphs.impl local: only the graphs of a whole model chunk can be cut "
        "between layers; set graphs.layers_per_graph to null",
    ),
    (
        {"offload": OffloadPart()},
        {},
        "graphs.layers_per_graph is 2 with graphs.offload: copies to the host begin in one graph and end in another "
        "one; set graphs.layers_per_graph to null, or graphs.offload to null",
    ),
]


@pytest.mark.parametrize(("graphs", "changes", "line"), REFUSED)
def test_what_groups_of_layers_cannot_serve_is_refused(plan, graphs, changes, line):
    found = complaints(planned(plan, layers_per_graph=2, **graphs), changes)
    assert f"- {line}" in found
    assert not any("layers_per_graph" in said for said in complaints(planned(plan, **graphs), changes))
    assert complaints(planned(plan, layers_per_graph=2)) == []
    assert (
        complaints(planned(plan, layers_per_graph=2, offload=OffloadPart()), facts=replace(FACTS, replay=False)) == []
    )


def test_a_wrapped_torch_module_has_no_layers_to_group(plan):
    with pytest.raises(ValueError, match=r"layers_per_graph is 2: only thdprof\.runtime\.megatron\.install"):
        graphed(nn.Linear(2, 2), planned(plan, layers_per_graph=2, impl="module"))


def test_the_plan_decides_the_groups(plan):
    block = Block()
    run = runner_of(Decoder(block), planned(plan, layers_per_graph=3), config(), slots=1, common={"sample_every": 0})
    assert run._options.cuts == (block.layers[3],)


@pytest.mark.parametrize(
    ("changes", "graphs", "common", "why"),
    [
        ({}, {}, {}, ""),
        ({"tensor_model_parallel_size": 2}, {}, {"agreed": lambda succeeded: succeeded}, ""),
        ({"tensor_model_parallel_size": 2}, {}, {}, "ranks communicate inside the module, and have no way to agree"),
        ({}, {"layers_per_graph": 3}, {}, ""),
    ],
)
def test_what_cannot_be_verified_is_said(plan, caplog, changes, graphs, common, why):
    given = config(**changes)
    runner_of(Decoder(Block()), planned(plan, **graphs), given, slots=1, common=common, verify_every=4)
    said = [line for line in caplog.messages if "no micro-batch is verified" in line]
    assert len(said) == bool(why)
    assert all(why in line for line in said)
