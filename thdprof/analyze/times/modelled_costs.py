"""The cost table of a run whose times are modelled: from its kernels, what is outside the decoder, and its host."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from thdprof.analyze.buckets.cost_table import CostTable, EagerPoint, ReplayPoint
from thdprof.analyze.buckets.statistics import AnalyzedRun
from thdprof.analyze.predictions import Range
from thdprof.analyze.times.decoder import Decoder, DecoderTime, Device, Work, round_documents
from thdprof.analyze.times.gpus import GPUS, Gpu, find_gpu, known_gpu
from thdprof.analyze.times.memory import slot_bytes
from thdprof.analyze.times.parameters import Stage, expert_ranks, stage_parameters, stages
from thdprof.errors import DataError, UsageError
from thdprof.files import read_yaml
from thdprof.training import Attention, Model, TrainingSettings
from thdprof.words import add_article

LAUNCHES = 140.0
"""Launches outside the decoder in a micro-batch of Megatron's training loop, its reads of the GPU counted as such."""
_OF_ONE_END = 0.5
"""Share of them on the pipeline rank that makes most, where there are several: steps of two stages took as long as if
each made half (benchmarks/results/trainer-rows.md)."""
_UNHIDDEN = 17.0
"""Number of these launches that a replayed micro-batch waits for all the same: 10 to 22 in six models on H200s
(benchmarks/results/calibrated.md)."""
_LOSS_US_AN_ELEMENT = 17.4e-6
"""Cross entropy over the vocabulary, forward and backward, for one token and one entry: unfused, in fp32."""
_OPTIMIZER_MS_A_PARAMETER = 14e-9
"""Adam with clipping and zeroed gradients, for one parameter, on an H200."""
_OPTIMIZER_US_AN_EXPERTS_WEIGHT = {False: 25.0, True: 45.0}
"""Megatron's optimizer on the host, for one weight of one expert, without and with --use-distributed-optimizer: it goes
through tensors one by one, while the GPU waits (benchmarks/results/experts.md)."""


_LIGHT = 0.4
"""Host's time for a launch that comes in a row out of one call, beside one from Python."""
_MEGATRON = 4.7
"""Host's time for a launch from Megatron's modules, beside one from torch's own, which is what can be measured."""
_IN_FP8, _RECOMPUTED = 1.15, 1.2
"""Host's time for a launch of Megatron's modules in FP8, and under full recompute, beside one in bf16: 1.13 to 1.23 on
four hosts, and 1.18 and 1.26 on two (benchmarks/results/calibrated.md)."""
_GAPS = 1.08
"""GPU time of an eager micro-batch whose launches all come early enough, beside that of a replay, at most."""
_SHARP = 6
_SPREAD = 1.3
"""Factor by which that ratio differs between models: 35 of 38 rows of one host that nothing was fitted to lie within it
(benchmarks/results/decoder-times.md)."""
HOST_SCHEMA = "thdprof.host/1"
_SECONDS = 60
"""Longest time that a command which is run may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRate:
    """The time that a host takes for one launch, as a range."""

    low_us: float
    """Microseconds on the quickest host that is expected."""
    high_us: float
    """Microseconds on the slowest host that is expected."""
    basis: str
    """The processors that the range is of."""

    def launch_ms(self, time: DecoderTime, *, of_experts: bool = False) -> Range:
        """The host's time for the launches of a micro-batch, or of its experts alone, in milliseconds."""
        launches = time.launches + _LIGHT * time.light_launches
        if of_experts:
            launches = time.expert_launches + _LIGHT * time.expert_light_launches
        return launches * self.low_us / 1000, launches * self.high_us / 1000

    def partly_replayed_ms(self, time: DecoderTime) -> tuple[float, float, float]:
        """Time of a micro-batch whose experts run eagerly between graphs: lowest, middle and highest, in milliseconds.

        The host launches the experts' kernels alone.
        """
        gpu = time.gpu_ms
        return _hide_shorter((gpu, gpu, gpu * _GAPS), self.launch_ms(time, of_experts=True))

    def eager_ms(
        self, time: DecoderTime, *, slower_kernels: float = 1.0, more_ms: Range = (0.0, 0.0)
    ) -> tuple[float, float, float]:
        """Eager time of a micro-batch, the larger of GPU time and launches: lowest, middle and highest, in
        milliseconds. `slower_kernels` is the factor by which eager kernels take longer than those of `time`, and
        `more_ms` is the host's time for further launches.
        """
        gpu = time.gpu_ms * slower_kernels
        low, high = self.launch_ms(time)
        return _hide_shorter((gpu, gpu * _GAPS**0.5, gpu * _GAPS), (low + more_ms[0], high + more_ms[1]))


