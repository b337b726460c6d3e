"""What thdprof.runtime.megatron decides before and around graphs, with the real megatron-core, on a CPU."""

from __future__ import annotations

import inspect
import re
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from support.refusals import config  # noqa: E402
from torch import nn  # noqa: E402

from thdprof.dispatch import Bucket, FallbackReason  # noqa: E402
from thdprof.runtime import calibrate  # noqa: E402
from thdprof.runtime.dispatched_module import DispatchedModule  # noqa: E402
from thdprof.runtime.graphs.failed_captures import WarmupError, refuse_half_a_pass  # noqa: E402
from thdprof.runtime.graphs.graphed_module import GraphedModule, ReplayPass  # noqa: E402
from thdprof.runtime.megatron import decoder_surroundings, refusals  # noqa: E402
from thdprof.runtime.megatron.decoder import packed_seq_params  # noqa: E402
from thdprof.runtime.megatron.decoder.decoder import Decoder, find_unknown_arguments  # noqa: E402
from thdprof.runtime.megatron.decoder_costs import PackedDecoder  # noqa: E402
from thdprof.runtime.megatron.kinds import chunk  # noqa: E402
from thdprof.runtime.megatron.rank_agreement import Decisions  # noqa: E402
from thdprof.runtime.options import Surroundings  # noqa: E402
from thdprof.runtime.padding import Boundaries, boundaries_of, pack, to_device  # noqa: E402

# --- metadata -------------------------------------------------------------------------------------------------------


def test_packed_seq_params_keep_their_boundaries_on_the_host():
    made = packed_seq_params.packed_seq_params([0, 3, 7], cu_seqlens_padded=[0, 4, 8], device="cpu")
    assert made.qkv_format == "thd"
    assert made.cu_seqlens_q.tolist() == made.cu_seqlens_kv.tolist() == [0, 3, 7]
    assert made.cu_seqlens_q_padded.tolist() == [0, 4, 8]
    assert made.cu_seqlens_q.dtype == torch.int32
    assert (made.max_seqlen_q, made.max_seqlen_kv) == (4, 4)
    read = packed_seq_params.read(made, cp_size=2, tail="none")
    assert isinstance(read.host, np.ndarray)
    assert read.host.tolist() == [0, 3, 7]
    assert read.host_padded.tolist() == [0, 4, 8]
    assert (read.max_seqlen, read.cp_size) == (4, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cu_seqlens_padded": [0, 8]}, "cu_seqlens has 3 entries and cu_seqlens_padded 2"),
        ({"cu_seqlens_padded": [0, 2, 8]}, "document 0 has more tokens in cu_seqlens than in cu_seqlens_padded"),
        (
            {"cu_seqlens_padded": [0, 4, 9], "pad_between_seqs": False},
            "pad_between_seqs is False, but cu_seqlens and cu_seqlens_padded differ",
        ),
        ({"max_seqlen": 5.5}, "max_seqlen 5.5: must be a whole number"),
        ({"max_seqlen": 4}, "max_seqlen 4 is less than the longest document, 5"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        packed_seq_params.packed_seq_params([0, 3, 8], device="cpu", **given)


def test_other_packed_seq_params_are_read_by_their_shape():
    bounds = torch.tensor([[0, 3, 8]], dtype=torch.int32)  # as flatten_batch_for_packed_sequences leaves them
    made = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=5, max_seqlen_kv=5)
    read = packed_seq_params.read(made, cp_size=1, tail="none")
    assert read.host is None
    assert len(read.cu_seqlens) == 3
    made.cu_seqlens_kv = bounds[:, :2]
    with pytest.raises(TypeError, match="cu_seqlens_q and cu_seqlens_kv differ"):
        packed_seq_params.read(made, cp_size=1, tail="none")


def test_a_missing_max_seqlen_is_named():
    bounds = torch.tensor([0, 8], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"PackedSeqParams\.max_seqlen_q is None"):
        packed_seq_params.read(
            PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds), cp_size=1, tail="none"
        )


def test_a_tail_needs_padding_between_documents():
    made = packed_seq_params.packed_seq_params([0, 4], cu_seqlens_padded=[0, 4], pad_between_seqs=False, device="cpu")
    with pytest.raises(ValueError, match="the tail policy append_dummy_seq adds padding: set it to True"):
        packed_seq_params.read(made, cp_size=1, tail="append_dummy_seq")


