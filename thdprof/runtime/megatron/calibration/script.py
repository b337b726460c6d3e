"""`calibrate_script`: measures the training steps of a launch script's own model, and makes a cost table of them."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from thdprof.dispatch import Bucket, FallbackReason
from thdprof.errors import MachineError, UsageError
from thdprof.runtime.calibrate import SCHEMA, slot_costs
from thdprof.runtime.megatron import decoder_surroundings, refusals, rotary, versions
from thdprof.runtime.megatron.calibration import arguments
from thdprof.runtime.megatron.calibration import steps as training_steps
from thdprof.runtime.megatron.calibration.solve import Measured, Scale, Solved, layers_that_fit, solve
from thdprof.runtime.megatron.calibration.steps import MicroBatch, Shape, Training
from thdprof.runtime.megatron.decoder.decoder import (
    Decoder,
    decoder_of,
    find_replayed_predictions,
    prediction_layers,
)
from thdprof.runtime.megatron.decoder.parts import facts_of, unwrap_model
from thdprof.runtime.megatron.kinds.chunk import ChunkGraphs
from thdprof.runtime.megatron.refusals import SettingsError
from thdprof.runtime.megatron.run_stamp import stamp_here
from thdprof.words import install_line

LEAST_ROUNDS = 3
"""Rounds without which a median says little; fewer are taken only where the budget ends."""


def medians[K: Hashable](
    variants: Mapping[K, Callable[[], float]],
    *,
    rounds: int,
    deadline: float,
    progress: Callable[[str], None],
    now: Callable[[], float] = time.monotonic,
    agreed: Callable[[bool], bool] = bool,
) -> tuple[dict[K, float], int]:
    """The median of each variant's times, and the number of rounds; at least one round is made.

    A round is begun only if it is expected to end before the deadline, as the longest one so far did. `deadline` is in
    seconds of the clock `now`; `agreed` returns rank 0's answer on all ranks.
    """
    times: dict[K, list[float]] = {key: [] for key in variants}
    longest = 0.0
    done = 0
    while done < rounds and (done == 0 or agreed(now() + longest <= deadline)):
        began = now()
        for key, measure in variants.items():
            times[key].append(measure())
        longest = max(longest, now() - began)
        done += 1
        progress(f"round {done} of at most {rounds}: {longest:.1f} s")
    return {key: statistics.median(values) for key, values in times.items()}, done


def timed(run: Callable[[], None], *, repeat: int) -> float:
    """Milliseconds of one of the `repeat` pieces of work that `run` does, on the slowest rank."""
    several = torch.distributed.get_world_size() > 1
    torch.cuda.synchronize()
    if several:
        torch.distributed.barrier()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    ms = (time.perf_counter() - began) * 1000 / repeat
    if several:
        slowest = torch.tensor(ms, dtype=torch.float64, device="cuda")
        torch.distributed.all_reduce(slowest, op=torch.distributed.ReduceOp.MAX)
        ms = float(slowest)
    return ms


def by_rank_zero(answer: bool) -> bool:
    """Rank 0's answer."""
    if torch.distributed.get_world_size() == 1:
        return answer
    shared = torch.tensor(int(answer), device="cuda")
    torch.distributed.broadcast(shared, src=0)
    return bool(shared)


_QUEUED = 4
"""Passes of the decoder alone that are queued before the host waits."""


