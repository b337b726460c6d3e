"""Megatron-LM's own training loop, `megatron.training.pretrain`, by a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thdprof.runtime.megatron import versions
from thdprof.runtime.megatron.install import Installation, install
from thdprof.runtime.megatron.opening import MetadataForm
from thdprof.runtime.megatron.replacing import replaced
from thdprof.runtime.megatron.trainers.host_boundaries import host_boundaries
from thdprof.runtime.megatron.trainers.observer import Observer
from thdprof.runtime.megatron.trainers.training_loops import (
    checked_once_a_step,
    for_megatron,
    is_agreed,
    packed_schedule_plans,
)

if TYPE_CHECKING:
    from thdprof.plan import Plan


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

    Args:
        say: takes one line for the log, once, where the pipeline has middle stages.
    """
    from megatron.core import parallel_state
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


logger = logging.getLogger(__name__)

_ITERATION = 3
"""Position of the step's number among the arguments of `training_log`."""


@contextmanager
def following(plan: Plan, *, replay: bool = True, stats: Path | None = None) -> Iterator[None]:
    """Inside the block, every `megatron.training.pretrain` trains by `plan`.

    Enter it before the training script is imported, because scripts import Megatron's functions by name. Graphs are
    installed when model, optimizer and checkpoint are ready, and closed when the loop ends, in whatever way.

    Args:
        plan: the plan to follow.
        replay: False: pad as the plan says but run eagerly.
        stats: file to append the run's counters to; None for none.

    Raises:
        VersionError: megatron-core or Transformer Engine lacks what thdprof relies on.
    """
    versions.check(*versions.INSTALL, versions.MEGATRON_LM)
    from megatron.training import training

    loop = _Loop(for_megatron(plan), replay=replay, stats=stats, training=training)
    with ExitStack() as stack:
        stack.callback(loop.end)  # for runs that install and never train, as with --skip-train
        stack.enter_context(host_boundaries(loop.peer_timeout))
        for change in (datasets_on_all_stages, packed_schedule_plans):
            stack.enter_context(change(lambda line: training.print_rank_0(f"thdprof: {line}")))
        stack.enter_context(checked_once_a_step(on_restore=loop.recapture))
        for name, function in loop.replacements().items():
            stack.enter_context(replaced(training, name, function))
        yield


class _Loop:
    """The functions of Megatron's training loop around which a plan is followed."""

    def __init__(self, plan: Plan, *, replay: bool, stats: Path | None, training: Any) -> None:
        self._plan, self._replay, self._stats, self._training = plan, replay, stats, training
        self._installation: Installation | None = None
        self._observer: Observer | None = None
        self._own_setup = training.setup_model_and_optimizer
        self._own_train, self._own_log = training.train, training.training_log

    def replacements(self) -> dict[str, Callable[..., Any]]:
        """Our functions by the names of Megatron's that they stand for."""
        return {"setup_model_and_optimizer": self._setup, "train": self._train, "training_log": self._log}

    def _setup(self, *args: Any, **kwargs: Any) -> Any:
        """Install the plan's graphs on the model, which has loaded its checkpoint."""
        from megatron.core.utils import get_model_config

        self.end()  # a run that was restarted in this process
        model, optimizer, scheduler = self._own_setup(*args, **kwargs)
        installation = install(
            model,
            self._plan,
            get_model_config(model[0]),
            replay=self._replay,
            form=MetadataForm(tokens_per_sample=getattr(self._training.get_args(), "seq_length", None)),
            say=lambda line: self._training.print_rank_0(f"thdprof: {line}"),
            host_timeout=self.peer_timeout(),
        )
        self._installation = installation
        self._observer = Observer(installation, self._plan, stats=self._stats, say=self._training.print_rank_0)
        return model, optimizer, scheduler

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; then tell what was observed, and free the graphs before process groups go."""
        try:
            with left_to_the_plan(self._training.get_args()):
                result = self._own_train(*args, **kwargs)
        except BaseException as error:
            with suppress(Exception):  # the GPU may be gone; the run's own error is the one to show
                self.end(together=is_agreed(error))
            raise
        self.end(together=True)
        return result

    def _log(self, *args: Any, **kwargs: Any) -> Any:
        """Log a step, with the counters in Megatron's own line and writers."""
        observer = self._observer
        if observer is None:
            return self._own_log(*args, **kwargs)
        own_print = self._training.print_rank_last
        iteration = kwargs["iteration"] if "iteration" in kwargs else args[_ITERATION]

        def with_counters(message: str) -> None:
            is_line = message.lstrip().startswith("[") and " iteration " in message
            own_print(message + observer.log_text() if is_line else message)

        with replaced(self._training, "print_rank_last", with_counters):
            result = self._own_log(*args, **kwargs)
        self._write(observer, iteration)
        observer.after_step(iteration)
        return result

    def _write(self, observer: Observer, iteration: int) -> None:
        training = self._training
        writer, wandb = training.get_tensorboard_writer(), training.get_wandb_writer()
        if writer is None or iteration % training.get_args().tensorboard_log_interval:
            return
        scalars = observer.scalars()
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
        if wandb:
            wandb.log(scalars, iteration)

    def peer_timeout(self) -> timedelta | None:
        """Timeout of process groups on the host; None where the run makes none (--disable-gloo-process-groups)."""
        args = self._training.get_args()
        return timedelta(minutes=args.distributed_timeout_minutes) if args.use_gloo_process_groups else None

    def recapture(self) -> None:
        """Drop all graphs: they would go on with the random states that they were captured with."""
        if self._installation is not None:
            self._installation.recapture()

    def end(self, *, together: bool = False) -> None:
        """Report what was observed and free the graphs; the second call does nothing. All ranks end here `together`, or
        this one alone.
        """
        installation, observer = self._installation, self._observer
        self._installation = self._observer = None
        if installation is None:
            return
        with ExitStack() as stack:
            stack.callback(installation.close)
            if observer is not None:
                observer.finish(together=together)
