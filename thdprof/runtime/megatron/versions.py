"""The private names of other packages that `thdprof.runtime.megatron` relies on, and the versions that were checked.

Every such name is listed in `RELIED_ON`.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from thdprof.words import install_line

OVERRIDE = "THDPROF_UNTESTED_VERSIONS"
"""Environment variable; the value `allow` accepts versions on which thdprof was not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reliance:
    """A name of another package that is not part of the package's public interface."""

    package: str
    """The package's name on PyPI."""
    name: str
    """The private name, or several of them."""
    checked: SpecifierSet
    """Versions that thdprof accepts."""
    why: str
    """The reason why thdprof relies on the name."""


MEGATRON = SpecifierSet(">=0.19.1,<0.20")
TRANSFORMER_ENGINE = SpecifierSet(">=2.20.2,<2.21")
"""0.19.2 and 2.20.2 were read and run; later patch releases are assumed to be alike. Megatron-LM's tag core_v0.19.0,
which calls itself 0.19.1, was read: it differs from 0.19.2 in nothing relied on (FP8 contexts, multi-token prediction).
"""

RELIED_ON = (
    Reliance(
        package="megatron-core",
        name="transformer.cuda_graphs._set_capture_start, _set_capture_end",
        checked=MEGATRON,
        why="hooks of its DistributedDataParallel stay silent during a capture",
    ),
    Reliance(
        package="megatron-core",
        name="Parameter._cudagraph_wgrad_ready_event",
        checked=MEGATRON,
        why="its gradient reduction waits for the event, and expects no .grad of a replayed parameter",
    ),
    Reliance(
        package="megatron-core",
        name="TransformerBlock.forward, HybridStack.forward: input_tensor, pre_process",
        checked=MEGATRON,
        why="a pipeline stage's input comes in an attribute; a chunk graph takes it as an argument",
    ),
    Reliance(
        package="megatron-core",
        name="TransformerBlock.forward, HybridStack.forward: layers, each called once a pass, in order",
        checked=MEGATRON,
        why="graphs.layers_per_graph cuts a pass before layers, at the tensors that they are called with",
    ),
    Reliance(
        package="megatron-core",
        name="GraphableMegatronModule._should_call_local_cudagraph",
        checked=MEGATRON,
        why="an attribute of that name on a layer leads a micro-batch without a graph past its graphs",
    ),
    Reliance(
        package="megatron-core",
        name="transformer.cuda_graphs._CudagraphGlobalRecord: cudagraph_created, _enable_saved_tensors_observer",
        checked=MEGATRON,
        why="says when a step's recorded layers have become graphs, after which none can be added",
    ),
    Reliance(
        package="megatron-core",
        name="CudaGraphManager: cudagraph_runners, global_mempool; _CudaGraphRunner.status, fwd_graph, bwd_graph; "
        "_GraphStatus",
        checked=MEGATRON,
        why="tells whether a backward pass is still to come, counts graphs and their memory, and frees them",
    ),
    Reliance(
        package="megatron-core",
        name="GraphableMegatronModule.__call__: cuda_graphs",
        checked=MEGATRON,
        why="a layer whose list of graphs is empty runs its own forward, for which our graphs stand in",
    ),
    Reliance(
        package="megatron-core",
        name="TransformerBlock.forward, HybridStack.forward: layers, each called with keyword arguments alone",
        checked=MEGATRON,
        why="a layer's graph takes the hidden states and bakes in the rest",
    ),
    Reliance(
        package="megatron-core",
        name="MambaMixer: packed_seq_params.seq_idx; MambaMixer.cp, which keeps parameters as plain attributes",
        checked=MEGATRON,
        why="documents are told apart by seq_idx alone, and a capture must run over aliases of every parameter",
    ),
    Reliance(
        package="megatron-core",
        name="PackedSeqParams.__post_init__: total_tokens",
        checked=MEGATRON,
        why="without it seq_idx stays as it was given, also where local graphs copy the metadata",
    ),
    Reliance(
        package="megatron-core",
        name="TransformerLayer._te_cuda_graph_capture, _te_cuda_graph_replay, _get_submodules_under_cudagraphs, "
        "mlp_norm_manager, cuda_graph_manual_hooks, recompute_pre_mlp_layernorm; MoELayer.cudagraph_tensor_store",
        checked=MEGATRON,
        why="a layer with dropless experts is captured up to its router, and goes on from there, by its own split",
    ),
    Reliance(
        package="megatron-core",
        name="MoELayer.moe_layer_recompute; token_dispatcher.valid_cudagraph_attrs",
        checked=MEGATRON,
        why="experts behind a graph are recomputed from its outputs, among them what the dispatcher was given",
    ),
    Reliance(
        package="megatron-core",
        name="GPTModel.build_schedule_plan: packed_seq_params, get_layer, num_layers, state; nodes' submodule, "
        "chunk_state, free_input",
        checked=MEGATRON,
        why="the nodes of the schedule that overlaps expert communication are led to graphs",
    ),
    Reliance(
        package="megatron-core",
        name="MultiTokenPredictionLayer._get_embeddings, _concat_embeddings, called in this order by its first node",
        checked=MEGATRON,
        why="between the two the node asserts that there are no boundaries, which it takes before and after",
    ),
    Reliance(
        package="megatron-core",
        name="MultiTokenPredictionLayer._proj_and_transformer_layer, _checkpointed_forward, mtp_model_layer; "
        "transformer.multi_token_prediction._roll_tensor_packed_seq",
        checked=MEGATRON,
        why="what follows the embedding of a prediction layer is replayed, and its documents are shifted together",
    ),
    Reliance(
        package="megatron-core",
        name="MoETokenDispatcher.cudagraph_attrs, cuda_dtoh_point, _comm_manager, and the sizes in their attributes",
        checked=MEGATRON,
        why="a layer that is captured behind its dispatcher's preprocessing goes on with the sizes of its own tokens",
    ),
    Reliance(
        package="megatron-core",
        name="YarnRotaryEmbedding.get_cached_cos_sin: cos_cached, sin_cached, max_seq_len_cached, offset_cached, "
        "dtype_cached, packed_seq_cached",
        checked=MEGATRON,
        why="multi-latent attention makes its rotary tables there anew for longer documents; graphs need them in place",
    ),
    Reliance(
        package="megatron-core",
        name="models.common.embeddings.rope_utils._apply_rotary_pos_emb_thd, _apply_rotary_pos_emb_bshd",
        checked=MEGATRON,
        why="the first one splits packed tokens at boundaries that it reads on the host, and is replaced in captures",
    ),
    Reliance(
        package="megatron-core",
        name="Attention: pg_collection.cp, core_attention; TEDotProductAttention.forward: local_cp_size, cp_group",
        checked=MEGATRON,
        why="under dynamic context parallelism attention takes its group from the metadata, but packed rotary "
        "positions theirs from the group that the model was built with",
    ),
    Reliance(
        package="megatron-core",
        name="names of submodules: linear_qkv, linear_q_proj, linear_q_down_proj, linear_q_up_proj, q_layernorm, "
        "linear_kv_down_proj, linear_kv_up_proj, kv_layernorm, linear_qkv_down_proj, core_attention, linear_proj, "
        "linear_fc1, linear_fc2, mlp, experts",
        checked=MEGATRON,
        why="graphs.offload names parts of layers by the modules that save their tensors",
    ),
    Reliance(
        package="megatron-core",
        name="fine_grained_activation_offload: PipelineOffloadManager.OFFLOAD_MGR, _cur_forward_chunk, _d2h_stream, "
        "_h2d_stream; ChunkOffloadHandler: its hooks, offload_groups, _groups_to_offload, _groups_to_reload, "
        "_reloading_group; OffloadTensorGroup._tensors, _name; OffloadTensorPool._pools",
        checked=MEGATRON,
        why="its own offloading is led by managers of slots and of eager micro-batches in place of the process's one",
    ),
    Reliance(
        package="megatron-core",
        name="megatron.training.training: setup_model_and_optimizer, train, training_log, print_rank_last, "
        "print_rank_0, get_tensorboard_writer, get_wandb_writer, get_args().tensorboard_log_interval, "
        "use_gloo_process_groups, distributed_timeout_minutes; its line begins with [ and has ` iteration `",
        checked=MEGATRON,
        why="graphs are installed after the one, closed after the next, where all ranks agree if it exits itself, and "
        "counted in the others' lines and writers",
    ),
    Reliance(
        package="megatron-core",
        name="get_batch_on_this_tp_rank: its arguments, broadcasts and keys; flatten_batch_for_packed_sequences; "
        "RerunDataIterator.__next__; PackedSeqParams.__post_init__",
        checked=MEGATRON,
        why="in Megatron-LM's scripts they move boundaries to the GPU and read them back for every micro-batch",
    ),
    Reliance(
        package="megatron-core",
        name="RerunStateMachine: validate_result, is_unexpectedly_large, should_run_forward_backward, "
        "should_checkpoint_and_exit, set_mode, state_dict, _restore_state, state, initial_result, saved_results, "
        "error_injector.should_inject_errors",
        checked=MEGATRON,
        why="its checks of every micro-batch's loss each wait for the GPU; they are made together, in their order",
    ),
    Reliance(
        package="megatron-core",
        name="TopKRouter._apply_expert_bias, called with the routing map last; local_tokens_per_expert",
        checked=MEGATRON,
        why="a router's tokens are counted for its experts' bias outside of its graph, by its own function",
    ),
    Reliance(
        package="megatron-core",
        name="tensor_parallel.random: checkpoint, called as tensor_parallel.checkpoint; CheckpointFunction; "
        "CheckpointWithoutOutput.checkpoint",
        checked=MEGATRON,
        why="what they recompute draws the masks of its forward, and is recomputed in a capture too",
    ),
    Reliance(
        package="transformer-engine",
        name="pytorch.distributed.checkpoint, imported by Megatron at every call",
        checked=TRANSFORMER_ENGINE,
        why="by it Megatron recomputes under FP8; it keeps references to random states, not copies",
    ),
    Reliance(
        package="transformer-engine",
        name="make_graphed_callables: _order, _num_layers_per_chunk, _reuse_graph_input_output_buffers, reset",
        checked=TRANSFORMER_ENGINE,
        why="one chunk's layers are captured forward and backward in one memory pool, as megatron-core does",
    ),
    Reliance(
        package="transformer-engine",
        name="graph.set_capture_end, distributed.get_all_rng_states",
        checked=TRANSFORMER_ENGINE,
        why="a failed capture leaves its mark behind; it registers the random states that it knows and no other",
    ),
    Reliance(
        package="megatron-core",
        name="set_is_first_microbatch: is_first_microbatch of Transformer Engine's layers",
        checked=MEGATRON,
        why="it marks the first micro-batch of a step, at which quantized weights are made; a replay clears the marks",
    ),
    Reliance(
        package="megatron-core",
        name="extensions.transformer_engine: _fused_impl of TEFusedMLP and TEFusedResidualRMSNorm; "
        "TEGroupedMLP._fused_ops",
        checked=MEGATRON,
        why="a layer that has the first is left out of graphs: operations keep the parameters that they first find, "
        "which are not to be those of a pass before a capture",
    ),
    Reliance(
        package="transformer-engine",
        name="quantization.FP8GlobalStateManager: reduce_and_update_fp8_tensors, quantization_state with "
        "skip_fp8_weight_update_tensor and fp8_tensors_recompute_buffer",
        checked=TRANSFORMER_ENGINE,
        why="updates of delayed scaling run after replays, not inside; graphs quantize weights where a flag tells them",
    ),
    Reliance(
        package="transformer-engine",
        name="modules' fp8_meta with scaling_fwd, scaling_bwd (scale, amax_history), _fp8_workspaces; quantized "
        "tensors' get_metadata, get_usages, update_usage",
        checked=TRANSFORMER_ENGINE,
        why="a capture leaves scales and quantized weights as they were, and replays find them where they were",
    ),
    Reliance(
        package="transformer-engine",
        name="weight.main_grad, weight.grad_added_to_main_grad",
        checked=TRANSFORMER_ENGINE,
        why="fused weight-gradient accumulation writes to the one and says so in the other",
    ),
    Reliance(
        package="transformer-engine",
        name="modules' wgrad_store, wgrad_accumulation_and_reduce_hooks, backward_dw",
        checked=TRANSFORMER_ENGINE,
        why="delayed weight gradients of captured modules are computed in their graphs",
    ),
)


