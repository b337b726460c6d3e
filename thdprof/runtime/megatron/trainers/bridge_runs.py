"""What a run of Megatron-Bridge is configured for, what of it cannot follow a plan, and its batches' boundaries."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from thdprof.compare.fit import Misfit, misfits
from thdprof.megatron_limits.run import ends_at_router, find_experts
from thdprof.plan import Plan
from thdprof.runtime.megatron.decoder.packed_seq_params import keep_on_host
from thdprof.runtime.megatron.refusals import SettingsError, averages_over_all_ranks
from thdprof.runtime.megatron.trainers.host_boundaries import attach_host_values, host_boundaries
from thdprof.runtime.replacing import replaced
from thdprof.runtime.startup import Inputs, NoPlanError, digest_files, files_of
from thdprof.training import shared_capture_ranks

FIELDS: Mapping[str, str] = {
    "seq_length": "dataset.seq_length (offline_packing_specs.packed_sequence_size)",
    "micro_batch_size": "train.micro_batch_size",
    "global_batch_size": "train.global_batch_size",
    "data_parallel_size": "data-parallel size (ranks / tensor, pipeline and context parallel sizes)",
    "context_parallel_size": "model.context_parallel_size",
    "pipeline_parallel_size": "model.pipeline_model_parallel_size",
    "virtual_pipeline_size": "model.virtual_pipeline_model_parallel_size",
    "shared_capture_ranks": "data-parallel ranks that share experts (model.expert_model_parallel_size)",
    "loader": "dataset.dataloader_type",
    "data_sharding": "dataset.data_sharding",
    "drop_last": "dataset.drop_last",
    "seed": "dataset.seed (random_seed)",
    "split": "dataset.split",
    "weights": "dataset.blend (weights)",
    "train_samples": "samples of the run (train.train_iters x train.global_batch_size)",
    "max_num_samples": "dataset.max_train_samples",
    "pad_to_max_length": "dataset.dataset_kwargs['pad_to_max_length']",
    "pad_seq_to_mult": "dataset.offline_packing_specs.pad_seq_to_mult",
    "dataset": "dataset.offline_packing_specs.packed_train_data_path (blend)",
}
"""What Bridge's configuration calls the settings of a run."""


def misfits_of(config: Any, plan: Plan) -> list[Misfit]:
    """Every difference between the run that `plan` was made for and that of a validated ConfigContainer of Bridge."""
    return misfits(plan, settings_of(config), data_paths=data_paths_of(config))


def settings_of(config: Any) -> dict[str, Any]:
    """The run's settings; those that Bridge's validated ConfigContainer does not tell are missing."""
    model, train, dataset = config.model, config.train, config.dataset
    settings: dict[str, Any] = {
        "seq_length": model.seq_length,
        "micro_batch_size": train.micro_batch_size,
        "data_parallel_size": config.data_parallel_size,
        "context_parallel_size": model.context_parallel_size,
        "pipeline_parallel_size": model.pipeline_model_parallel_size,
        "virtual_pipeline_size": model.virtual_pipeline_model_parallel_size,
    }
    settings |= _shared_captures(model, config.data_parallel_size)
    if not getattr(train, "rampup_batch_size", None):
        settings["global_batch_size"] = train.global_batch_size
        if train.train_iters:
            settings["train_samples"] = train.train_iters * train.global_batch_size
    loader = getattr(dataset, "dataloader_type", None)
    if loader in ("single", "cyclic", "batch"):
        settings["loader"] = loader
    if loader == "cyclic":
        settings["data_sharding"] = dataset.data_sharding
    if loader == "batch":
        settings["drop_last"] = dataset.drop_last and getattr(train, "num_epochs", None) is None
    for name in ("seed", "random_seed"):  # of packed rows and of a stream of documents
        if hasattr(dataset, name):
            settings["seed"] = getattr(dataset, name)
            break
    specs = _packing(config)
    if specs is not None:
        settings["seq_length"] = specs.packed_sequence_size
        settings["max_num_samples"] = dataset.max_train_samples
        settings["pad_to_max_length"] = bool((dataset.dataset_kwargs or {}).get("pad_to_max_length", False))
        settings["pad_seq_to_mult"] = specs.pad_seq_to_mult or 1
    elif getattr(dataset, "split", None):
        settings["split"] = dataset.split
    if specs is None and getattr(dataset, "blend", None):
        settings["weights"] = dataset.blend[1]
    return settings


