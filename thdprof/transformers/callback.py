"""PlanCallback: trains by a plan with Hugging Face's Trainer or TRL's SFTTrainer."""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import TrainerCallback

from thdprof.errors import UsageError
from thdprof.megatron_limits.trainer import refuse_arguments, refuse_plan
from thdprof.plan import Plan, load_plan
from thdprof.runtime.stats import Stats
from thdprof.transformers import attention, refusals
from thdprof.transformers.boundaries import follow_collator
from thdprof.transformers.decoder import GraphedDecoder, without_random_states

if TYPE_CHECKING:
    from torch import nn

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
    """Makes a run follow a plan: `SFTTrainer(..., callbacks=[PlanCallback("plan.yaml")])`.

    The model's decoder layers are captured at the first micro-batch, and replayed wherever a micro-batch fits one of
    the plan's buckets. Embeddings, loss, evaluation, checkpoints and the model's state_dict are what they are without
    the callback. The counters go into the Trainer's log under `thdprof/`. One callback serves one run at a time.

    The model has its own forward back when the first `train` of a Trainer that was made with the callback ends, by an
    error too. A later `train` of the same Trainer that ends by an error leaves the model as it is, until the next one
    begins.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        *,
        replay: bool = True,
        stats: str | Path | None = None,
        attention: Literal["auto"] | attention.Backend = "auto",
        compile: bool = False,
    ) -> None:
        """A callback for one run on this rank.

        Args:
            plan: the plan to follow, or the file that `thdprof analyze` wrote it to.
            replay: False: pad as the plan says but run eagerly, for a run to compare with.
            stats: file to append the run's counters to, for `thdprof compare`; None for none.
            attention: the package whose attention kernels run on a GPU; auto: the first that is installed of
                flash_attn, torch and transformer_engine. A model that was loaded with one of transformers' flash
                attentions keeps it under auto.
            compile: whether torch.compile fuses the kernels of each layer, which the graphs then hold. Losses are those
                of compiled layers, with `replay` and without.

        Raises:
            DataError: the file is no plan.
        """
        self._plan = load_plan(Path(plan)) if isinstance(plan, str | Path) else plan
        self._replay, self._stats_file = replay, None if stats is None else Path(stats)
        self._wanted, self._compile = attention, compile
        self._decoder: GraphedDecoder | None = None
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
        """Check the plan against the run, and let the model's layers follow it.

        Raises:
            UsageError: what cannot be served, and settings that the plan was not made for; all of them at once.
        """
        del kwargs
        self._end()  # of a run that this callback was given to before
        if model is None or train_dataloader is None:
            raise UsageError("PlanCallback needs a Trainer that gives its callbacks the model and the data loader")
        trainer = trainer_in_call(self)
        if trainer is not None:  # what this callback adds to logs then reaches the loggers of the others
            callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
            callbacks.insert(0, callbacks.pop(callbacks.index(self)))
        on_gpu = getattr(args, "device", torch.device("cpu")).type == "cuda"
        decoder_module = refusals.decoder_of(model)
        name = getattr(getattr(decoder_module, "config", None), "_attn_implementation", None) or ""
        own = self._wanted == "auto" and "flash" in name  # one of transformers' flash attentions
        backend = None if own else attention.register(self._wanted)
        self._check(args, model, backend=backend, own=own, on_gpu=on_gpu)
        assert decoder_module is not None  # `refuse_model` has looked for it
        unseen = _FOLLOWED.get(decoder_module)
        if unseen is not None and (before := unseen()) is not None:
            before.give_back()  # from a run that an error has ended, unseen by its callback
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
        _FOLLOWED[decoder_module] = weakref.ref(decoder)

    def _check(self, args: Any, model: nn.Module, *, backend: Any, own: bool, on_gpu: bool) -> None:
        """Refuse the run with every reason there is, and warn of what makes predictions untrue.

        Raises:
            UsageError: naming each of them.
        """
        arguments = args.to_dict()
        lines = [
            *refuse_plan(self._plan),
            *refuse_arguments({"n_gpu": getattr(args, "n_gpu", 1), **arguments}, os.environ),
        ]
        lines += refusals.refuse_model(model, backend=backend, own_attention=own, on_gpu=on_gpu)
        if self._compile:
            lines += refusals.refuse_compiling(backend=backend, own_attention=own)
        refused, untrue = refusals.compare_settings(self._plan, arguments, getattr(args, "world_size", 1))
        lines += [f"{line}; analyse for this run" for line in refused]
        if lines:
            raise UsageError("thdprof cannot train this run by the plan:\n" + "\n".join(f"  - {n}" for n in lines))
        for line in untrue:
            logger.warning("thdprof: %s", line)
        unread = refusals.unread_settings(args, arguments, model)
        if unread:
            logger.warning(
                "thdprof has never looked at these settings, which are off their default: %s; compare the losses of "
                "some steps with those of a run without PlanCallback",
                ", ".join(unread),
            )

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
        stats = self.stats
        if stats is None:
            return
        self.last = total = _of_all_ranks(stats, getattr(args, "world_size", 1))
        if getattr(state, "is_world_process_zero", True):
            logger.info("thdprof: %s", total)
            if self._stats_file is not None:
                total.append_jsonl(self._stats_file, step=state.global_step, plan=self._plan.identity, all_ranks=True)
        self._end()

    def _end(self) -> None:
        """Free the graphs and give the model its own forward back; a second call does nothing."""
        decoder, self._decoder = self._decoder, None
        if decoder is not None:
            decoder.give_back()


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
    own = replace(stats, prediction=None, passes=deque(), steps=deque())
    torch.distributed.all_gather_object(ranks, own)
    total = Stats.of_ranks(ranks)
    for rank in ranks:
        total.decided.update(rank.decided)
    total.prediction = stats.prediction
    total.passes, total.steps, total.capture_s = stats.passes, stats.steps, stats.capture_s
    return total