BRIDGE = SpecifierSet(">=0.6.2,<0.7")
RELIED_ON_IN_BRIDGE = (
    Reliance(
        package="megatron-bridge",
        name="peft.recompute, which puts a forward on a block; peft.lora_layers.TEFusedLoRALinear",
        checked=BRIDGE,
        why="the one is kept around graphs, the other one refused",
    ),
    Reliance(
        package="megatron-bridge",
        name="Qwen3VLModel: language_model, vision_model, vision_transformer_config; Qwen3VLTransformerBlock."
        "_deepstack_process, visual_pos_masks, deepstack_visual_embeds; Qwen3VLMultimodalRotaryEmbedding.is_thd_format",
        checked=BRIDGE,
        why="the language model's decoder is captured, and gets positions and the features of images as tensors",
    ),
    Reliance(
        package="megatron-bridge",
        name="training.gpt_step.get_batch_from_iterator and training.vlm_step's, called by get_batch by that name",
        checked=BRIDGE,
        why="the boundaries that a micro-batch has on the host are forgotten there",
    ),
    Reliance(
        package="megatron-bridge",
        name="training.pretrain.destroy_global_state, called there first when a run ends by an exception; "
        "training.train.train, where all ranks agree if it exits itself; training.utils.train_utils.print_rank_last",
        checked=BRIDGE,
        why="graphs are freed before the process groups, and counted in the log line",
    ),
)
"""As RELIED_ON, of a package that only its own trainer needs."""


