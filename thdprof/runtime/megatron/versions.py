"""What `thdprof.runtime.megatron` relies on in other packages beyond their public interfaces, probed before a run.

The probes decide whether a version is accepted. They read the sources of a package, or try a behaviour on the CPU.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.packed_seq_params import PackedSeqParams
from packaging.version import Version

from thdprof.runtime.graphs.module_state import NoGradient
from thdprof.runtime.megatron import rotary
from thdprof.words import install_line

logger = logging.getLogger(__name__)

OVERRIDE = "THDPROF_UNTESTED_VERSIONS"
"""Environment variable; the value `allow` accepts packages that a probe refuses."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Package:
    """A package that training by a plan relies on, and the probes that it must pass."""

    name: str
    """Its name on PyPI."""
    root: str
    """The name under which it is imported."""
    oldest: str
    """The oldest version that is accepted."""
    newest_run: str
    """The newest version that thdprof was run with on a GPU."""
    tried: Mapping[str, Callable[[], bool]] = field(default_factory=dict)
    """Behaviours that are tried on the CPU, by their name and, behind a colon, what thdprof needs them for."""
    names: str = ""
    """Names that must stand in the package's sources. A line has a module below the root, with a class or function of
    it behind a colon, and the names.
    """


def _hooks_run_between_nodes() -> bool:
    """Whether hooks on a gradient's accumulation run before the backward of the node before, as pieces need it."""
    log: list[str] = []
    x = torch.ones(1, requires_grad=True)
    held = []
    for name in "ab":
        parameter = torch.ones(1, requires_grad=True)
        node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(lambda *_, name=name: log.append(f"hook {name}"))
        held.append(node)  # which only its owner keeps alive
        x = NoGradient.apply(x, parameter, lambda name=name: log.append(f"backward {name}"))
    x.sum().backward()
    return log == ["backward b", "hook b", "backward a", "hook a"]


def _seq_idx_is_kept() -> bool:
    seq_idx = torch.zeros(1, 3, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3]), seq_idx=seq_idx).seq_idx is seq_idx


def _rope_is_ours() -> bool:
    """Whether unfused RoPE of packed tokens gives what `rotary` gives in captures."""
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    tokens, bounds = torch.linspace(-1, 1, 64).view(8, 2, 4), torch.tensor([0, 5, 8], dtype=torch.int32)
    table = torch.linspace(0, 3, 48).view(12, 1, 1, 4)
    longest = {"max_seqlen": 5} if rotary.reads_max_seqlen() else {}

    def rotate(rows: int) -> torch.Tensor:
        rotate_all: Callable[..., torch.Tensor] = rope_utils.apply_rotary_pos_emb
        return rotate_all(tokens, table[:rows], config, bounds, cp_group=group, **longest)

    own = [rotate(5), rotate(8)]  # of positions in a document, and of the micro-batch's tokens
    with rotary.on_the_device():
        return all(torch.equal(rotate(rows), expected) for rows, expected in zip((5, 8), own, strict=True))


def _shift_is_ours() -> bool:
    """Whether the shift of packed tokens gives what `rotary` gives."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 8], dtype=torch.int32))
    tokens = torch.arange(1, 9)[None]
    own, _ = roll_tensor(tokens, packed_seq_params=params)
    with rotary.shifting_together():
        return torch.equal(roll_tensor(tokens, packed_seq_params=params)[0], own)


TORCH = Package(
    name="torch",
    root="torch",
    oldest="2.6",
    newest_run="2.11.0",
    names="""
distributed.distributed_c10d | _get_default_store
distributed | rendezvous HashStore
""",
    tried={"autograd: gradients are reduced between the graphs of a chunk's pieces": _hooks_run_between_nodes},
)
MEGATRON = Package(
    name="megatron-core",
    root="megatron.core",
    oldest="0.19.1",
    newest_run="0.19.2",
    tried={
        "packed seq_idx: documents of Mamba layers are distinguished by it alone": _seq_idx_is_kept,
        "unfused RoPE: captures rotate tokens without a look at boundaries on the host": _rope_is_ours,
        "roll_tensor: multi-token prediction shifts all documents of a micro-batch together": _shift_is_ours,
    },
    names="""