class Replayable:
    """A model whose decoder and multi-token prediction can be replayed, as `install` has it, or run as without it."""

    def __init__(self, training: Training, buckets: Sequence[Bucket]) -> None:
        """Refuse settings that graphs cannot serve (SettingsError), and prepare captures of `buckets`."""
        self.training = training
        config, self.model = training.config, unwrap_model(training.chunks[0])
        refusals.check_decoder(config, facts_of(training.chunks, [self.model]))
        decoder_surroundings.prepare_experts(config, next(self.model.parameters()).device)
        self._decoder, self.graphs = self._installed(decoder_of(training.chunks[0], self.model), buckets)
        layers = find_replayed_predictions(self.model, config, impl="chunk")
        self._predicting = [self._installed(layer, buckets) for layer in layers]

    def _installed(self, decoder: Decoder, buckets: Sequence[Bucket]) -> tuple[Decoder, ChunkGraphs]:
        config = self.training.config
        shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
        sizes = (
            config.tensor_model_parallel_size,
            config.context_parallel_size,
            getattr(config, "expert_model_parallel_size", 1) or 1,
        )
        graphs = ChunkGraphs(
            decoder,
            buckets,
            token_shards=shards,
            sample_every=0,
            surroundings=decoder_surroundings.surround_decoder(decoder.block, communicates=max(sizes) > 1),
        )
        decoder.attach(graphs, cp_size=config.context_parallel_size, shards=shards, tail="none")
        return decoder, graphs

    def _all(self) -> Sequence[tuple[Decoder, ChunkGraphs]]:
        return ((self._decoder, self.graphs), *self._predicting)

    def check_replays(self) -> None:
        """Raise UsageError where micro-batches that were to be replayed ran eagerly."""
        fallbacks: Counter[FallbackReason] = sum((graphs.stats().fallbacks for _, graphs in self._all()), Counter())
        if fallbacks:
            raise UsageError(f"not every micro-batch that should be replayed was: {dict(fallbacks)}")

    @property
    def predicts(self) -> bool:
        """Whether the model has multi-token prediction that can be replayed."""
        return bool(self._predicting)

    def prediction_bytes(self) -> int:
        """Bytes of one slot of multi-token prediction, with one bucket."""
        return sum(slot_costs(graphs.bytes_of_buckets())[0] for _, graphs in self._predicting)

    @contextlib.contextmanager
    def running(self, bucket: Bucket | None, *, layers: bool = True) -> Iterator[None]:
        """Replay `bucket` alone inside the block, with all that an installation changes besides; without `layers`
        multi-token prediction alone.

        Without a bucket the model runs eagerly: as if nothing were installed, but that tokens are shifted for
        multi-token prediction as an installation shifts them.
        """
        with contextlib.ExitStack() as stack:
            for decoder, graphs in self._all():
                if bucket is None or (decoder is self._decoder and not layers):
                    stack.enter_context(decoder.aside())
                if bucket is not None:
                    stack.enter_context(graphs.only(bucket))
            if bucket is not None:
                stack.enter_context(decoder_surroundings.room_for_compiled_captures())
            if prediction_layers(self.model):
                stack.enter_context(rotary.shifting_together())
            yield

    def step_ms(
        self, batches: Sequence[MicroBatch], bucket: Bucket | None, *, steps: int = 1, layers: bool = True
    ) -> float:
        """Milliseconds of one of `steps` training steps in a row; `bucket` and `layers` as `running` takes them."""
        with self.running(bucket, layers=layers):
            return timed(lambda: self.training.steps(batches, count=steps), repeat=steps)

    def decoder_ms(self, batches: Sequence[MicroBatch], bucket: Bucket | None) -> float:
        """Milliseconds of the decoder's forward and backward alone, with several passes queued."""
        return self._decoder_ms(self._calls(batches), bucket)

    def half(self, batches: Sequence[MicroBatch], bucket: Bucket) -> tuple[int, dict[str, Callable[[], float]]]:
        """The number of half of the layers, and functions that measure them alone: `replayed`, and `eager`.

        All graphs are freed.
        """
        calls = self._calls(batches)
        self.close()
        block = self.model.decoder
        count = len(block.layers) // 2
        block.layers = nn.ModuleList(list(block.layers)[:count])
        if hasattr(block, "num_layers_per_pipeline_rank"):
            block.num_layers_per_pipeline_rank = count
        self._decoder, self.graphs = self._installed(decoder_of(self.training.chunks[0], self.model), [bucket])
        measure = partial(self._decoder_ms, calls)
        return count, {"replayed": partial(measure, bucket), "eager": partial(measure, None)}

    def close(self) -> None:
        """Free all graphs and give the model its own functions back."""
        for decoder, graphs in self._all():
            decoder.detach()
            graphs.close()
        self._predicting = []

    def _calls(self, batches: Sequence[MicroBatch]) -> list[dict[str, Any]]:
        """The arguments of the decoder's forward in the first micro-batches."""
        calls: list[dict[str, Any]] = []
        block = self.model.decoder

        def note(**kwargs: Any) -> Any:
            calls.append(kwargs)
            return kwargs["hidden_states"]  # what is behind the decoder needs an output, and any will do

        with self.running(None), torch.no_grad():
            block.forward = note
            try:
                fields = iter([dict(batch.fields) for batch in batches[:_QUEUED]])
                for _ in range(min(_QUEUED, len(batches))):
                    self.training.forward_step(fields, self.training.chunks[0])
            finally:
                del block.forward
        return calls

    def _decoder_ms(self, calls: Sequence[dict[str, Any]], bucket: Bucket | None) -> float:
        chunk: Any = self.training.chunks[0]

        def run() -> None:
            with chunk.no_sync(), self.running(bucket):
                for call in calls:
                    hidden = call["hidden_states"].detach().requires_grad_()
                    output = self.model.decoder(**{**call, "hidden_states": hidden})
                    output = output[0] if isinstance(output, tuple) else output
                    output.backward(torch.ones_like(output))

        return timed(run, repeat=len(calls))


