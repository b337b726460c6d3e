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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version

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
    it behind a colon; the names; and what thdprof needs them for.
    """


class _Node(torch.autograd.Function):
    """Notes its backward, and returns no gradient to its parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, note: Callable[[], None]) -> torch.Tensor:
        ctx.note = note
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.note()
        return grad, None, None


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
        x = _Node.apply(x, parameter, lambda name=name: log.append(f"backward {name}"))
    x.sum().backward()
    return log == ["backward b", "hook b", "backward a", "hook a"]


def _seq_idx_is_kept() -> bool:
    from megatron.core.packed_seq_params import PackedSeqParams

    seq_idx = torch.zeros(1, 3, dtype=torch.int32)
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor([0, 3]), seq_idx=seq_idx).seq_idx is seq_idx


def _rope_is_ours() -> bool:
    """Whether unfused RoPE of packed tokens gives what `rotary` gives in captures."""
    from megatron.core.models.common.embeddings import rope_utils

    from thdprof.runtime.megatron import rotary

    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    tokens, bounds = torch.linspace(-1, 1, 64).view(8, 2, 4), torch.tensor([0, 5, 8], dtype=torch.int32)
    table = torch.linspace(0, 3, 48).view(12, 1, 1, 4)
    told = {"max_seqlen": 5} if rotary.reads_max_seqlen() else {}

    def rotate(rows: int) -> torch.Tensor:
        rotated: torch.Tensor = rope_utils.apply_rotary_pos_emb(
            tokens, table[:rows], config, bounds, cp_group=group, **told
        )
        return rotated

    own = [rotate(5), rotate(8)]  # of positions in a document, and of the micro-batch's tokens
    with rotary.on_the_device():
        return all(torch.equal(rotate(rows), expected) for rows, expected in zip((5, 8), own, strict=True))