def _shared_captures(model: Any, data_parallel_size: int) -> dict[str, int]:
    """How many ranks decide together, for experts: padded ones exchange tokens inside graphs, dropless ones do not."""
    experts, over_all = find_experts(model), averages_over_all_ranks(model)
    if experts == "none":
        return {}
    if ends_at_router(experts, getattr(model, "moe_token_dispatcher_type", None)):
        return {"shared_capture_ranks": data_parallel_size} if over_all else {}
    ranks = shared_capture_ranks(
        data_parallel_size=data_parallel_size,
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        context_parallel_size=model.context_parallel_size,
        expert_model_parallel_size=model.expert_model_parallel_size,
        expert_tensor_parallel_size=model.expert_tensor_parallel_size,
        global_aux_loss=over_all,
    )
    return {"shared_capture_ranks": ranks}


def data_paths_of(config: Any) -> list[str] | None:
    """Paths of the run's training data; None where Bridge finds or makes the files itself."""
    specs = _packing(config)
    if specs is not None:
        packed = specs.packed_train_data_path
        return None if packed is None else [str(packed)]
    blend = getattr(config.dataset, "blend", None)
    return None if not blend else [str(path) for path in blend[0]]


def gather_inputs(config: Any, gpu: str, *, folder: Path) -> Inputs:
    """What the analysis of this run reads, with files in `folder`.

    Raises:
        NoPlanError: the run's data is not in files that can be named before training.
    """
    paths = data_paths_of(config)
    if not paths:
        raise NoPlanError("Megatron-Bridge finds or makes this run's data itself: analyse its files, and give the plan")
    settings, settings_file, recipe = settings_of(config), folder / "settings.yaml", folder / "recipe.yaml"
    settings_file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    config.to_yaml(str(recipe))
    model = yaml.safe_load(recipe.read_text(encoding="utf-8")).get("model")
    words = [*paths, "--settings", str(settings_file), "--model", str(recipe), "--gpu", gpu]
    return Inputs(words=words, facts=[settings, model, gpu, digest_files(files_of(paths))])


def pads_to_constant(config: Any) -> bool:
    """Whether collate_fn pads every micro-batch's boundaries to one length for the whole dataset."""
    specs = _packing(config)
    return specs is not None and bool(specs.pad_cu_seqlens)


def pads_documents(config: Any) -> bool:
    """Whether batches tell of padding between documents: rows that were packed beforehand may have some, and a step
    that packs samples itself, as qwen3_vl_step does, always says so.
    """
    specs, dataset = _packing(config), config.dataset
    in_step = ("enable_in_batch_packing", "defer_in_batch_packing_to_step")
    if all(getattr(dataset, name, False) for name in in_step):
        return True
    return specs is not None and (specs.pad_seq_to_mult or 1) > 1


def _packing(config: Any) -> Any:
    """Bridge's PackedSequenceSpecs; None where rows are not packed beforehand."""
    dataset = config.dataset
    return dataset.offline_packing_specs if getattr(dataset, "enable_offline_packing", False) else None


def refusals(config: Any, plan: Plan, *, replay: bool = True) -> Iterator[str]:
    """One line for every setting in the way that `install` does not refuse itself, with the field to change."""
    if plan.graphs.impl == "local":
        yield (
            "graphs.impl is local, whose graphs Megatron-Bridge would capture itself: analyse with --impl chunk or "
            "transformer_engine"
        )
    if plan.graphs.impl == "transformer_engine" and getattr(config.model, "cuda_graph_impl", "none") != "none":
        yield (
            f"cuda_graph_impl is {config.model.cuda_graph_impl!r}: Megatron-Bridge would capture the layers itself; "
            "set it to 'none'"
        )
    restart = getattr(config, "inprocess_restart", None)
    if restart is not None and restart.enabled:
        yield "inprocess_restart.enabled is True: a restart in the same process leaves no way to free graphs; set False"
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(config.dist, name, False):
            yield f"dist.{name} is True: parameters move in memory; set it to False, for DistributedDataParallel"
    if getattr(config.dist, "use_decentralized_pg", False):
        yield (
            "dist.use_decentralized_pg is True: thdprof asks megatron-core's parallel_state for the groups; set it to "
            "False"
        )
    own_size = getattr(config.model, "context_parallel_size", 1)
    if getattr(config.dist, "eval_context_parallel_size", None) not in (None, own_size):
        yield (
            f"dist.eval_context_parallel_size is {config.dist.eval_context_parallel_size}: evaluation would rebind the "
            f"groups of captured layers; set it to None or {own_size}"
        )
    if not (replay and plan.captured):
        return
    if not config.rng.te_rng_tracker:
        yield "rng.te_rng_tracker is False: random states must be such that graphs can hold them; set it to True"
    inspection = getattr(config, "tensor_inspect", None)
    if inspection is not None and inspection.enabled:
        yield "tensor_inspect.enabled is True: a replay runs none of its inspections; set it to False"
    if getattr(config.optimizer, "optimizer_cuda_graph", False):
        yield "optimizer.optimizer_cuda_graph is True: it was not checked beside other graphs; set it to False"
    if getattr(config.model, "moe_expert_rank_capacity_factor", None) is not None:
        yield (
            "model.moe_expert_rank_capacity_factor is set: Bridge reruns steps whose experts overflow without graphs; "
            "set it to None"
        )


