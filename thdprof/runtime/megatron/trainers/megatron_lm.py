"""Megatron-LM's own training loop, `megatron.training.pretrain`, by a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from thdprof.plan import Plan
from thdprof.runtime.megatron import versions
from thdprof.runtime.megatron.opening import MetadataForm
from thdprof.runtime.megatron.trainers.host_boundaries import host_boundaries
from thdprof.runtime.megatron.trainers.observer import write_scalars
from thdprof.runtime.megatron.trainers.training_loops import (
    FollowedRun,
    checked_once_a_step,
    find_host_timeout,
    packed_schedule_plans,
)
from thdprof.runtime.replacing import replaced


def left_to_the_plan(args: Any) -> AbstractContextManager[None]:
    """A context in which Megatron's loop finds no graphs to capture among its arguments.

    With `--cuda-graph-impl transformer_engine` the model is built for graphs of layers, which the plan captures. The
    loop would capture them again, of whichever boundaries it meets, after its own warm-up steps. The model's
    TransformerConfig keeps its value.
    """
    if getattr(args, "cuda_graph_impl", "none") != "transformer_engine":
        return nullcontext()
    return replaced(args, "cuda_graph_impl", "none")


READ_BY_ALL = (
    "--dataloader-inter-document-masking: every stage of the pipeline builds the datasets and reads its documents' "
    "boundaries from them, since Megatron-LM 0.19 builds none for middle stages"
)


@contextmanager
def datasets_on_all_stages(say: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, datasets with boundaries between documents are built for every stage and virtual stage.

    With `--dataloader-inter-document-masking` every stage reads a micro-batch, but the scripts of Megatron-LM 0.19
    build their datasets for the first and last stage, and for stages that predict further tokens, alone: a middle stage
    ends in its first micro-batch. The samplers of one data-parallel rank give all its stages the same samples, as they
    do for the first and the last one, so that boundaries need no message.

    The tensor-parallel ranks of a stage that read no data go on reading none.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    own_init = BlendedMegatronDatasetBuilder.__init__
    lines = [READ_BY_ALL]

    def init(builder: Any, *args: Any, **kwargs: Any) -> None:
        own_init(builder, *args, **kwargs)
        masked = getattr(builder.config, "inter_document_masking", False)
        if not masked or not parallel_state.model_parallel_is_initialized():
            return
        is_built_by_script = builder.is_built_on_rank
        builder.is_built_on_rank = lambda: is_built_by_script() or parallel_state.get_tensor_model_parallel_rank() == 0
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        if virtual * parallel_state.get_pipeline_model_parallel_world_size() > 2 and lines:
            say(lines.pop())

    with replaced(BlendedMegatronDatasetBuilder, "__init__", init):
        yield


_ITERATION = 3
"""Position of the step's number among the arguments of `training_log`."""


@contextmanager
def following(
    plan: Plan,
    *,
    replay: bool = True,
    stats: Path | None = None,
    is_refused: Callable[[Sequence[str]], bool] | None = None,
    path: Path | None = None,
) -> Iterator[None]:
    """Inside the block, every `megatron.training.pretrain` trains by `plan`.

    Enter it before the training script is imported, because scripts import Megatron's functions by name. Graphs are
    installed when model, optimizer and checkpoint are ready, and closed when the loop ends, in whatever way.

    Args:
        replay: False: pad as the plan says but run eagerly.
        stats: file to append the run's counters to; None for none.
        is_refused: called on every rank with what graphs cannot serve of its model, which differs between pipeline
            stages; returns, on all ranks the same, whether training goes on without graphs. None: that is an error.
        path: the plan's file, beside which a revised one is written when the data has moved on; None for none.

    Raises:
        VersionError: megatron-core or Transformer Engine lacks what thdprof relies on.
    """
    versions.check(*versions.INSTALL, versions.MEGATRON_LM)
    from megatron.training import training

    run = FollowedRun(plan, replay=replay, stats=stats, say=lambda line: training.print_rank_0(line), path=path)
    with ExitStack() as stack:
        stack.callback(run.end)  # for runs that install and never train, as with --skip-train
        stack.enter_context(host_boundaries(lambda: find_host_timeout(training.get_args())))
        stack.enter_context(datasets_on_all_stages(run.say))
        stack.enter_context(packed_schedule_plans(run.say))
        stack.enter_context(checked_once_a_step(on_restore=run.recapture))
        for name, function in _replacements(run, training, is_refused).items():
            stack.enter_context(replaced(training, name, function))
        yield


def _replacements(
    run: FollowedRun, training: Any, is_refused: Callable[[Sequence[str]], bool] | None
) -> dict[str, Callable[..., Any]]:
    """The functions around which `run` is followed, by the names of Megatron's own in the module `training`."""
    own_setup, own_train, own_log = training.setup_model_and_optimizer, training.train, training.training_log

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        run.end()  # a run that was restarted in this process
        model, optimizer, scheduler = own_setup(*args, **kwargs)
        if is_refused is not None and is_refused(run.find_refusals(model)):
            return model, optimizer, scheduler
        settings = training.get_args()
        form = MetadataForm(tokens_per_sample=getattr(settings, "seq_length", None))
        run.install(model, form=form, host_timeout=find_host_timeout(settings))
        run.observe()
        return model, optimizer, scheduler

    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            with nullcontext() if run.observer is None else left_to_the_plan(training.get_args()):
                result = own_train(*args, **kwargs)
        except BaseException as error:
            run.end_by(error)
            raise
        run.end(together=True)  # before process groups go
        return result

    def training_log(*args: Any, **kwargs: Any) -> Any:
        observer = run.observer
        if observer is None:
            return own_log(*args, **kwargs)
        with run.counted_in(training):
            result = own_log(*args, **kwargs)
        iteration = kwargs["iteration"] if "iteration" in kwargs else args[_ITERATION]
        writer, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
        if writer is not None and iteration % training.get_args().tensorboard_log_interval == 0:
            write_scalars(observer.scalars(), iteration, tensorboard=writer, wandb=wandb)
        observer.after_step(iteration)
        return result

    return {"setup_model_and_optimizer": setup_model_and_optimizer, "train": train, "training_log": training_log}