def test_unchanged_metadata_is_what_the_model_gave():
    """So that an eager fallback sees fields that graphs do not have, such as seq_idx."""
    like = packed_seq_params.packed_seq_params([0, 3, 8], device="cpu")
    like.seq_idx = torch.zeros(1, 8, dtype=torch.int32)
    read = packed_seq_params.read(like, cp_size=1, tail="none")
    boundaries = boundaries_of(read, 8, "none")
    assert packed_seq_params.write(to_device(read, boundaries, 8, torch.device("cpu")), like) is like
    tailed = boundaries_of(read, 10, "append_dummy_seq")
    made = packed_seq_params.write(to_device(read, tailed, 10, torch.device("cpu")), like)
    assert made.cu_seqlens_q.tolist() == [0, 3, 8, 10]
    assert like.cu_seqlens_q.tolist() == [0, 3, 8]


def test_written_metadata_keeps_what_the_model_gave():
    like = packed_seq_params.packed_seq_params([0, 3, 7], cu_seqlens_padded=[0, 4, 8], device="cpu")
    like.tokens_per_sample = 8
    padded = replace(packed_seq_params.read(like, cp_size=1, tail="none"), max_seqlen=8)  # as a bucket's
    made = packed_seq_params.write(padded, like)
    assert (made.qkv_format, made.tokens_per_sample, made.pad_between_seqs) == ("thd", 8, True)
    assert made.seq_idx is None  # never derived from boundaries inside a graph
    assert packed_seq_params.constants(
        like
    ) == "qkv_format=thd local_cp_size=None cp_group=None tokens_per_sample=8 " + ("pad_between_seqs=True")