transformer.cuda_graphs | _set_capture_start _set_capture_end _set_warmup_start _set_warmup_end
transformer.cuda_graphs:_CudagraphGlobalRecord | cudagraph_created _enable_saved_tensors_observer
transformer.cuda_graphs:CudaGraphManager.__init__ | cudagraph_runners global_mempool
transformer.cuda_graphs:_CudaGraphRunner.__init__ | status fwd_graph bwd_graph _GraphStatus
distributed.distributed_data_parallel | _cudagraph_wgrad_ready_event bucket_groups expert_parallel_bucket_groups
distributed.param_and_grad_buffer | is_last_microbatch
transformer.transformer_block:TransformerBlock.forward | input_tensor pre_process
models.hybrid.hybrid_block:HybridStack.forward | input_tensor pre_process layers
transformer.module:GraphableMegatronModule | _should_call_local_cudagraph cuda_graphs cuda_graph_manual_hooks
ssm.mamba_mixer:MambaMixer | seq_idx cp
transformer.transformer_layer | _te_cuda_graph_capture _te_cuda_graph_replay _get_submodules_under_cudagraphs
transformer.transformer_layer | mlp_norm_manager recompute_pre_mlp_layernorm cudagraph_tensor_store
transformer.moe.moe_layer:MoELayer | moe_layer_recompute cudagraph_tensor_store token_dispatcher shared_expert_overlap
transformer.moe.moe_layer:MoELayer | dispatch_preprocess token_dispatch dispatch_postprocess combine_preprocess
transformer.moe.moe_layer:MoELayer | token_combine combine_postprocess get_expert_zero_copy_buffers
transformer.moe.experts:TEGroupedMLP | linear_fc1 linear_fc2 _with_fused_impl tolist
transformer.moe.token_dispatcher | cudagraph_attrs valid_cudagraph_attrs cuda_dtoh_point _comm_manager
transformer.moe.router:TopKRouter | _apply_expert_bias local_tokens_per_expert
models.gpt.gpt_model:GPTModel.build_schedule_plan | packed_seq_params
models.common.model_chunk_schedule_plan | get_layer num_layers state chunk_state
pipeline_parallel.utils:ScheduleNode | free_input
transformer.multi_token_prediction | _get_embeddings _concat_embeddings mtp_model_layer _proj_and_transformer_layer
transformer.multi_token_prediction | _checkpointed_forward _roll_tensor_packed_seq
models.common.embeddings.yarn_rotary_pos_embedding | get_cached_cos_sin cos_cached sin_cached max_seq_len_cached
models.common.embeddings.yarn_rotary_pos_embedding | offset_cached dtype_cached packed_seq_cached
models.common.embeddings.rope_utils | _apply_rotary_pos_emb_thd _apply_rotary_pos_emb_bshd
extensions.transformer_engine:TEDotProductAttention.forward | local_cp_size
transformer.attention | core_attention linear_proj linear_qkv q_layernorm
transformer.multi_latent_attention | linear_q_proj linear_q_down_proj linear_q_up_proj kv_layernorm linear_kv_down_proj
transformer.multi_latent_attention | linear_kv_up_proj linear_qkv_down_proj
transformer.mlp:MLP | linear_fc1 linear_fc2
pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager | OFFLOAD_MGR _cur_forward_chunk _d2h_stream
pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager | _h2d_stream
pipeline_parallel.fine_grained_activation_offload:ChunkOffloadHandler | offload_groups _groups_to_offload
pipeline_parallel.fine_grained_activation_offload:ChunkOffloadHandler | _groups_to_reload _reloading_group
pipeline_parallel.fine_grained_activation_offload | _tensors _name _pools
utils:get_batch_on_this_tp_rank | batch tp_rank has_cu_seqlens is_hybrid_cp micro_batch_size broadcast_group
utils:get_batch_on_this_tp_rank | broadcast_src_rank
utils | flatten_batch_for_packed_sequences
rerun_state_machine:RerunStateMachine | validate_result is_unexpectedly_large should_run_forward_backward
rerun_state_machine:RerunStateMachine | should_checkpoint_and_exit set_mode state_dict _restore_state state
rerun_state_machine:RerunStateMachine | initial_result saved_results
rerun_state_machine | error_injector should_inject_errors
tensor_parallel.random | checkpoint CheckpointFunction CheckpointWithoutOutput _get_all_rng_states _set_all_rng_states
transformer.module:MegatronModule.set_is_first_microbatch | is_first_microbatch
extensions.transformer_engine | _fused_impl te_checkpoint
transformer.moe.experts | _fused_ops
""",
)
MEGATRON_LM = Package(
    name="megatron-core",
    root="megatron.training",
    oldest=MEGATRON.oldest,
    newest_run=MEGATRON.newest_run,
    names="""