TYPICAL_DOCUMENTS = 12
"""Documents of the replayed micro-batches, as in the built-in tables."""
MOST_MICROBATCHES = 8
_ROUNDS = 9
_FEW = 2
_PAIR = 8
"""Documents of the two micro-batches that differ in their lengths alone."""
_SHORT_STEP_MS = 400
"""Steps that take less are measured two in a row, as the next one begins while the GPU ends the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to measure."""

    words: Sequence[str]
    """Flags and values of the training command."""
    where: str
    """Name of the launch script in errors."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the script; those that are set already stay."""
    microbatches: int | None = None
    """Micro-batches of a step on one rank of the script's run; None where it does not tell."""
    n_seqs: Sequence[int] = (12, 106)
    """Numbers of documents of the eager micro-batches."""
    max_seqs: Sequence[int] = (16, 64, 256, 512)
    """Numbers of documents of the buckets."""
    layers: int | None = None
    """Most layers to build; None: as many as fit."""
    vocabulary: int | None = None
    """Tokens of the tokenizer; None: as the script says."""
    seconds: float = 105.0
    """Seconds from `began` until measuring ends."""
    began: float = field(default_factory=time.monotonic)
    """When the command began, by time.monotonic."""


class _Figures:
    """A request that was read: the script's own figures, and those of the measurement."""

    def __init__(self, request: Request, say: Callable[[str], None]) -> None:
        where = request.where
        args, unknown = arguments.parse(request.words, where=where)
        if unknown:
            say(f"{where}: Megatron-LM's own parser does not know {' '.join(unknown)}; passed over")
        self.given, self.world = args, int(os.environ.get("WORLD_SIZE", "1"))
        arguments.check_world(args, self.world, where=where)
        self.stage_layers, self.total_layers = arguments.stage_layers(args), arguments.total_layers(args)
        self.ranks = args.tensor_model_parallel_size * args.context_parallel_size
        self.vocabulary = arguments.vocabulary(args, given=request.vocabulary, where=where)
        self.microbatches = max(2, min(request.microbatches or MOST_MICROBATCHES, MOST_MICROBATCHES))

    def prepare(self, layers: int, *, where: str) -> Any:
        """Megatron's arguments for a measurement of `layers` layers."""
        args = copy.deepcopy(self.given)
        arguments.set_for_measuring(
            args, layers=layers, vocabulary=self.vocabulary, microbatches=self.microbatches, world=self.world
        )
        return arguments.validate(args, where=where)