def joined(lines: Sequence[str], error: SettingsError | None) -> SettingsError:
    """All reasons in one error."""
    heading = (
        "thdprof cannot follow the plan in this run of Megatron-Bridge (a name without a dot is a field of model):"
    )
    own = [] if error is None else [line for line in str(error).splitlines() if line.startswith("- ")]
    if error is not None and not own:
        own = [f"- {error}"]
    return SettingsError("\n".join([heading, *(f"- {line}" for line in lines), *own]))


_BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
"""Entries of a batch that end in entries without a document; the last two are missing if documents are not padded."""
_LONGEST = ("max_seqlen_q", "max_seqlen_kv")


@contextmanager
def host_boundaries_of_bridge(*steps: Any, constant_length: bool = False) -> Iterator[None]:
    """Inside the block, micro-batches of Bridge's steps keep their boundaries on the host, too.

    Bridge's data loaders run on every rank that decides, so that no rank needs to tell another. Its `get_batch` copies
    the boundaries to the GPU and forgets those of the host.

    With `constant_length` they also lose the entries that hold no document, and get the length of their own longest
    document, so that a micro-batch takes the graph of its own shape.

    Args:
        steps: modules of megatron.bridge.training: gpt_step, and vlm_step of models that take images.
        constant_length: whether collate_fn pads boundaries to one length for the whole dataset (`pad_cu_seqlens`).
    """
    with ExitStack() as stack:
        stack.enter_context(host_boundaries())
        for step in steps:
            read = _remembering(step.get_batch_from_iterator, constant_length=constant_length)
            stack.enter_context(replaced(step, "get_batch_from_iterator", read))
        yield


def _remembering(own: Callable[..., dict[str, Any]], *, constant_length: bool) -> Callable[..., dict[str, Any]]:
    """get_batch_from_iterator, whose batches know their boundaries on the host."""

    def get_batch(data_iterator: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        on_host: dict[str, Any] = {}

        def note(batch: dict[str, Any]) -> dict[str, Any]:
            nonlocal on_host
            on_host = batch
            return batch

        source = iter(lambda: note(next(data_iterator)), None)  # Megatron's iterators only know next()
        batch = own(source, *args, **kwargs)
        if batch.get("cu_seqlens_q") is not None:
            _know(batch, on_host, constant_length=constant_length)
        elif batch.get("cu_seqlens") is not None:
            _keep_legacy(batch, on_host)
        return batch

    return get_batch


def _know(batch: dict[str, Any], on_host: dict[str, Any], *, constant_length: bool) -> None:
    """Let the boundaries of `batch` carry the values that collate_fn made, [1, documents + 1] each."""
    names = [name for name in _BOUNDARIES if batch.get(name) is not None]
    values = {name: on_host[name] for name in names if _is_row(on_host.get(name))}
    if len(values) < len(names):
        return
    if constant_length:
        in_memory = values.get("cu_seqlens_q_padded", values["cu_seqlens_q"])
        entries = num_filled(in_memory.reshape(-1).numpy())
        values = {name: value[..., :entries] for name, value in values.items()}
        longest = int(in_memory[..., :entries].diff().max())
        for name in _LONGEST:
            if batch.get(name) is not None:
                batch[name] = torch.full_like(batch[name], longest)
    for name, value in values.items():
        batch[name] = attach_host_values(batch[name][..., : value.shape[-1]], value)


def _keep_legacy(batch: dict[str, Any], on_host: dict[str, Any]) -> None:
    """Remember boundaries of Bridge's older form, which end in -1 and come with the position of the first of them."""
    in_memory, valid = _without_end(on_host, "cu_seqlens"), _without_end(on_host, "cu_seqlens_unpadded")
    if in_memory is None:
        return
    if batch.get("cu_seqlens_unpadded") is None:
        keep_on_host(batch["cu_seqlens"], in_memory)
    elif valid is not None:
        keep_on_host(batch["cu_seqlens_unpadded"], valid, in_memory)


def _without_end(on_host: dict[str, Any], name: str) -> NDArray[np.int32] | None:
    end = on_host.get(f"{name}_argmin")
    if not _is_row(on_host.get(name)) or end is None:
        return None
    filled: NDArray[np.int32] = on_host[name].reshape(-1)[: int(end)].numpy()
    return filled


def num_filled(in_memory: NDArray[np.integer]) -> int:
    """Number of boundaries up to the end of the last document with tokens; at least 2. The last one repeats."""
    return max(2, int(np.searchsorted(in_memory, in_memory[-1])) + 1)


def _is_row(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dtype == torch.int32
        and value.numel() == value.shape[-1] > 1
    )