def _hide_shorter(gpu_ms: tuple[float, float, float], launch_ms: Range) -> tuple[float, float, float]:
    """The lowest, middle and highest time of work on the GPU and its launches, of which the longer hides the other."""
    low, high = launch_ms
    return max(gpu_ms[0], low), _larger(gpu_ms[1], math.sqrt(low * high)), _larger(gpu_ms[2], high)


def _larger(gpu: float, host: float) -> float:
    """The larger of both times, and a little more where they are alike: neither hides behind the other altogether."""
    return math.pow(gpu**_SHARP + host**_SHARP, 1 / _SHARP)


STATED = HostRate(low_us=75.0, high_us=150.0, basis="server processors of 2021 to 2025")
"""The range of hosts on which eager Megatron training was measured: 36 of 38 rows that nothing was fitted to lie in it
(benchmarks/results/decoder-times.md)."""


def _slow_down(host: HostRate, model: Model) -> HostRate:
    """The host's rate for launches from the modules of `model`, as Megatron trains it."""
    factor = (_IN_FP8 if model.fp8_recipe else 1.0) * (_RECOMPUTED if model.recompute_granularity == "full" else 1.0)
    return replace(host, low_us=host.low_us * factor, high_us=host.high_us * factor)


@functools.cache
def measure_host() -> HostRate | None:
    """This machine's rate, if it has a GPU and torch; None where it cannot be measured.

    The measurement runs in a process of its own, because analysis does not import torch. It runs once: all analyses of
    a sweep have the same host.
    """
    us = measure_launch_us()
    return None if us is None else _rate(us, "this machine's processor, measured")


def measure_launch_us() -> float | None:
    """Microseconds in which this machine launches a kernel from torch; None where there is no GPU or no torch."""
    if not has_gpu() or importlib.util.find_spec("torch") is None:
        return None
    try:
        return float(json.loads(_read_output(sys.executable, "-m", "thdprof.runtime.timing"))["launch_us"])
    except (ValueError, KeyError, TypeError):
        return None