def calibrate_script(request: Request, *, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The cost table (schema `thdprof.costs/1`) of a launch script's model; None on other ranks than the first.

    Under torchrun every rank calls it.

    Args:
        say: called with lines of progress, on rank 0.

    Raises:
        UsageError: the script's model cannot be built, measured or captured here.
    """
    rank = int(os.environ.get("RANK", "0"))
    say = say if rank == 0 else (lambda line: None)
    for name, value in request.environment.items():
        os.environ.setdefault(name, value)
    logging.getLogger("megatron").setLevel(logging.ERROR)
    _require(versions.MEGATRON, "megatron.training.training", "megatron")
    figures = _Figures(request, say)
    if figures.ranks > 1:  # Megatron asks for it there
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _require(versions.TRANSFORMER_ENGINE, "transformer_engine.pytorch", "te")
    if not torch.cuda.is_available():
        raise MachineError("calibrate needs an NVIDIA GPU, and torch sees none here")
    if int(os.environ.get("LOCAL_RANK", "0")) >= torch.cuda.device_count():
        raise UsageError(
            f"this host has {torch.cuda.device_count()} GPUs, and torchrun started more ranks: rank "
            f"{os.environ['LOCAL_RANK']} has none"
        )
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what Megatron prints
            table = _measured(request, figures, say)
    except SettingsError as error:
        raise UsageError(str(error)) from error
    finally:
        training_steps.stop()
    return table if rank == 0 else None


def _require(package: versions.Package, module: str, extra: str) -> None:
    """Raise UsageError where a package is missing or lacks what thdprof relies on."""
    try:
        versions.check(package)
        __import__(module)
    except versions.VersionError as error:
        raise UsageError(f"calibrate --megatron-args: {error}") from error
    except Exception as error:  # Transformer Engine raises many kinds where its libraries are not found
        raise UsageError(f"{module} cannot be imported ({error}): {install_line(extra)}") from error


def _measured(request: Request, figures: _Figures, say: Callable[[str], None]) -> dict[str, Any]:
    free = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", "0")))[0]
    most = figures.stage_layers if request.layers is None else min(request.layers, figures.stage_layers)
    layers = layers_that_fit(
        figures.given,
        vocabulary=figures.vocabulary,
        memory_bytes=free,
        data_parallel=max(1, figures.world // figures.ranks),
        wanted=most,
    )
    args = figures.prepare(layers, where=request.where)
    training_steps.start(args)
    while True:
        say(f"building {layers} of {figures.stage_layers} layers of a stage, on {figures.world} GPU(s)")
        try:
            return _of_layers(request, figures, args, layers, say)
        except torch.cuda.OutOfMemoryError as error:
            if layers == 1 or figures.world > 1:
                raise UsageError(
                    f"{request.where}: {layers} layers do not fit on the GPU; give --layers, fewer"
                ) from error
        gc.collect()
        torch.cuda.empty_cache()
        layers = max(1, layers // 2)
        say(f"out of memory: trying {layers} layers")
        args = figures.prepare(layers, where=request.where)


def _of_layers(
    request: Request, figures: _Figures, args: Any, layers: int, say: Callable[[str], None]
) -> dict[str, Any]:
    training = Training(args, where=request.where)
    plan = _Plan(request, figures, args)
    replayable = Replayable(training, plan.buckets)
    say(f"built after {time.monotonic() - request.began:.0f} s; capturing {len(plan.buckets)} buckets")
    scale = scale_of(training, layers, figures.stage_layers)  # before half of the layers are taken away
    slot = _prepare(plan, replayable, whole=figures.total_layers / layers)
    say(f"captured after {time.monotonic() - request.began:.0f} s")
    measured, rounds = _run(request, plan, replayable, scale, say)
    solved = solve(measured, scale)
    if rounds < LEAST_ROUNDS:
        say(f"only {rounds} rounds fit into {request.seconds:.0f} s: times are less sure; give --seconds, more")
    cap, eager = measured.typical_cap, statistics.median(solved.eager_ms.values())
    say(
        f"a micro-batch: decoder {solved.replay_ms[cap]:.1f} ms replayed at cap {cap}, {eager:.1f} ms eager; outside "
        f"it {solved.outside_ms:.1f} ms; a step's optimizer {solved.optimizer_ms:.1f} ms"
    )
    return _table(figures, args, layers, solved, slot)


class _Plan:
    """The micro-batches and buckets of a measurement, the same on all ranks, which decide together."""

    def __init__(self, request: Request, figures: _Figures, args: Any) -> None:
        rng = np.random.default_rng(0)
        cp, rows = args.context_parallel_size, args.micro_batch_size
        shape = Shape(
            rows=rows,
            tokens=args.seq_length,
            multiple=2 * cp if cp > 1 else 1,
            vocabulary=min(figures.vocabulary, 32_000),
            padded=cp > 1,
        )
        most = rows * shape.tokens // shape.multiple
        caps = sorted({max(rows, min(n, most)) for n in request.max_seqs})
        count = self.microbatches = figures.microbatches
        self.few = 1 if count <= 3 else _FEW

        def draw(documents: int) -> list[MicroBatch]:
            return [training_steps.of_documents(rng, shape, documents) for _ in range(count)]

        def repeat(lengths: NDArray[np.int64]) -> list[MicroBatch]:
            return [training_steps.micro_batch(rng, shape, [lengths] * rows)] * count

        documents = {n: max(rows, min(TYPICAL_DOCUMENTS, n)) for n in caps}
        packs = {n: draw(n) for n in sorted({*documents.values()})}
        pair = max(1, min(_PAIR, caps[-1]) // rows)
        row = {"documents": pair, "tokens": shape.tokens, "multiple": shape.multiple}
        buckets = {n: Bucket(n, rows * shape.tokens, rows * shape.tokens // cp, cp) for n in caps}
        holding = [n for n in caps if n >= max(2 * TYPICAL_DOCUMENTS, rows * pair)]
        self.eager = {n: draw(n) for n in sorted({max(rows, min(n, most)) for n in request.n_seqs})}
        self.replayed = {n: packs[documents[n]] for n in caps}
        self.long, self.equal = repeat(training_steps.one_long(**row)), repeat(training_steps.equal_lengths(**row))
        self.buckets = list(buckets.values())
        self.typical = typical = buckets[holding[0] if holding else caps[-1]]
        self.steps: dict[Any, tuple[list[MicroBatch], Bucket | None]] = {
            **{("replay", b.max_seqs): (self.replayed[b.max_seqs], b) for b in self.buckets},
            **{("eager", n): (packs, None) for n, packs in self.eager.items()},
            "few": (self.replayed[typical.max_seqs][: self.few], typical),
            "long": (self.long, typical),
            "equal": (self.equal, typical),
        }


def _prepare(plan: _Plan, replayable: Replayable, *, whole: float) -> dict[str, float]:
    """Let the first steps compile, tune and capture; the table's entries for a slot.

    `whole` is the number of the model's layers for each layer that was built. Those of multi-token prediction are as
    many whatever layers were built.
    """
    for packs, bucket in plan.steps.values():
        replayable.step_ms(packs[: plan.few], bucket)
    decoder, overhead = slot_costs(replayable.graphs.bytes_of_buckets())
    return {"slot_bytes": round(decoder * whole) + replayable.prediction_bytes(), "bucket_overhead": overhead}


def _run(
    request: Request, plan: _Plan, replayable: Replayable, scale: Scale, say: Callable[[str], None]
) -> tuple[Measured, int]:
    """Measure every variant; also the number of rounds."""
    typical = plan.typical
    one = replayable.step_ms(plan.replayed[typical.max_seqs], typical)
    steps = 2 if by_rank_zero(one < _SHORT_STEP_MS) else 1
    variants: dict[Any, Callable[[], float]] = {
        key: partial(replayable.step_ms, packs, bucket, steps=1 if bucket is None else steps)
        for key, (packs, bucket) in plan.steps.items()
    }
    if replayable.predicts:
        holding = {n: next((b for b in plan.buckets if b.max_seqs >= n), None) for n in plan.eager}
        variants |= {
            ("layers", n): partial(replayable.step_ms, plan.eager[n], bucket, layers=False)
            for n, bucket in holding.items()
            if bucket is not None
        }
    alone = plan.replayed[typical.max_seqs]
    variants["decoder"] = lambda: replayable.decoder_ms(alone, typical)
    halves = 2 <= scale.measured_layers < scale.layers and not replayable.training.args.hybrid_layer_pattern
    if halves:
        variants["eager decoder"] = lambda: replayable.decoder_ms(alone, None)
    deadline = request.began + request.seconds
    ms, rounds = medians(variants, rounds=_ROUNDS, deadline=deadline, progress=say, agreed=by_rank_zero)
    replayable.check_replays()
    longer = {n: ms["eager", n] - ms["layers", n] for n in plan.eager if ("layers", n) in ms}
    # documents hardly matter to it, so that others stand for those that no bucket holds
    predicting = {n: longer.get(n, longer[max(longer)]) for n in plan.eager} if longer else {}
    measured = Measured(
        microbatches=plan.microbatches,
        eager_step_ms={n: ms["eager", n] - predicting.get(n, 0.0) for n in plan.eager},
        eager_predictions_ms=predicting,
        replay_step_ms={b.max_seqs: ms["replay", b.max_seqs] for b in plan.buckets},
        typical_cap=typical.max_seqs,
        few_microbatches=plan.few,
        few_step_ms=ms["few"],
        decoder_ms=ms["decoder"],
        eager_squared_tokens={n: _mean_squared(packs) for n, packs in plan.eager.items()},
        replay_squared_tokens={n: _mean_squared(packs) for n, packs in plan.replayed.items()},
        long_step_ms=ms["long"],
        equal_step_ms=ms["equal"],
        long_squared_tokens=_mean_squared(plan.long),
        equal_squared_tokens=_mean_squared(plan.equal),
        eager_decoder_ms=ms.get("eager decoder", 0.0),
    )
    if halves:
        half, parts = replayable.half(alone, typical)
        for measure in parts.values():
            measure()
        both, _ = medians(parts, rounds=3, deadline=deadline, progress=lambda line: None, agreed=by_rank_zero)
        measured = replace(
            measured,
            half_layers=half,
            half_decoder_ms=both["replayed"],
            half_eager_decoder_ms=both["eager"],
        )
    replayable.close()
    return measured, rounds


def _mean_squared(batches: Sequence[MicroBatch]) -> float:
    return statistics.fmean(batch.squared_tokens for batch in batches)


def scale_of(training: Training, layers: int, wanted: int) -> Scale:
    """The layers and parameters of a stage of `wanted` layers, beside those of `training`, which has `layers`."""
    chunk = training.chunks[0]
    whole = sum(p.numel() for p in chunk.parameters())
    of_layers = sum(p.numel() for name, p in chunk.named_parameters() if ".layers." in name and "mtp." not in name)
    return Scale(
        prediction_layers=training.args.mtp_num_layers or 0,
        measured_layers=layers,
        layers=wanted,
        measured_parameters=whole,
        parameters=whole + round(of_layers * (wanted - layers) / layers),
    )


def _table(figures: _Figures, args: Any, layers: int, solved: Solved, slot: dict[str, float]) -> dict[str, Any]:
    stamp = stamp_here()
    return {
        "schema": SCHEMA,
        "name": _name(figures, args, layers),
        "calibrated": True,
        "hardware": stamp["gpu"],
        "attention": f"Transformer Engine {stamp['transformer_engine']} (cuDNN {stamp['cudnn']})",
        "n_tokens": args.seq_length * args.micro_batch_size // args.context_parallel_size,
        "eager": [{"n_seqs": n, "ms": round(ms, 4)} for n, ms in sorted(solved.eager_ms.items())],
        "replay": [{"max_seqs": n, "ms": round(ms, 4)} for n, ms in sorted(solved.replay_ms.items())],
        **slot,
        "ms_per_squared_token": solved.ms_per_squared_token,
        "squared_tokens": solved.squared_tokens,
        "outside_ms": round(solved.outside_ms, 4),
        "optimizer_ms": round(solved.optimizer_ms, 4),
        "stamp": stamp,
    }


def _name(figures: _Figures, args: Any, layers: int) -> str:
    kind = f"hybrid {args.hybrid_layer_pattern}, " if args.hybrid_layer_pattern else ""
    text = f"{kind}{figures.stage_layers} layers, hidden {args.hidden_size}, {args.seq_length} tokens"
    text += f" x {args.micro_batch_size}" if args.micro_batch_size > 1 else ""
    given = figures.given
    if given.pipeline_model_parallel_size > 1:
        text += f", one of {given.pipeline_model_parallel_size} pipeline stages"
    sizes = {
        "TP": given.tensor_model_parallel_size,
        "CP": given.context_parallel_size,
        "EP": given.expert_model_parallel_size or 1,
    }
    text += "".join(f", {name} {size}" for name, size in sizes.items() if size > 1)
    if args.fp8:
        text += f", FP8 {args.fp8_recipe}"
    if layers < figures.stage_layers:
        text += f"; measured with {layers} layers, the others scaled from them"
    return text
