"""PlanCallback: trains by a plan with Hugging Face's Trainer or TRL's SFTTrainer."""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerCallback

from thdprof.errors import UsageError
from thdprof.megatron_limits.trainer import refuse_arguments, refuse_plan
from thdprof.plan import Plan, load_plan
from thdprof.runtime import startup
from thdprof.runtime.drift_watch import DriftWatch
from thdprof.runtime.rank_totals import RankTotals
from thdprof.runtime.stats import Stats
from thdprof.transformers import attention, refusals
from thdprof.transformers.boundaries import follow_collator
from thdprof.transformers.decoder import GraphedDecoder, without_random_states
from thdprof.transformers.inputs import gather_inputs

logger = logging.getLogger(__name__)


def trainer_in_call(callback: TrainerCallback) -> Any:
    """The Trainer that is calling `callback`, out of the calls that lead here; None where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        handler = getattr(owner, "callback_handler", None)
        if callback in getattr(handler, "callbacks", ()) and callable(getattr(owner, "train", None)):
            return owner
        frame = frame.f_back
    return None


def call_after_training(trainer: Any, end: Callable[[], None]) -> None:
    """Call `end` when the next `trainer.train` ends, by an error too; the Trainer has its own `train` again by then."""
    own = trainer.train
    before = vars(trainer).get("train")

    @functools.wraps(own)
    def train(*args: Any, **kwargs: Any) -> Any:
        try:
            return own(*args, **kwargs)
        finally:
            if vars(trainer).get("train") is train:  # another one's wrapper stays, and calls this one
                if before is None:
                    del trainer.train
                else:
                    trainer.train = before
            end()

    trainer.train = train


_FOLLOWED: weakref.WeakKeyDictionary[nn.Module, weakref.ref[GraphedDecoder]] = weakref.WeakKeyDictionary()
"""What runs each decoder that is following a plan. Only the decoder itself keeps it alive, by its changed forward."""


class PlanCallback(TrainerCallback):
    """Makes a run follow a plan: `SFTTrainer(..., callbacks=[PlanCallback()])`.

    Without a plan of the user's, one is made when training starts, from the Trainer's packed dataset, arguments, model
    and GPU, and written to `thdprof-plan.yaml` in `output_dir`. A later start with the same data and settings uses that
    file again. Where graphs do not pay, cannot serve the run or lack memory, training goes on as without the callback,
    and the log says why.

    The model's decoder layers are captured at the first micro-batch, and replayed wherever a micro-batch fits one of
    the plan's buckets. Embeddings, loss, evaluation, checkpoints and the model's state_dict are what they are without
    the callback. The counters go into the Trainer's log under `thdprof/`. One callback serves one run at a time.

    After every 100 steps the micro-batches of all ranks are compared with the plan. When the data has moved on, the log
    names the bucket that the plan lacks, and a revised plan for the next start is written beside the plan.

    The model has its own forward back when the first `train` of a Trainer that was made with the callback ends, by an
    error too. A later `train` of the same Trainer that ends by an error leaves the model as it is, until the next one
    begins.
    """

    def __init__(
        self,
        plan: Plan | str | Path | None = None,
        *,
        replay: bool = True,
        stats: str | Path | None = None,
        attention: Literal["auto"] | attention.Backend = "auto",
        compile: bool = False,
        require: bool = False,
        deadline_s: float = startup.DEADLINE_S,
    ) -> None:
        """A callback for one run on this rank.

        Args:
            plan: the plan to follow, or the file that `thdprof analyze` wrote it to; None: one is made when training
                starts.
            replay: False: pad as the plan says but run eagerly, for a run to compare with.
            stats: file to append the run's counters to, for `thdprof compare`; None for none.
            attention: the package whose attention kernels run on a GPU; auto: the first that is installed of
                flash_attn, torch and transformer_engine. A model that was loaded with one of transformers' flash
                attentions keeps it under auto.
            compile: whether torch.compile fuses the kernels of each layer, which the graphs then hold. Losses are those
                of compiled layers, with `replay` and without.
            require: without a plan: whether a run that is not given one at its start is an error.
            deadline_s: without a plan: seconds that planning may take; past them training goes on without one.

        Raises:
            DataError: the file is no plan.
        """
        self._plan = load_plan(Path(plan)) if isinstance(plan, str | Path) else plan
        self._path = Path(plan) if isinstance(plan, str | Path) else None
        self._plans_at_start, self._require, self._deadline_s = plan is None, require, deadline_s
        self._replay, self._stats_file = replay, None if stats is None else Path(stats)
        self._wanted, self._compile = attention, compile
        self._decoder: GraphedDecoder | None = None
        self._drift: tuple[DriftWatch, RankTotals] | None = None
        self._awaited = False
        self.last: Stats | None = None
        """The counters of all ranks together in the run that has ended last; None before."""

    @property
    def stats(self) -> Stats | None:
        """The counters of this rank so far; None outside of training."""
        return None if self._decoder is None else self._decoder.graphed.stats()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the end of the Trainer's `train` give the model back, also where an error ends it."""
        del args, state, control, kwargs
        trainer = trainer_in_call(self)
        if trainer is not None:
            call_after_training(trainer, self._end)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        train_dataloader: Any = None,
        **kwargs: Any,
    ) -> None:
        """Check the plan against the run, or make one, and let the model's layers follow it.

        Raises:
            UsageError: what cannot be served, and settings that the plan was not made for; all of them at once. Without
                a plan of the user's: one is required, and there is none.
        """
        del kwargs
        self._end()  # of a run that this callback was given to before
        if model is None or train_dataloader is None:
            raise UsageError("PlanCallback needs a Trainer that gives its callbacks the model and the data loader")
        trainer = trainer_in_call(self)
        on_gpu = getattr(args, "device", torch.device("cpu")).type == "cuda"
        decoder_module = refusals.decoder_of(model)
        unseen = None if decoder_module is None else _FOLLOWED.get(decoder_module)
        if unseen is not None and (before := unseen()) is not None:
            before.give_back()  # from a run that an error has ended, unseen by its callback
        name = getattr(getattr(decoder_module, "config", None), "_attn_implementation", None) or ""
        own = self._wanted == "auto" and "flash" in name  # one of transformers' flash attentions
        backend = None if own else attention.register(self._wanted)
        find = partial(self._find_refusals, args, model, backend=backend, own=own, on_gpu=on_gpu)
        if self._plans_at_start:
            dataset = getattr(trainer, "train_dataset", None)
            self._plan = self._plan_at_start(args, model, dataset, lambda plan: find(plan)[0])
            if self._plan is None:
                return
        assert self._plan is not None
        if not self._plan.captured:
            logger.warning("thdprof: the plan captures nothing, so that training goes on without graphs")
            return
        self._check(args, model, *find(self._plan))
        if trainer is not None:  # what this callback adds to logs then reaches the loggers of the others
            callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
            callbacks.insert(0, callbacks.pop(callbacks.index(self)))
        assert decoder_module is not None  # `refuse_model` has looked for it
        decoder = GraphedDecoder(
            decoder_module,
            with_covered_tail(self._plan),
            replay=self._replay,
            reduced_by_hooks=getattr(args, "world_size", 1) > 1,
            compile=self._compile,
        )
        with ExitStack() as following:
            following.enter_context(decoder.following())
            following.enter_context(without_random_states(decoder_module))
            # no contexts: of a run that nothing has ended, they would change the next one's when they are collected
            following.callback(follow_collator(train_dataloader))
            if not own:
                following.callback(decoder.choose_attention(attention.IMPLEMENTATION))
            decoder.changes = following.pop_all()
        self._decoder = decoder
        watch = DriftWatch(self._plan, path=self._path or _find_plan_path(args), say=logger.warning)
        self._drift = watch, RankTotals(self._plan)
        _FOLLOWED[decoder_module] = weakref.ref(decoder)

    def _plan_at_start(
        self, args: Any, model: nn.Module, dataset: Any, refusals_of: Callable[[Plan | None], list[str]]
    ) -> Plan | None:
        """The plan that is made now, on rank 0 for all; None where training goes on without one."""
        ranks, device = startup.Ranks.find(), startup.find_device()

        def gather(folder: Path, check_time: Callable[[], None]) -> startup.Inputs:
            if refused := refusals_of(None):
                raise startup.NoPlanError("; ".join(refused))
            if device is None:
                raise startup.NoPlanError(startup.NO_GPU)
            config = getattr(refusals.decoder_of(model), "config", None)
            return gather_inputs(args, model, config, dataset, device.name, folder=folder, check_time=check_time)

        start = startup.Start(
            path=_find_plan_path(args),
            gather=gather,
            objections=refusals_of,
            say=lambda line: logger.warning("thdprof: %s", line) if ranks.rank == 0 else None,
            deadline_s=self._deadline_s,
            require=self._require,
        )
        return start.plan(ranks, device)

    def _find_refusals(
        self, args: Any, model: nn.Module, plan: Plan | None, *, backend: Any, own: bool, on_gpu: bool
    ) -> tuple[list[str], list[str]]:
        """Every reason against the run, and what makes the plan's predictions untrue. Without a plan: the reasons that
        hold by any plan.
        """
        arguments = args.to_dict()
        lines = [] if plan is None else [*refuse_plan(plan)]
        known = {"n_gpu": getattr(args, "n_gpu", 1), "use_cpu": not on_gpu}
        known["weights_dtype"] = refusals.find_weights_dtype(model)
        if (mixed := getattr(args, "mixed_precision", None)) in ("bf16", "fp16"):  # accelerate's own, too
            known[mixed] = True
        lines += refuse_arguments({**arguments, **known}, os.environ)
        lines += refusals.refuse_model(model, backend=backend, own_attention=own, on_gpu=on_gpu)
        if self._compile:
            lines += refusals.refuse_compiling(backend=backend, own_attention=own)
        if plan is None:
            return lines, []
        refused, untrue = refusals.compare_settings(plan, arguments, getattr(args, "world_size", 1))
        return [*lines, *(f"{line}; analyse for this run" for line in refused)], untrue

    def _check(self, args: Any, model: nn.Module, lines: Sequence[str], untrue: Sequence[str]) -> None:
        """Refuse the run with every reason there is, and warn of what makes predictions untrue.

        Raises:
            UsageError: naming each of them.
        """
        if lines:
            raise UsageError("thdprof cannot train this run by the plan:\n" + "\n".join(f"  - {n}" for n in lines))
        for line in untrue:
            logger.warning("thdprof: %s", line)
        unread = refusals.unread_settings(args, args.to_dict(), model)
        if unread:
            logger.warning(
                "thdprof has never looked at these settings, which are off their default: %s; compare the losses of "
                "some steps with those of a run without PlanCallback",
                ", ".join(unread),
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the counters of all ranks up when it is time to compare them, and look at them a step later."""
        del args, control, kwargs
        self._look_for_drift()
        if self._drift is None or self._decoder is None or not self._drift[0].end_step(state.global_step):
            return
        (watch, totals), stats = self._drift, self._decoder.graphed.stats()
        totals.begin([stats])
        watch.take(stats)
        self._awaited = True

    def _look_for_drift(self) -> None:
        """Compare the sums that were begun last with the plan, if any."""
        stats = self.stats if self._awaited else None
        self._awaited = False
        if stats is not None and self._drift is not None:
            watch, totals = self._drift
            (of_all_ranks,), _ = totals.end()
            watch.look(of_all_ranks, captured_bytes=stats.captured_bytes)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the counters to what the Trainer logs."""
        del args, control, kwargs
        stats = self.stats
        if stats is None or logs is None or "loss" not in logs:
            return
        scalars = stats.scalars()
        logs.update(scalars)
        if state.log_history:
            state.log_history[-1].update(scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write and tell what was observed, and free the graphs."""
        del control, kwargs
        stats, plan = self.stats, self._plan
        if stats is None or plan is None:
            return
        self._look_for_drift()
        self.last = total = _of_all_ranks(stats, getattr(args, "world_size", 1))
        if getattr(state, "is_world_process_zero", True):
            logger.info("thdprof: %s", total)
            if self._stats_file is not None:
                total.append_jsonl(self._stats_file, step=state.global_step, plan=plan.identity, all_ranks=True)
        self._end()

    def _end(self) -> None:
        """Free the graphs and give the model its own forward back; a second call does nothing."""
        decoder, self._decoder = self._decoder, None
        self._drift, self._awaited = None, False
        if decoder is not None:
            decoder.give_back()


def _find_plan_path(args: Any) -> Path:
    """The file of a plan that is made when training starts."""
    return Path(args.output_dir) / startup.PLAN_NAME


def with_covered_tail(plan: Plan) -> Plan:
    """`plan`, whose graphs' documents cover all tokens: attention leaves what is behind the last one uninitialised."""
    if plan.graphs.tail_policy != "none":
        return plan
    return plan.model_copy(update={"graphs": plan.graphs.model_copy(update={"tail_policy": "extend_last"})})


def _of_all_ranks(stats: Stats, world_size: int) -> Stats:
    if world_size < 2 or not torch.distributed.is_initialized():
        return stats
    ranks: list[Any] = [None] * torch.distributed.get_world_size()
    # the prediction is the same on all ranks, and times are those of this one
    own = replace(stats, prediction=None, passes=deque(), steps=deque(), shapes=deque())
    torch.distributed.all_gather_object(ranks, own)
    total = Stats.of_ranks(ranks)
    for rank in ranks:
        total.decided.update(rank.decided)
    total.prediction = stats.prediction
    total.passes, total.steps, total.capture_s = stats.passes, stats.steps, stats.capture_s
    return total
