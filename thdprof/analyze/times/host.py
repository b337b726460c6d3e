"""The host's time for one launch of eager training: measured where there is a GPU, else a stated range."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from thdprof.analyze.times.decoder import DecoderTime

_LIGHT = 0.4
"""Host's time for a launch that comes in a row out of one call, beside one from Python."""
_MEGATRON = 4.7
"""Host's time for a launch from Megatron's modules, beside one from torch's own, which is what can be measured."""
_GAPS = 1.05
"""GPU time of an eager micro-batch whose launches all come early enough, beside that of a replay, at most."""
_SHARP = 6
_SPREAD = 1.5
"""Factor by which that ratio differs between models."""
_SECONDS = 60
"""Longest time that the measurement may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRate:
    """The time that a host takes for one launch, as a range."""

    low_us: float
    """Microseconds on the quickest host that is expected."""
    high_us: float
    """Microseconds on the slowest host that is expected."""
    basis: str
    """The processors that the range is of."""

    def launch_ms(self, time: DecoderTime) -> tuple[float, float]:
        """The host's time for the launches of a micro-batch, in milliseconds, as a range."""
        launches = time.launches + _LIGHT * time.light_launches
        return launches * self.low_us / 1000, launches * self.high_us / 1000

    def partly_replayed_ms(self, time: DecoderTime) -> tuple[float, float, float]:
        """Time of a micro-batch whose experts run eagerly between graphs: lowest, middle and highest, in milliseconds.

        The host launches the experts' kernels alone.
        """
        launches = time.expert_launches + _LIGHT * time.expert_light_launches
        low, high = launches * self.low_us / 1000, launches * self.high_us / 1000
        return max(time.gpu_ms, low), _larger(time.gpu_ms, math.sqrt(low * high)), _larger(time.gpu_ms * _GAPS, high)

    def eager_ms(self, time: DecoderTime) -> tuple[float, float]:
        """Eager time of a micro-batch, in milliseconds: the larger of GPU time and launches, as a range."""
        low, high = self.launch_ms(time)
        return max(time.gpu_ms, low), _larger(time.gpu_ms * _GAPS, high)

    def middle_ms(self, time: DecoderTime) -> float:
        """Eager time of a micro-batch on a host in the middle of the range, in milliseconds."""
        low, high = self.launch_ms(time)
        return _larger(time.gpu_ms * _GAPS**0.5, math.sqrt(low * high))


def _larger(gpu: float, host: float) -> float:
    """The larger of both times, and a little more where they are alike: neither hides behind the other altogether."""
    return math.pow(gpu**_SHARP + host**_SHARP, 1 / _SHARP)


STATED = HostRate(low_us=40.0, high_us=150.0, basis="server processors of 2021 to 2025")
"""The range of hosts on which eager Megatron training was measured, with a margin."""


@functools.cache
def measured_host() -> HostRate | None:
    """This machine's rate, if it has a GPU and torch; None where it cannot be measured.

    The measurement runs in a process of its own, because analysis does not import torch. It runs once: all analyses of
    a sweep have the same host.
    """
    if not has_gpu() or importlib.util.find_spec("torch") is None:
        return None
    command = [sys.executable, "-m", "thdprof.runtime.timing"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        us = float(json.loads(done.stdout)["launch_us"]) * _MEGATRON
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None
    return HostRate(low_us=us / _SPREAD, high_us=us * _SPREAD, basis="this machine's processor, measured")


def has_gpu() -> bool:
    """Whether this process may use a GPU of this machine."""
    return any(Path("/dev").glob("nvidia[0-9]*")) and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