# --- the decoder ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Has of a TransformerBlock what the decoder needs."""

    def __init__(self, *, pre_process: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.pre_process, self.input_tensor = pre_process, None
        self.seen: list = []

    def forward(self, hidden_states, attention_mask, inference_context=None, rotary_pos_emb=None, *, packed_seq_params):
        given = hidden_states if self.pre_process else self.input_tensor
        self.seen.append((packed_seq_params, rotary_pos_emb))
        return self.linear(given)


class Recorder(DispatchedModule):
    """Dispatches nothing: there is no GPU."""


def attached(block, **kwargs):
    rope_lengths: list[int] = []

    def rope(length: int):
        rope_lengths.append(length)
        return torch.zeros(length, 1, 1, 4)

    decoder = Decoder(block, rope)
    run = Recorder(decoder, [Bucket(max_seqs=4, max_seqlen=8, n_tokens=8)], token_shards=kwargs.pop("token_shards", 1))
    decoder.attach(run, **{"cp_size": 1, **kwargs})
    return decoder, run, rope_lengths


def packed(bounds=(0, 3, 8)):
    return packed_seq_params.packed_seq_params(list(bounds), device="cpu")


def test_a_packed_micro_batch_goes_through_the_dispatch_and_an_unpacked_one_past_it():
    block = Block()
    decoder, run, lengths = attached(block)
    x = torch.randn(8, 1, 2)
    expected = block.linear(x)
    found = block(hidden_states=x, attention_mask=None, rotary_pos_emb=torch.ones(5), packed_seq_params=packed())
    assert torch.equal(found, expected)
    assert run.stats().fallbacks == {FallbackReason.no_cuda: 1}
    assert lengths == [8]  # the whole buffer, although the longest document has 5 tokens
    assert block.seen[-1][1].shape[0] == 8
    block(hidden_states=x, attention_mask=None, packed_seq_params=None)
    block(hidden_states=x, attention_mask=None, inference_context=object(), packed_seq_params=packed())
    assert run.stats().microbatches == 1
    assert list(block.state_dict()) == ["linear.weight", "linear.bias"]  # as without thdprof
    decoder.detach()
    assert "forward" not in vars(block)
    block(hidden_states=x, attention_mask=None, packed_seq_params=packed())
    assert run.stats().microbatches == 1


def test_a_later_pipeline_stage_gives_its_input_as_an_argument():
    block = Block(pre_process=False)
    _, run, _ = attached(block, token_shards=2)
    block.input_tensor = received = torch.randn(4, 1, 2, requires_grad=True)
    block(hidden_states=None, attention_mask=None, packed_seq_params=packed()).sum().backward()
    assert received.grad is not None
    assert block.input_tensor is received
    (params, _), *_ = block.seen
    assert params.cu_seqlens_q.tolist() == [0, 3, 8]  # 8 tokens, of which this rank has 4
    assert run.stats().microbatches == 1


def test_the_decoders_mode_is_that_of_its_block():
    block = Block()
    decoder, _, _ = attached(block)
    block.eval()
    assert not decoder.training
    block.train()
    assert decoder.training


def test_a_second_installation_is_refused():
    block = Block()
    first, _, _ = attached(block)
    with pytest.raises(
        refusals.SettingsError, match="the forward of Block is replaced already: close the installation"
    ):
        Decoder(block)
    first.detach()
    Decoder(block)


def test_rotary_tables_are_kept_for_buckets_alone():
    block = Block()
    decoder, _, lengths = attached(block)
    for tokens in (8, 6, 8, 7, 6):
        block(
            hidden_states=torch.randn(tokens, 1, 2),
            attention_mask=None,
            rotary_pos_emb=torch.ones(5),
            packed_seq_params=packed((0, tokens)),
        )
    assert lengths == [8, 6, 7, 6]
    assert list(decoder._kept) == [8]


def test_the_scale_of_auxiliary_losses_has_its_memory_before_a_capture(monkeypatch):
    """A first backward before Megatron's schedule would make it a number, into which the schedule cannot copy."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    decoder_surroundings.prepare_experts(config(), torch.device("cpu"))
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is None  # no experts
    decoder_surroundings.prepare_experts(SimpleNamespace(num_moe_experts=4), torch.device("cpu"))
    baked = MoEAuxLossAutoScaler.main_loss_backward_scale
    output, loss = torch.ones(2, requires_grad=True), torch.ones((), requires_grad=True)
    MoEAuxLossAutoScaler.apply(output, loss).sum().backward()  # as a warm-up
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) * 0.5)  # as the schedule
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is baked
    assert baked.tolist() == [0.5]


def test_closing_takes_the_gradient_event_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda *_: None))
    block = Block()
    run = chunk.ChunkGraphs(Decoder(block), [], surroundings=decoder_surroundings.surround_decoder(block))
    run._surroundings.on_backward()
    assert all(hasattr(p, "_cudagraph_wgrad_ready_event") for p in block.parameters())
    run.close()
    assert not any(hasattr(p, "_cudagraph_wgrad_ready_event") for p in block.parameters())


def test_hooks_that_a_replay_would_not_run_are_found():
    block = Block()
    assert decoder_surroundings.foreign_hooks(block) == ()
    block.linear.register_forward_pre_hook(lambda module, given: None)
    assert decoder_surroundings.foreign_hooks(block) == ("linear",)


def test_parameter_gathering_hooks_run_before_a_replay():
    from megatron.core.distributed import distributed_data_parallel as ddp

    block, called = Block(), []
    wrapped = SimpleNamespace(use_forward_hook=True, param_to_bucket_group={})
    hook = ddp.DistributedDataParallel._make_forward_pre_hook(wrapped)
    for module in block.modules():
        module.register_forward_pre_hook(hook)
    assert decoder_surroundings.foreign_hooks(block) == ()  # megatron-core's own
    group = SimpleNamespace(finish_param_sync=lambda **kwargs: called.append("gathered"))
    wrapped.param_to_bucket_group = dict.fromkeys(block.parameters(), group)
    wrapped.ddp_config = SimpleNamespace(align_param_gather=False)
    wrapped.overlap_param_gather_with_optimizer_step = False
    wrapped._finish_param_sync_for_bucket_group = lambda group: group.finish_param_sync()  # called from 0.20 on
    decoder_surroundings.gather_parameters(block)
    assert called == ["gathered"] * 2


# --- gradients --------------------------------------------------------------------------------------------------------


class FakeLease:
    """A lease whose graph doubles its input."""

    def __init__(self) -> None:
        self.captured = SimpleNamespace(input_grads=(None,), differentiable=(True,))
        self.order: deque[str] = deque()

    def forward(self, tensors, boundaries):
        return (tensors[0] * 2,)

    def backward(self, grads):
        self.order.append("replayed")
        return [grads[0] * 2]


def test_hooks_on_gradient_accumulation_run_after_the_replay():
    """As megatron-core's DistributedDataParallel hangs its reduction there; no gradient is added a second time."""
    parameter = nn.Parameter(torch.ones(3))
    lease = FakeLease()
    node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    node.register_hook(lambda *unused: lease.order.append(f"hook sees {parameter.grad}"))
    x = torch.ones(4, requires_grad=True)
    anchor = torch.zeros((), requires_grad=True)
    (y,) = ReplayPass.apply(lease, Boundaries(valid=np.array([0, 4], np.int32)), anchor, x, parameter)
    y.sum().backward()
    assert list(lease.order) == ["replayed", "hook sees None"]
    assert x.grad.tolist() == [2.0] * 4


def test_ranks_that_decide_alike_have_equal_digests():
    bucket, other = Bucket(max_seqs=4, max_seqlen=8, n_tokens=8), Bucket(max_seqs=2, max_seqlen=8, n_tokens=8)
    made = []
    for choices in (
        [bucket, FallbackReason.too_many_seqs, bucket],
        [bucket, FallbackReason.too_many_seqs, bucket],
        [FallbackReason.too_many_seqs, bucket, bucket],
        [bucket, FallbackReason.document_too_long, bucket],
        [other, FallbackReason.too_many_seqs, bucket],
    ):
        decisions = Decisions(1, enabled=False)
        record = decisions.recorder(0)
        for choice in choices:
            record(choice)
        made.append(decisions.digests[0])
        decisions.check()  # nothing without debug
    assert made[0] == made[1]
    assert len(set(made)) == 4


def test_a_moved_main_grad_is_noticed():
    """As after DistributedDataParallel.offload_grad_buffers and restore_grad_buffers: the same tensor, elsewhere."""
    from thdprof.runtime.graphs.module_state import GradientBuffers

    storage = torch.zeros(4)
    parameter = nn.Parameter(torch.ones(4))
    parameter.main_grad = storage.view(4)
    buffers = GradientBuffers.allocate([parameter])
    buffers.attach((True,))
    parameter.main_grad.data = torch.zeros(4)
    with pytest.raises(RuntimeError, match="was replaced or moved after its graphs were captured"):
        buffers.attach((True,))


def test_half_a_pass_is_fatal_where_ranks_communicate():
    alone, together = Surroundings(), Surroundings(communicates=True)
    failed = WarmupError("OutOfMemoryError: 1 GiB")
    refuse_half_a_pass(failed, alone)
    refuse_half_a_pass(RuntimeError("a capture ran nothing"), together)
    with pytest.raises(RuntimeError, match=r"a pass before a capture failed on this rank \(OutOfMemoryError: 1 GiB\)"):
        refuse_half_a_pass(failed, together)


@pytest.mark.parametrize(
    ("changes", "ranks", "together"),
    [
        ({}, 8, False),
        ({"tensor_model_parallel_size": 2}, 1, True),
        ({"context_parallel_size": 2}, 1, True),
        ({"expert_model_parallel_size": 2}, 1, True),
        ({"expert_tensor_parallel_size": 2}, 1, True),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "global_aux_loss"}, 2, True),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"]}, 2, True),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": "global_aux_loss"}, 1, False),
        ({"num_moe_experts": 4, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}, 8, False),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, 2, False),
    ],
)
def test_passes_communicate_over_every_group_of_a_decoders_collectives(changes, ranks, together):
    made = config()
    for name, value in changes.items():
        setattr(made, name, value)
    assert refusals.communicates(made, data_parallel_size=ranks) is together