training | setup_model_and_optimizer train training_log iteration print_rank_last print_rank_0 get_tensorboard_writer
training | get_wandb_writer tensorboard_log_interval use_gloo_process_groups distributed_timeout_minutes
""",
)
TRANSFORMER_ENGINE = Package(
    name="transformer-engine",
    root="transformer_engine",
    oldest="2.20.2",
    newest_run="2.20.2",
    names="""
pytorch.distributed | checkpoint get_all_rng_states
pytorch.graph:make_graphed_callables | _order _num_layers_per_chunk
pytorch.graph | _reuse_graph_input_output_buffers reset set_capture_end
pytorch.quantization:FP8GlobalStateManager | reduce_and_update_fp8_tensors
pytorch.quantization | quantization_state skip_fp8_weight_update_tensor fp8_tensors_recompute_buffer scale amax_history
pytorch.quantization | scaling_fwd scaling_bwd
pytorch.quantized_tensor | get_metadata get_usages update_usage
pytorch.module.base | fp8_meta _fp8_workspaces wgrad_store wgrad_accumulation_and_reduce_hooks backward_dw
pytorch.module.linear | main_grad grad_added_to_main_grad
pytorch.module.grouped_linear:GroupedLinear.__init__ | num_gemms use_bias fuse_wgrad_accumulation
""",
)
BRIDGE = Package(
    name="megatron-bridge",
    root="megatron.bridge",
    oldest="0.6.2",
    newest_run="0.6.2",
    names="""
