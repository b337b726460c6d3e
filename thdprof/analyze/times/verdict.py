"""Whether graphs pay: the verdict on times, and its reason."""

from __future__ import annotations

import math

from thdprof.analyze.times.modelled_costs import ModelledTimes
from thdprof.analyze.times.results import Ruling, Times, Verdict
from thdprof.words import amount

PAYS_BELOW = 0.95
"""Share of an eager micro-batch's time below which a replay pays, on every host of the range."""
NO_GAIN_ABOVE = 0.97
"""Share above which it does not, on a host in the middle of the range."""
LITTLE_GAIN_ABOVE = 0.9
"""Share above which it then has to be on the slowest host."""
MEASURED_GAIN_BELOW = 0.98
"""Share of the eager step time below which graphs pay where both were measured: measured times vary by as much."""


def modelled_verdict(modelled: ModelledTimes, times: Times) -> Verdict:
    """The verdict on modelled times, with the reason that launching and computing a layer give."""
    assert times.decoder_replay_ms is not None
    time = modelled.at(modelled.shapes.typical)
    mtp, replay = modelled.mtp_gpu_ms, times.decoder_replay_ms
    low, high = modelled.replay_range(time) or (replay, replay)
    replay, low, high = replay + mtp, low + mtp, high + mtp
    least, middle, most = (ms + mtp for ms in modelled.eager_ms(time))
    slower = modelled.slower_kernels
    quickest = max(low / least, slower * low / max(slower * low, least))
    ruling = rule(high / most, replay / middle, quickest)
    layers = modelled.decoder.num_layers
    low, high = (ms / layers for ms in modelled.host.launch_ms(time))
    gpu = f"{_digits(time.gpu_ms / layers)} ms"
    launching = f"{_digits(low)} to {_digits(high)} ms"
    if modelled.replay_range(time) is not None:
        left = modelled.host.partly_replayed_ms(time)[2] / layers
        return Verdict(
            ruling=ruling,
            reason=f"launching a layer takes the host {launching}, computing it the GPU {gpu}; dropless experts stay "
            f"with the host, so that a replayed layer takes up to {_digits(left)} ms",
        )
    decides = (
        "the processor decides; run thdprof calibrate on it"
        if slower == 1
        else "the processor decides, and whether PlanCallback(compile=True) fuses the layers; train some steps by the "
        "plan and some without"
    )
    reason = {
        "graphs pay": f"launching a layer takes the host {launching}, computing it the GPU {gpu}",
        "graphs do not pay": f"computing a layer takes the GPU {gpu}, and launching it the host {launching}: eager "
        "training hides it",
        "measure first": f"launching a layer takes the host {launching}, computing it the GPU {gpu}: {decides}",
    }[ruling]
    return Verdict(ruling=ruling, reason=reason)


def rule(slowest: float, middle: float, quickest: float) -> Ruling:
    """The verdict on shares of eager time that a replay takes, on the slowest, the middle and the quickest host."""
    if quickest <= PAYS_BELOW:
        return "graphs pay"
    if middle >= NO_GAIN_ABOVE and slowest >= LITTLE_GAIN_ABOVE:
        return "graphs do not pay"
    return "measure first"


def measured_verdict(times: Times) -> Verdict:
    """The verdict on measured times."""
    assert times.relative_step_time is not None
    assert times.step_ms is not None
    assert times.eager_step_ms is not None
    pays = times.relative_step_time[1] <= MEASURED_GAIN_BELOW
    planned, eager = times.step_ms[1], times.eager_step_ms[1]
    reason = (
        "by the measured times none of the graphs that may be captured makes a step clearly quicker"
        if planned == eager
        else f"by the measured times a step takes {amount(planned)} ms, eagerly {amount(eager)} ms"
    )
    return Verdict(ruling="graphs pay" if pays else "graphs do not pay", reason=reason)


def _digits(ms: float) -> str:
    """`ms` with two significant digits, and never in exponents."""
    if ms <= 0:
        return "0"
    return f"{ms:.{max(0, 1 - math.floor(math.log10(ms)))}f}"