def test_every_argument_of_megatrons_decoders_is_taken_or_told():
    from megatron.core.models.hybrid.hybrid_block import HybridStack
    from megatron.core.transformer.transformer_block import TransformerBlock

    told: set[str] = set()
    for block in (TransformerBlock, HybridStack):
        signature = inspect.signature(block.forward)
        names = {*signature.parameters} - {"self"}
        assert {"hidden_states", "attention_mask", "packed_seq_params", "padding_mask"} <= names
        for name in names:
            found = find_unknown_arguments({name: object()}, signature)
            assert found <= {name}
            told |= found
            assert find_unknown_arguments({name: signature.parameters[name].default}, signature) <= {"hidden_states"}
    assert told >= {"context", "context_mask", "attention_bias", "extract_layer_indices", "rotary_pos_cos"}
    assert not told & {"inference_context", "inference_params", "rotary_pos_emb"}


def test_arguments_that_a_decoder_takes_without_naming_them_are_told():
    def forward(hidden_states, *, causal=True, **more):
        """As a decoder of one's own may have it."""

    signature = inspect.signature(forward)
    bound = signature.bind(1, causal=False, further=3, nothing=None).arguments
    assert find_unknown_arguments(bound, signature) == {"causal", "further"}
    assert find_unknown_arguments(signature.bind(1, causal=True).arguments, signature) == set()