peft.recompute | forward
peft.lora_layers | TEFusedLoRALinear
models.qwen_vl.modelling_qwen3_vl.model:Qwen3VLModel | language_model vision_model vision_transformer_config
models.qwen_vl.modelling_qwen3_vl.transformer_block | _deepstack_process visual_pos_masks deepstack_visual_embeds
models.qwen_vl.modelling_qwen3_vl.rope:Qwen3VLMultimodalRotaryEmbedding | is_thd_format
training.gpt_step:get_batch | get_batch_from_iterator
training.vlm_step:get_batch | get_batch_from_iterator
training.pretrain | destroy_global_state
training.train:train | train_step
training.utils.train_utils | print_rank_last
""",
)
INSTALL = (TORCH, MEGATRON, TRANSFORMER_ENGINE)
"""What `install` relies on."""


class VersionError(RuntimeError):
    """A package is missing or too old, or lacks what thdprof relies on."""


def installed(packages: Sequence[str]) -> dict[str, str | None]:
    """Version of each package; None where it is not installed.

    A Megatron that was imported says its version itself, since a checkout of Megatron-LM beside the training script is
    imported in place of the installed package.
    """
    versions: dict[str, str | None] = {}
    for name in packages:
        imported = sys.modules.get("megatron.core") if name == "megatron-core" else None
        own = getattr(imported, "__version__", None)  # behind a plus sign it has the commit of some repository
        versions[name] = _in_metadata(name) if own is None else own.partition("+")[0]
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


def _names_in(module: ast.Module | None, of: str) -> set[str]:
    """Every name in the class or function `of` of a module, in the whole module for ""; none where it is not."""
    inside: list[ast.AST] = [] if module is None else [*ast.walk(module)]
    for part in filter(None, of.split(".")):
        inside = next(([*ast.walk(node)] for node in inside if getattr(node, "name", None) == part), [])
    fields = ("id", "attr", "arg", "name", "asname", "value")
    found = (getattr(node, field, None) for node in inside for field in fields)
    return {name for name in found if isinstance(name, str)}


@cache
def refusals(package: Package, root: Path | None = None) -> Sequence[str]:
    """A sentence for every probe that the package does not pass.

    Args:
        root: the directory of its sources; None: where it would be imported from.
    """
    if root is None:
        spec = importlib.util.find_spec(package.root)
        if spec is None or not spec.submodule_search_locations:
            return [f"{package.root} cannot be found"]
        root = Path(next(iter(spec.submodule_search_locations)))
    lacks = []
    for text, holds in package.tried.items():
        what, _, why = text.partition(": ")
        try:
            problem = "" if holds() else "does otherwise than before"
        except Exception as error:
            problem = f"fails ({type(error).__name__}: {error})"
        if problem:
            lacks.append(f"{what} {problem} ({why})")
    modules: dict[str, ast.Module | None] = {}
    for line in package.names.strip().splitlines():
        where, names = line.split(" | ")
        module, _, of = where.partition(":")
        if module not in modules:
            base = root.joinpath(*module.split("."))
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            modules[module] = ast.parse(file.read_bytes()) if file.is_file() else None
        there = _names_in(modules[module], of)
        if missing := [name for name in names.split() if name not in there]:
            lacks.append(f"{where} has no {', '.join(missing)}")
    return lacks


def check(
    *packages: Package,
    find: Callable[[Sequence[str]], Mapping[str, str | None]] = installed,
) -> None:
    """Refuse packages that lack what thdprof relies on; warn of those that are newer than any that was run.

    Args:
        packages: what to check; none: what `install` relies on.
        find: returns the version of each package, or None.

    Raises:
        VersionError: names each package and what it lacks; `THDPROF_UNTESTED_VERSIONS=allow` accepts those that are
            installed.
    """
    packages = packages or INSTALL
    versions = find([package.name for package in packages])
    lines: list[str] = []
    for package in packages:
        version = versions[package.name]
        if version is None:
            wanted = "pip install megatron-bridge" if package is BRIDGE else install_line("megatron,te")
            lines.append(f"{package.name} is not installed: {wanted}")
        elif Version(version).release < Version(package.oldest).release:
            lines.append(f"{package.name} {version}: the oldest version that thdprof takes is {package.oldest}")
        else:
            lacks = refusals(package)
            lines.extend(f"{package.name} {version}: {line}" for line in lacks)
            if not lacks and Version(version).release[:2] > Version(package.newest_run).release[:2]:
                warn_once(
                    f"{package.name} {version} has all that thdprof relies on, but thdprof was run with nothing newer "
                    f"than {package.newest_run}: compare a run with --replay off before you trust it"
                )
    if not lines:
        return
    missing = any(versions[package.name] is None for package in packages)
    if not missing and os.environ.get(OVERRIDE) == "allow":
        warn_once("; ".join(lines) + f". {OVERRIDE}=allow goes on all the same")
        return
    raise VersionError(
        "; ".join(lines) + _hidden() + ("" if missing else f". Set {OVERRIDE}=allow to go on all the same")
    )


@cache
def warn_once(text: str) -> None:
    """Log a warning, once in a process and on the first rank alone."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning("%s", text)