def _shift_is_ours() -> bool:
    """Whether the shift of packed tokens gives what `rotary` gives."""
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    from thdprof.runtime.megatron import rotary

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
    tried={"autograd: gradients are reduced between the graphs of a chunk's pieces": _hooks_run_between_nodes},
)
MEGATRON = Package(
    name="megatron-core",
    root="megatron.core",
    oldest="0.19.1",
    newest_run="0.19.2",
    tried={
        "packed seq_idx: documents of Mamba layers are told apart by it alone": _seq_idx_is_kept,
        "unfused RoPE: captures rotate tokens without a look at boundaries on the host": _rope_is_ours,
        "roll_tensor: multi-token prediction shifts all documents of a micro-batch together": _shift_is_ours,
    },
    names="""
transformer.cuda_graphs | _set_capture_start _set_capture_end | hooks of DistributedDataParallel stay silent in captures
transformer.cuda_graphs | _set_warmup_start _set_warmup_end | nothing is recomputed in warm-ups
transformer.cuda_graphs:_CudagraphGlobalRecord | cudagraph_created | no layer can be added to recorded graphs
transformer.cuda_graphs:_CudagraphGlobalRecord | _enable_saved_tensors_observer | as above
transformer.cuda_graphs:CudaGraphManager.__init__ | cudagraph_runners global_mempool | graphs are counted and freed
transformer.cuda_graphs:_CudaGraphRunner.__init__ | status fwd_graph bwd_graph _GraphStatus | a backward is to come
distributed.distributed_data_parallel | _cudagraph_wgrad_ready_event | gradients are reduced without a .grad
distributed.distributed_data_parallel | bucket_groups expert_parallel_bucket_groups | gradients are being reduced
distributed.param_and_grad_buffer | is_last_microbatch | as above
transformer.transformer_block:TransformerBlock.forward | input_tensor pre_process | a pipeline stage's input
models.hybrid.hybrid_block:HybridStack.forward | input_tensor pre_process layers | as above
transformer.module:GraphableMegatronModule | _should_call_local_cudagraph cuda_graphs | layers are led to their graphs
transformer.module:GraphableMegatronModule | cuda_graph_manual_hooks | as above
ssm.mamba_mixer:MambaMixer | seq_idx cp | a capture runs over aliases of parameters in plain attributes
transformer.transformer_layer | _te_cuda_graph_capture _te_cuda_graph_replay | dropless experts run behind their router
transformer.transformer_layer | _get_submodules_under_cudagraphs mlp_norm_manager | as above
transformer.transformer_layer | recompute_pre_mlp_layernorm cudagraph_tensor_store | as above
transformer.moe.moe_layer:MoELayer | moe_layer_recompute cudagraph_tensor_store | experts are recomputed from the graph
transformer.moe.token_dispatcher | cudagraph_attrs valid_cudagraph_attrs | experts go on with the sizes of their tokens
transformer.moe.token_dispatcher | cuda_dtoh_point _comm_manager | as above
transformer.moe.router:TopKRouter | _apply_expert_bias local_tokens_per_expert | bias is counted outside of the graph
models.gpt.gpt_model:GPTModel.build_schedule_plan | packed_seq_params | the nodes of a schedule are led to graphs
models.common.model_chunk_schedule_plan | get_layer num_layers state chunk_state | as above
pipeline_parallel.utils:ScheduleNode | free_input | as above
transformer.multi_token_prediction | _get_embeddings _concat_embeddings mtp_model_layer | prediction is replayed
transformer.multi_token_prediction | _proj_and_transformer_layer _checkpointed_forward | as above
transformer.multi_token_prediction | _roll_tensor_packed_seq | documents are shifted together
models.common.embeddings.yarn_rotary_pos_embedding | get_cached_cos_sin | graphs need multi-latent tables in place
models.common.embeddings.yarn_rotary_pos_embedding | cos_cached sin_cached max_seq_len_cached | as above
models.common.embeddings.yarn_rotary_pos_embedding | offset_cached dtype_cached packed_seq_cached | as above
models.common.embeddings.rope_utils | _apply_rotary_pos_emb_thd _apply_rotary_pos_emb_bshd | captures replace the first
extensions.transformer_engine:TEDotProductAttention.forward | local_cp_size | dynamic context parallelism
transformer.attention | core_attention linear_proj linear_qkv q_layernorm | graphs.offload names these parts
transformer.multi_latent_attention | linear_q_proj linear_q_down_proj linear_q_up_proj kv_layernorm | as above
transformer.multi_latent_attention | linear_kv_down_proj linear_kv_up_proj linear_qkv_down_proj | as above
transformer.mlp:MLP | linear_fc1 linear_fc2 | as above
pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager | OFFLOAD_MGR _cur_forward_chunk | one a slot
pipeline_parallel.fine_grained_activation_offload:PipelineOffloadManager | _d2h_stream _h2d_stream | as above
pipeline_parallel.fine_grained_activation_offload:ChunkOffloadHandler | offload_groups _groups_to_offload | as above
pipeline_parallel.fine_grained_activation_offload:ChunkOffloadHandler | _groups_to_reload _reloading_group | as above
pipeline_parallel.fine_grained_activation_offload | _tensors _name _pools | as above
utils:get_batch_on_this_tp_rank | batch tp_rank has_cu_seqlens is_hybrid_cp | boundaries stay on the host
utils:get_batch_on_this_tp_rank | micro_batch_size broadcast_group broadcast_src_rank | as above
utils | flatten_batch_for_packed_sequences | as above
rerun_state_machine:RerunStateMachine | validate_result is_unexpectedly_large | losses of a step are checked together
rerun_state_machine:RerunStateMachine | should_run_forward_backward should_checkpoint_and_exit set_mode | as above
rerun_state_machine:RerunStateMachine | state_dict _restore_state state initial_result saved_results | as above
rerun_state_machine | error_injector should_inject_errors | as above
tensor_parallel.random | checkpoint CheckpointFunction CheckpointWithoutOutput | recomputing draws the forward's masks
tensor_parallel.random | _get_all_rng_states _set_all_rng_states | as above
transformer.module:MegatronModule.set_is_first_microbatch | is_first_microbatch | weights are quantized once a step
extensions.transformer_engine | _fused_impl te_checkpoint | fused operations are left out of graphs
transformer.moe.experts | _fused_ops | as above
""",
)
MEGATRON_LM = Package(
    name="megatron-core",
    root="megatron.training",
    oldest=MEGATRON.oldest,
    newest_run=MEGATRON.newest_run,
    names="""
training | setup_model_and_optimizer train training_log iteration | graphs begin behind the setup, and end with the loop
training | print_rank_last print_rank_0 get_tensorboard_writer get_wandb_writer | graphs are counted in its log
training | tensorboard_log_interval use_gloo_process_groups distributed_timeout_minutes | as above
""",
)
TRANSFORMER_ENGINE = Package(
    name="transformer-engine",
    root="transformer_engine",
    oldest="2.20.2",
    newest_run="2.20.2",
    names="""
pytorch.distributed | checkpoint get_all_rng_states | FP8 is recomputed by it, and captures register random states
pytorch.graph:make_graphed_callables | _order _num_layers_per_chunk | a chunk's layers share a memory pool
pytorch.graph | _reuse_graph_input_output_buffers reset set_capture_end | as above, also after a failed capture
pytorch.quantization:FP8GlobalStateManager | reduce_and_update_fp8_tensors | scales change after replays
pytorch.quantization | quantization_state | as above
pytorch.quantization | skip_fp8_weight_update_tensor fp8_tensors_recompute_buffer | graphs quantize weights if told to
pytorch.quantization | scale amax_history scaling_fwd scaling_bwd | a capture leaves scales as they were
pytorch.quantized_tensor | get_metadata get_usages update_usage | replays find quantized weights where they were
pytorch.module.base | fp8_meta _fp8_workspaces | as above
pytorch.module.base | wgrad_store wgrad_accumulation_and_reduce_hooks backward_dw | delayed gradients are in graphs
pytorch.module.linear | main_grad grad_added_to_main_grad | weight gradients are accumulated by kernels
""",
)
BRIDGE = Package(
    name="megatron-bridge",
    root="megatron.bridge",
    oldest="0.6.2",
    newest_run="0.6.2",
    names="""
peft.recompute | forward | it puts a forward on a block, which is kept around graphs
peft.lora_layers | TEFusedLoRALinear | it is refused
models.qwen_vl.modelling_qwen3_vl.model:Qwen3VLModel | language_model vision_model | its decoder takes images as tensors
models.qwen_vl.modelling_qwen3_vl.model:Qwen3VLModel | vision_transformer_config | as above
models.qwen_vl.modelling_qwen3_vl.transformer_block | _deepstack_process visual_pos_masks | as above
models.qwen_vl.modelling_qwen3_vl.transformer_block | deepstack_visual_embeds | as above
models.qwen_vl.modelling_qwen3_vl.rope:Qwen3VLMultimodalRotaryEmbedding | is_thd_format | as above
training.gpt_step:get_batch | get_batch_from_iterator | boundaries on the host are forgotten there
training.vlm_step:get_batch | get_batch_from_iterator | as above
training.pretrain | destroy_global_state | graphs are freed before the process groups
training.train:train | train_step | all ranks agree there if the run exits itself
training.utils.train_utils | print_rank_last | graphs are counted in the log line
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


def _inside(node: ast.AST | None) -> Iterator[ast.AST]:
    return iter(()) if node is None else ast.walk(node)


def _names_in(node: ast.AST | None, of: str) -> frozenset[str]:
    """Every name in the class or function `of` of a module, in the whole module for ""; none where it is not."""
    for part in filter(None, of.split(".")):
        node = next((n for n in _inside(node) if getattr(n, "name", None) == part), None)
    fields = ("id", "attr", "arg", "name", "asname", "value")
    found = (getattr(n, field, None) for n in _inside(node) for field in fields)
    return frozenset(name for name in found if isinstance(name, str))


@cache
def refusals(package: Package, root: Path | None = None) -> Sequence[str]:
    """A sentence for every probe that the package does not pass.

    Args:
        package: the package.
        root: the directory of its sources; None: where it would be imported from.
    """
    if root is None:
        spec = importlib.util.find_spec(package.root)
        if spec is None or not spec.submodule_search_locations:
            return [f"{package.root} cannot be found"]
        root = Path(next(iter(spec.submodule_search_locations)))
    told, why = [], ""
    for text, holds in package.tried.items():
        what, _, why = text.partition(": ")
        try:
            problem = "" if holds() else "does otherwise than before"
        except Exception as error:
            problem = f"fails ({type(error).__name__}: {error})"
        if problem:
            told.append(f"{what} {problem} ({why})")
    modules: dict[str, ast.Module | None] = {}
    for line in package.names.strip().splitlines():
        where, names, reason = line.split(" | ")
        why = why if reason == "as above" else reason
        module, _, of = where.partition(":")
        if module not in modules:
            base = root.joinpath(*module.split("."))
            file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
            modules[module] = ast.parse(file.read_bytes()) if file.is_file() else None
        there = _names_in(modules[module], of)
        if missing := [name for name in names.split() if name not in there]:
            told.append(f"{where} has no {', '.join(missing)} ({why})")
    return told


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
            bridge = package is BRIDGE
            wanted = "pip install megatron-bridge" if bridge else install_line("megatron,te")
            lines.append(f"{package.name} is not installed: {wanted}")
        elif Version(version).release < Version(package.oldest).release:
            lines.append(f"{package.name} {version}: the oldest version that thdprof takes is {package.oldest}")
        else:
            told = refusals(package)
            lines.extend(f"{package.name} {version}: {line}" for line in told)
            if not told and Version(version).release[:2] > Version(package.newest_run).release[:2]:
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