def _read_output(*command: str) -> str:
    """What the command prints; "" where it fails."""
    try:
        return subprocess.run([*command], capture_output=True, text=True, timeout=_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def load_host(path: Path) -> HostRate:
    """The rate in a file that `thdprof calibrate --host` wrote.

    Raises:
        DataError: the file cannot be read, or is no such file.
    """
    where = f"--host {path}"
    loaded = read_yaml(path, where=where)
    us = loaded.get("launch_us") if isinstance(loaded, dict) and loaded.get("schema") == HOST_SCHEMA else None
    if isinstance(us, bool) or not isinstance(us, int | float) or not 0 < us < math.inf:
        raise DataError(f"{where}: not a file of thdprof calibrate --host")
    return _rate(float(us), f"the host of {path.name}, measured")


def _rate(launch_us: float, basis: str) -> HostRate:
    """The range for a host that launches from torch in `launch_us`: around the middle of that and of the stated hosts.

    Hosts of one kind measured 16.9 to 29.3 us, and Megatron's launches differed by far less between them
    (benchmarks/results/calibrated.md).
    """
    us = math.sqrt(launch_us * _MEGATRON * math.sqrt(STATED.low_us * STATED.high_us))
    return HostRate(low_us=us / _SPREAD, high_us=us * _SPREAD, basis=basis)


def has_gpu() -> bool:
    """Whether this process may use a GPU of this machine."""
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


_STEPS = (32, 64, 128, 256, 512)
"""Numbers of documents up to which Transformer Engine's fused attention rounds."""
_OWN_LAYERS = 2.0
"""Time of a graph of transformers' own layers, beside one of fused layers, at most; 1.9 in the shape of Qwen3-0.6B."""
_OWN_BYTES = 55e-6
"""Megabytes that norms, rotation, activation and residuals of transformers' own layers move beyond fused ones, forward
and backward, for a token and a channel of what they read: as much as that shape allows."""

_LIGER_LAYERS = 1.02
"""Time of the kernels of layers with Liger beside compiled ones: eager steps took 1.05 times as long, gaps included
(benchmarks/results/which-run.md)."""

_FLASH_ATTENTION_2 = 1.52
"""Time of the Trainer's attention beside cuDNN's, by squared tokens: 60 steps of torch's, of 32,768 tokens at the shape
of Qwen3-0.6B on an H200, lie on this line with R2 0.9998 (benchmarks/results/pack.md). flash-attn's kernels and other
GPUs are taken to be as much slower."""


class ModelledTimes:
    """Times of the decoder of one run, as its documents and caps vary."""

    def __init__(self, run: AnalyzedRun, gpu: Gpu, host: HostRate) -> None:
        """Times of `run`, whose model is known, on `gpu`, for which `host` launches."""
        assert run.model is not None
        self.model, self.settings, self.gpu, self._run = run.model, run.settings, gpu, run
        self.host = host if run.settings.is_of_trainer else _slow_down(host, run.model)
        self.decoder = Decoder(self.model, gpu, pipeline_size=self.settings.pipeline_parallel_size)
        self.typical = run.profile.n_seqs.percentile(50.0)
        """Documents of the median micro-batch."""
        self._squared = (run.table.total_squared or 0.0) / len(run.table)
        self._mtp_layers = self.model.mtp_num_layers / self.decoder.num_layers
        self._grouped = self.settings.experts == "dropless" and not run.ends_at_router
        self._typical_gpu_ms = self.at(self.typical).gpu_ms

    def slower_kernels(self, *, replayed: bool) -> float:
        """Time of the layers' kernels beside fused ones. Under Hugging Face's Trainer `PlanCallback(compile=True)`
        compiles the layers of graphs. What neither it nor Liger fuses moves activations only: the wider the layers are,
        the more of their time are products."""
        model = self.model
        if not self.settings.is_of_trainer or (model.compile and replayed):
            return 1.0
        if model.liger:
            return _LIGER_LAYERS
        channels = 4 * model.hidden_size + 3 * model.ffn_size
        channels += 2 * model.head_dim * (model.num_attention_heads + 2 * model.query_groups)
        moved = _OWN_BYTES * channels * self._run.n_tokens * (4 / 3 if model.recompute_granularity == "full" else 1)
        more_ms = self.decoder.num_layers * Device(self.gpu).memory_us(moved, 3.3) / 1000
        return min(_OWN_LAYERS, 1 + more_ms / self._typical_gpu_ms)

    def at(self, max_seqs: int, *, replayed: bool = False) -> DecoderTime:
        """A micro-batch of typical lengths whose attention is called for `max_seqs` documents; replayed or eager."""
        return self._time(max_seqs, self._squared, replayed=replayed)

    def _time(self, max_seqs: int, squared: float, *, replayed: bool) -> DecoderTime:
        of_trainer = self.settings.is_of_trainer
        work = Work(
            tokens=self._run.n_tokens,
            squared=squared * (_FLASH_ATTENTION_2 if of_trainer else 1.0),
            max_seqs=max_seqs,
            cp_size=self.settings.context_parallel_size,
            grouped=self._grouped and (replayed or of_trainer),
        )
        return self.decoder.time(work)

    def outside(self) -> Range:
        """Embedding, output layer and loss of a micro-batch on this range of hosts, in milliseconds, and the GPU's work
        on layers of multi-token prediction. The host launches most of it while the GPU replays, unless experts between
        graphs keep it busy. Without a vocabulary it is what launching the former takes beyond that, and the latter.
        """
        gpu_ms, hidden_ms, unhidden = self._outside_gpu_ms(), self._typical_gpu_ms, _UNHIDDEN / LAUNCHES
        if self.is_partly_replayed(self.at(self.typical)):
            hidden_ms = unhidden = 0.0
        low, high = (max(gpu_ms + unhidden * ms, ms - hidden_ms) for ms in self._outside_launch_ms())
        return low + self.mtp_gpu_ms, high + self.mtp_gpu_ms

    def _outside_launch_ms(self) -> Range:
        """The host's time for the launches outside the decoder of a micro-batch, in milliseconds."""
        share = 1.0 if self.settings.pipeline_parallel_size == 1 else _OF_ONE_END
        launches = LAUNCHES * (share + self.model.mtp_num_layers)
        return launches * self.host.low_us / 1000, launches * self.host.high_us / 1000

    def _outside_gpu_ms(self) -> float:
        """GPU time of embedding, output layer and loss of a micro-batch; 0 without a vocabulary."""
        model, tokens, hidden = self.model, self._run.n_tokens, self.model.hidden_size
        if model.vocab_size is None:
            return 0.0
        device, entries = Device(self.gpu), model.vocab_size // model.tensor_model_parallel_size
        products = (
            device.product_us(tokens, entries, hidden)
            + device.product_us(tokens, hidden, entries)
            + device.product_us(entries, hidden, tokens, accumulates=model.gradient_accumulation_fusion)
        )
        loss = device.memory_us(tokens * entries, 1 / _LOSS_US_AN_ELEMENT)
        embedding = device.memory_us(3 * tokens * hidden * 2e-6, 3.0) + device.memory_us(entries * hidden * 6e-6, 4.0)
        return ((1 + model.mtp_num_layers) * (products + loss) + embedding) / 1000

    @property
    def mtp_gpu_ms(self) -> float:
        """The GPU's work on layers of multi-token prediction in a typical micro-batch, in milliseconds; one of them is
        taken to be as much as a layer of the decoder."""
        return self._mtp_layers * self._typical_gpu_ms

    def _with_mtp(self, ms: float, layers_ms: float) -> float:
        """Add what multi-token prediction takes beyond `mtp_gpu_ms`, where the layers take `layers_ms`."""
        return ms + self._mtp_layers * max(0.0, layers_ms - self._typical_gpu_ms)

    def optimizer(self) -> float:
        """The optimizer's step on one rank, in milliseconds; without a vocabulary over the layers' parameters alone."""
        model, settings = self.model, self.settings
        ranks = settings.data_parallel_size * settings.context_parallel_size
        dense, experts = (ranks, expert_ranks(model, ranks)) if model.use_distributed_optimizer else (1, 1)
        a_parameter = _OPTIMIZER_MS_A_PARAMETER * 4.8 / self.gpu.memory_tbps
        a_weight = _OPTIMIZER_US_AN_EXPERTS_WEIGHT[model.use_distributed_optimizer] / 1000
        weights_a_layer = 2 * (model.num_experts or 0) // model.expert_model_parallel_size
        if settings.is_of_trainer:  # whose weights of all experts are one parameter
            weights_a_layer = 0

        def step_of_stage(stage: Stage) -> float:
            count = stage_parameters(model, stage)
            if count.adapters is not None:
                return count.adapters / dense * a_parameter
            weights = weights_a_layer * sum("moe" in kind for kind in stage.layers)
            return (count.dense / dense + count.experts / experts) * a_parameter + weights / experts * a_weight

        return max(map(step_of_stage, stages(model, pipeline_size=settings.pipeline_parallel_size, num_chunks=1)))

    @functools.cached_property
    def table(self) -> CostTable:
        """The cost table: replay times by the steps of attention's rounding, eager times as ranges."""
        outside, tokens = self.outside(), self._run.n_tokens
        most = self._run.profile.n_seqs.percentile(100.0)
        ends = [n for n in _STEPS if n < most]  # numbers of documents after which eager times differ
        top = max(1024, round_documents(most))
        per_unit = (self._time(64, 2e9, replayed=True).gpu_ms - self._time(64, 1e9, replayed=True).gpu_ms) / 1e9
        return CostTable(
            name=f"{describe(self.model)}, {self.decoder.num_layers} layers a rank, {tokens} tokens",
            calibrated=False,
            modelled=True,
            hardware=self.gpu.label,
            attention="torch's attention" if self.settings.is_of_trainer else "Transformer Engine's fused attention",
            n_tokens=tokens,
            eager=[self._eager_point(n) for n in sorted({1, *ends, *(n + 1 for n in ends), most})],
            replay=[self._replay_point(n) for n in sorted({1, *_STEPS, *(n + 1 for n in _STEPS), 1024, top})],
            max_seqs_steps=_STEPS,
            ms_per_squared_token=per_unit * (1 + self._mtp_layers),
            squared_tokens=self._squared,
            outside_ms=(outside[0] * outside[1]) ** 0.5,
            outside_range_ms=outside,
            optimizer_ms=self.optimizer(),
            slot_bytes=slot_bytes(self._run),
        )

    def _replay_point(self, max_seqs: int) -> ReplayPoint:
        time = self.at(max_seqs, replayed=True)
        if not self.is_partly_replayed(time):
            ms = self._with_mtp(time.replay_ms, time.gpu_ms)
            return ReplayPoint(max_seqs=max_seqs, ms=ms * self.slower_kernels(replayed=True))
        low, middle, high = (self._with_mtp(ms, ms) for ms in self.host.partly_replayed_ms(time))
        return ReplayPoint(max_seqs=max_seqs, ms=middle, range_ms=(low, high))

    def is_partly_replayed(self, time: DecoderTime) -> bool:
        """Whether experts run eagerly between a replay's graphs; else layers are captured whole."""
        return self._run.ends_at_router and time.expert_launches > 0

    def _eager_point(self, documents: int) -> EagerPoint:
        """Eager times, with the launches that a replay hides and what layers of multi-token prediction take longer
        than on the GPU alone."""
        time, slower, outside = self.at(documents), self.slower_kernels(replayed=False), self.outside()
        low, high = (
            max(0.0, ms + self.mtp_gpu_ms - o) for ms, o in zip(self._outside_launch_ms(), outside, strict=True)
        )
        layers = self.host.eager_ms(time, slower_kernels=slower)
        eager = self.host.eager_ms(time, slower_kernels=slower, more_ms=(low, high))
        low, middle, high = map(self._with_mtp, eager, layers)
        return EagerPoint(n_seqs=documents, ms=middle, range_ms=(low, high))


def describe(model: Model) -> str:
    """The model's shape in a few words."""
    words = [f"hidden {model.hidden_size}"]
    if model.num_experts:
        words.append(f"{model.num_experts} experts")
    if model.hybrid_layer_pattern:
        words.append("hybrid")
    words.append("FP8 " + model.fp8_recipe if model.fp8_recipe else model.precision)
    if model.recompute_granularity:
        words.append(f"{model.recompute_granularity} recompute")
    if model.tensor_model_parallel_size > 1:
        words.append(f"TP {model.tensor_model_parallel_size}")
    return f"{model.num_layers} layers, " + ", ".join(words)


ASSUMED_GPU = "h100"
"""The GPU that times are of where nobody names one and this machine has none."""
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where NVIDIA's driver describes each GPU of this machine."""


def explain_missing_times(settings: TrainingSettings, attention: Attention, model: Model) -> str | None:
    """Why times of a run whose model is known cannot be modelled; None where they can."""
    if settings.max_seqlen_per_dp_cp_rank is not None:
        return "times under dynamic context parallelism are not modelled: measure them and give --cost-table"
    if attention != "transformer_engine":
        return f"times of --attention {attention} are not modelled: measure them with thdprof calibrate"
    if model.precision == "fp32" and not settings.is_of_trainer:  # whose float32 is refused on GPUs
        return "times in float32 are not modelled: measure them with thdprof calibrate"
    return None


def model_times(run: AnalyzedRun, gpu: Gpu, host: Path | None = None) -> ModelledTimes:
    """The model of times for the micro-batches of a run whose model is known.

    Args:
        gpu: the GPU that computes.
        host: a file of the rate at which the run's host launches; None: as `host_of` finds it.

    Raises:
        DataError: the file is none of `thdprof calibrate --host`.
        UsageError: the model is trained in FP8, which the GPU has not.
    """
    assert run.model is not None
    if run.model.fp8_recipe is not None and gpu.fp8_tflops is None:
        raise UsageError(
            f"--gpu {gpu.name}: {add_article(gpu.label)} has no FP8, and the model is trained with the FP8 recipe "
            f"{run.model.fp8_recipe}; name the GPU of the run, or set fp8_recipe to none"
        )
    return ModelledTimes(run, gpu, host_of(gpu) if host is None else load_host(host))


def host_of(gpu: Gpu) -> HostRate:
    """The host that launches on `gpu`: this machine's where it has such a GPU, else the stated range."""
    here = local_gpu()
    measured = measure_host() if here is not None and here.name == gpu.name else None
    return measured or STATED


def gpu_of(name: str | None) -> tuple[Gpu, str | None]:
    """The GPU that `name` names, else this machine's, else the one that is assumed, with a note that says so.

    Raises:
        UsageError: no such GPU is known.
    """
    if name is not None:
        return find_gpu(name), None
    here = local_gpu()
    if here is not None:
        return here, f"times are of this machine's {here.label}; --gpu names another"
    assumed = GPUS[ASSUMED_GPU]
    return assumed, f"times are of {add_article(assumed.label)}, since no GPU was named: give --gpu"


def local_gpu() -> Gpu | None:
    """This machine's first GPU by its driver; None where there is none that times are modelled for."""
    facts = ""
    with suppress(OSError, StopIteration):
        facts = next(iter(sorted(DRIVER.glob("*/information")))).read_text()
    return known_gpu(facts) or (known_gpu(name_gpu()) if has_gpu() else None)


@functools.cache
def name_gpu() -> str:
    """The first GPU's name by nvidia-smi, on virtual machines whose driver describes none; "" where it fails."""
    return _read_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").partition("\n")[0]


def extend_replays(costs: CostTable, run: AnalyzedRun) -> CostTable:
    """A measured table, with points for larger caps than it has: they replay as much longer as they are modelled.

    The table itself where the run, whose times can be modelled, has no such caps, or the table's GPU is not known.
    """
    assert run.model is not None
    gpu, last = known_gpu(costs.hardware), max(costs.replay, key=lambda point: point.max_seqs)
    most = round_documents(run.profile.n_seqs.percentile(100.0))
    if gpu is None or (run.model.fp8_recipe and gpu.fp8_tflops is None):
        return costs
    if costs.needs_max_seqlen or most <= last.max_seqs:
        return costs
    times, ends = ModelledTimes(run, gpu, STATED), {most, *(n for n in _STEPS if last.max_seqs < n < most)}
    caps = sorted(ends | {n + 1 for n in (last.max_seqs, *ends) if round_documents(n) == n < most})
    ms = {n: last.ms + times.at(n, replayed=True).gpu_ms - times.at(last.max_seqs, replayed=True).gpu_ms for n in caps}
    return costs.model_copy(update={"replay": [*costs.replay, *(ReplayPoint(max_seqs=n, ms=ms[n]) for n in caps)]})
