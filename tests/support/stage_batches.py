"""Boundaries that every stage of a pipeline reads, through Megatron's own data loaders and schedules, on the host.

Each rank is a process of its own (`rank_processes`). It prints one JSON object: for each case what the rank's stages
read, in order, and the lines that were logged.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunMode, destroy_rerun_state_machine, initialize_rerun_state_machine
from megatron.training import training
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.global_vars import destroy_global_vars, get_args
from torch import distributed, nn
from torch.overrides import TorchFunctionMode

from support.gpu_stand_in import OnGpu
from support.megatron_referee import write_indexed_dataset
from support.plans import plan_of_shares
from support.tensor_parallel_batches import without_a_gpu
from thdprof.runtime.megatron import versions
from thdprof.runtime.megatron.decoder import packed_seq_params
from thdprof.runtime.megatron.trainers.megatron_lm import following

HIDDEN, SEQ_LENGTH, GLOBAL_BATCH = 8, 64, 8
TRAIN_STEPS, EVAL_ITERS = 2, 2
PHASES = ("train", "valid", "train", "valid", "test")
"""Steps and evaluations, in the order of a run that evaluates twice and at its end."""
COMMON = (
    f"--num-layers 4 --hidden-size {HIDDEN} --num-attention-heads 2 --seq-length {SEQ_LENGTH} "
    f"--max-position-embeddings {SEQ_LENGTH} --global-batch-size {GLOBAL_BATCH} --train-iters 4 --eval-interval 2 "
    f"--eval-iters {EVAL_ITERS} --lr 1e-4 --tokenizer-type NullTokenizer --vocab-size 100 --split 60,20,20 "
    "--num-workers 0 --dataloader-inter-document-masking --no-create-attention-mask-in-dataloader "
    "--transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm --distributed-backend gloo "
    "--untie-embeddings-and-output-weights"
)
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
CASES = {  # that with TP first: beside the groups of earlier cases, gloo connects no group of its ranks
    "PP 2, VPP 2, TP 2, two samples": f"{VIRTUAL} --tensor-model-parallel-size 2 --micro-batch-size 2",
    "PP 4": "--pipeline-model-parallel-size 4 --micro-batch-size 1",
    "PP 4, two samples, cyclic, evaluation of one": "--pipeline-model-parallel-size 4 --micro-batch-size 2 "
    "--dataloader-type cyclic --eval-micro-batch-size 1",
    "PP 4, all of the validation data": "--pipeline-model-parallel-size 4 --micro-batch-size 1 --full-validation "
    "--eval-global-batch-size 1",
    "PP 2, VPP 2, DP 2": f"{VIRTUAL} --micro-batch-size 1",
}


class OnHost(TorchFunctionMode):
    """Tensors that are made on the GPU are made on the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` with the host in the GPU's place."""
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Stage(nn.Module):
    """A stage of a pipeline that notes the boundaries of its micro-batches."""

    def __init__(self, config: Any, vp_stage: int | None, last: bool, note: Callable[..., None]) -> None:
        super().__init__()
        self.config, self.vp_stage, self._last, self._note = config, vp_stage, last, note
        self.model_type = ModelType.encoder_or_decoder
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self._received: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor]) -> None:
        """Take what the stage before sent."""
        self._received = tensors[0]

    def forward(self, tokens, position_ids, attention_mask, labels=None, loss_mask=None, packed_seq_params=None):
        """Hidden states as the next stage receives them, or the loss of every token."""
        self._note(packed_seq_params, tokens, labels)
        rows = get_args().micro_batch_size if self.training else get_args().eval_micro_batch_size
        x = self.weight * (torch.ones(SEQ_LENGTH, rows, HIDDEN) if self._received is None else self._received)
        return x.sum(dim=-1).transpose(0, 1).reshape(1, -1) if self._last else x


def read_by_stages(flags: list[str], *, script: Any, provider: Any) -> dict[str, list[Any]]:
    """What each of this rank's stages read in PHASES: phase, boundaries and longest document of every micro-batch.

    Args:
        flags: Megatron's arguments.
        script: a training script as a module, whose forward step is called.
        provider: the script's function that makes datasets.
    """
    with contextlib.redirect_stdout(io.StringIO()), mock.patch.object(sys, "argv", ["script.py", *flags]):
        args = parse_and_validate_args()
    args.iteration = 0
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    virtual = args.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size, virtual, create_gloo_process_groups=False
    )
    chunks, ranks = range(virtual or 1), args.pipeline_model_parallel_size
    stages = [chunk * ranks + parallel_state.get_pipeline_model_parallel_rank() for chunk in chunks]
    num_stages = ranks * len(chunks)
    seen: dict[str, list[Any]] = {str(stage): [] for stage in stages}
    phase = [""]

    def note(stage: int, params: Any, tokens: Any, labels: Any) -> None:
        assert (tokens is not None) == (stage == 0)
        assert (labels is not None) == (stage == num_stages - 1)
        boundaries = params.cu_seqlens_q.tolist()
        assert boundaries == params.cu_seqlens_kv.tolist()
        params.cu_seqlens_q = params.cu_seqlens_kv = params.cu_seqlens_q.as_subclass(OnGpu)
        assert packed_seq_params.read(params, cp_size=1, tail="none").host.tolist() == boundaries  # without a wait
        assert params.max_seqlen_q == params.max_seqlen_kv == np.diff(boundaries).max()
        seen[str(stage)].append([phase[0], boundaries, params.max_seqlen_q])

    config = core_transformer_config_from_args(args)
    model = [
        Stage(config, None if virtual is None else chunk, stage == num_stages - 1, partial(note, stage))
        for chunk, stage in zip(chunks, stages, strict=True)
    ]
    iterators = iterators_of(provider, virtual)
    forward_backward = get_forward_backward_func()
    for phase[0] in PHASES:
        training_now = phase[0] == "train"
        for module in model:
            module.train(training_now)
        samples = args.global_batch_size if training_now else args.eval_global_batch_size
        rows = args.micro_batch_size if training_now else args.eval_micro_batch_size
        for _ in range({"train": TRAIN_STEPS, "valid": args.eval_iters}.get(phase[0], EVAL_ITERS)):
            forward_backward(
                forward_step_func=script.forward_step,
                data_iterator=iterators[phase[0]],
                model=model if virtual else model[0],
                num_microbatches=samples // (rows * args.data_parallel_size),
                seq_length=SEQ_LENGTH,
                micro_batch_size=rows,
                forward_only=not training_now,
            )
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()
    destroy_num_microbatches_calculator()
    destroy_global_vars()
    return seen


def iterators_of(provider: Any, virtual: int | None) -> dict[str, Any]:
    """The data iterators of each phase, as `pretrain` makes them: a list of the chunks' where there are several."""
    make = training.build_train_valid_test_data_iterators
    if virtual is None:
        return dict(zip(("train", "valid", "test"), make(provider), strict=True))
    of_chunks = []
    for vp_stage in range(virtual):
        of_chunk = partial(provider, vp_stage=vp_stage)
        of_chunk.is_distributed = True  # type: ignore[attr-defined]
        of_chunks.append(make(of_chunk))
    return dict(zip(("train", "valid", "test"), map(list, zip(*of_chunks, strict=True)), strict=True))


@contextlib.contextmanager
def ranks_on_the_host(rank: int, world: int, store: str) -> Iterator[list[str]]:
    """This process as one of `world` ranks without GPUs, inside `following`; yields the lines that are logged."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), CUDA_DEVICE_MAX_CONNECTIONS="1")
    wait, lines = timedelta(seconds=200), list[str]()
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=wait)
    without_a_gpu()
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9)
    plan = plan_of_shares((0.9,), count=8, steps=1)
    with (
        mock.patch.object(versions, "check"),
        mock.patch.object(training, "print_rank_0", lines.append),
        OnHost(),
        following(plan),
    ):
        yield lines
    distributed.barrier()
    distributed.destroy_process_group()


def main(rank: int, world: int, store: str) -> None:
    """Read all cases' micro-batches and print what was read."""
    data = Path(store).with_name("documents")
    if rank == 0:
        lengths = np.random.default_rng(3).integers(3, 40, 300)
        write_indexed_dataset(data, lengths)
    with ranks_on_the_host(rank, world, store) as lines:
        from support import pretrain  # behind `following`, whose functions it imports by name

        distributed.barrier()
        given = [*COMMON.split(), "--data-path", str(data)]
        with mock.patch("megatron.core.datasets.utils.compile_helpers"):
            told = {
                name: read_by_stages([*given, *flags.split()], script=pretrain, provider=pretrain.datasets)
                for name, flags in CASES.items()
            }
    print(json.dumps({"stages": told, "lines": lines}))