class VersionError(RuntimeError):
    """A package is missing, or is of a version on which thdprof was not checked."""


def installed(packages: Sequence[str]) -> dict[str, str | None]:
    """Version of each package; None where it is not installed.

    A Megatron that was imported says its version itself, since a checkout of Megatron-LM beside the training script is
    imported in place of the installed package.
    """
    versions: dict[str, str | None] = {}
    for name in packages:
        imported = sys.modules.get("megatron.core") if name == "megatron-core" else None
        if imported is not None and hasattr(imported, "__version__"):
            versions[name] = imported.__version__.partition("+")[0]  # what follows is the commit of some repository
            continue
        versions[name] = _in_metadata(name)
    return versions


def _in_metadata(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _hidden() -> str:
    """A sentence where the imported megatron-core is not the installed one; else nothing."""
    there, own = installed(["megatron-core"])["megatron-core"], _in_metadata("megatron-core")
    if there == own:
        return ""
    where = ", ".join(getattr(sys.modules["megatron.core"], "__path__", ["an unknown place"]))
    return f". megatron-core {there} is imported from {where}, in front of the installed one ({own or 'none'})"


def complaints(versions: Mapping[str, str | None], relied_on: Sequence[Reliance] = RELIED_ON) -> list[str]:
    """One line for every package that is missing or unchecked; a local build of a release counts as the release.

    Args:
        versions: version by package; None where it is not installed.
        relied_on: the names that are relied on.
    """
    lines = []
    for package, version in versions.items():
        relied = [r for r in relied_on if r.package == package]
        if version is None:
            bridge = package == "megatron-bridge"
            wanted = "pip install megatron-bridge" if bridge else install_line("megatron,te")
            lines.append(f"{package} is not installed: {wanted}")
        elif bad := [r for r in relied if Version(version).base_version not in r.checked]:
            lines.append(
                f"{package} {version}: thdprof takes {bad[0].checked}, and relies on {bad[0].name} ({bad[0].why})"
            )
    return lines


def check(find: Callable[[Sequence[str]], Mapping[str, str | None]] = installed) -> None:
    """Refuse versions on which thdprof was not checked.

    Args:
        find: returns the version of each package, or None.

    Raises:
        VersionError: names each such package; `THDPROF_UNTESTED_VERSIONS=allow` accepts those that are installed.
    """
    _check(find, RELIED_ON)


def check_bridge(find: Callable[[Sequence[str]], Mapping[str, str | None]] = installed) -> None:
    """Refuse a Megatron-Bridge on which thdprof was not checked.

    Args:
        find: returns the version of each package, or None.

    Raises:
        VersionError: as `check` does.
    """
    _check(find, RELIED_ON_IN_BRIDGE)


def _check(find: Callable[[Sequence[str]], Mapping[str, str | None]], relied_on: Sequence[Reliance]) -> None:
    versions = find(sorted({r.package for r in relied_on}))
    missing = [p for p, version in versions.items() if version is None]
    lines = complaints(versions, relied_on)
    if lines and (missing or os.environ.get(OVERRIDE) != "allow"):
        raise VersionError(
            "; ".join(lines) + _hidden() + ("" if missing else f". Set {OVERRIDE}=allow to go on all the same")
        )