def test_a_module_with_main_grads_passes_them_into_the_replay():
    """Only parameters that a pass touches, and whose gradient goes to main_grad."""
    from thdprof.runtime.graphs.module_state import GradientBuffers

    module = nn.Linear(2, 2)
    module.weight.main_grad = torch.zeros(2, 2)
    buffers = GradientBuffers.allocate(list(module.parameters()))
    assert buffers.with_main_grad((True, True)) == [module.weight]
    assert buffers.with_main_grad((False, True)) == []
    assert issubclass(chunk.ChunkGraphs, GraphedModule)


def test_fused_accumulation_is_not_added_twice():
    from thdprof.runtime.graphs.module_state import GradientBuffers, spare_main_grads

    class Fused(torch.autograd.Function):
        """Adds to main_grad itself and hands autograd a dummy, as Transformer Engine does."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight
            return x * weight

        @staticmethod
        def backward(ctx, grad):
            ctx.weight.main_grad.add_(grad)
            ctx.weight.grad_added_to_main_grad = True
            return None, torch.full_like(grad, 1000.0)

    fused, plain = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    for parameter in (fused, plain):
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(3), False
    buffers = GradientBuffers.allocate([fused, plain])
    aliases = []
    for parameter in (fused, plain):
        alias = nn.Parameter(parameter.detach())
        alias.__dict__.update(parameter.__dict__)
        aliases.append(alias)

    def run():
        (Fused.apply(torch.ones(3), aliases[0]) + aliases[1] * 2).sum().backward()

    spare_main_grads(aliases)
    run()  # a warm-up
    assert fused.main_grad.tolist() == plain.main_grad.tolist() == [0.0] * 3
    for alias in aliases:
        alias.grad = None
    touched = buffers.collect(aliases)
    run()
    assert touched == {0, 1}
    assert fused.main_grad.tolist() == [1.0] * 3
    assert plain.main_grad.tolist() == [2.0] * 3
    assert fused.grad is plain.grad is None


# --- calibration ----------------------------------------------------------------------------------------------------


def test_a_decoder_is_measured_with_the_metadata_and_the_rotary_table_of_training():
    """Its module takes [tokens, hidden] and one PackedSequence, as any that is calibrated."""
    block, lengths = Block(), []

    def rotary(length, *, packed_seq):
        lengths.append((length, packed_seq))
        return torch.zeros(length, 1, 1, 4)

    config = SimpleNamespace(multi_latent_attention=False)
    model = SimpleNamespace(decoder=block, rotary_pos_emb=rotary, position_embedding_type="rope", config=config)
    module = PackedDecoder(model, shards=2)
    x = torch.randn(4, 2)
    for _ in range(2):
        assert torch.equal(module(x, pack([0, 3, 8])), block.linear(x))
    (params, table), *_ = block.seen
    assert (params.qkv_format, params.cu_seqlens_q.tolist(), params.max_seqlen_kv) == ("thd", [0, 3, 8], 5)
    assert lengths == [(8, True)]  # of all ranks' tokens, and made once: graphs read it where it lies
    assert block.seen[1][1] is table


def test_the_memory_of_a_slot_is_that_of_its_first_bucket():
    assert calibrate.slot_costs([1000, 10, 30]) == (1000, 0.02)
    assert calibrate.slot_costs([1000]) == (1000, 0.0)


def test_parameters_are_not_gathered_for_captures_before_training(monkeypatch):
    gathered, opened = [], []
    monkeypatch.setattr(chunk, "gather_parameters", gathered.append)
    monkeypatch.setattr(chunk, "generators", tuple)
    monkeypatch.setattr(GraphedModule, "_open", lambda self, call: opened.append(call))
    graphs = chunk.ChunkGraphs(nn.Linear(1, 1), [Bucket(4, 8, 8)])
    with graphs.ahead_of_training():
        graphs._open("before training")
    assert gathered == []
    graphs._open("at a micro-batch")
    assert gathered == [graphs.module]
    assert opened == ["before training", "at a micro-batch"]
