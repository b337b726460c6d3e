"""Whether graphs pay: the verdict on times, and its reason."""

from __future__ import annotations

from thdprof.analyze.times.modelled_costs import ModelledTimes
from thdprof.analyze.times.results import Range, Ruling, Times, Verdict

PAYS_BELOW = 0.95
"""Share of the eager step time below which modelled graphs pay for certain."""
NO_GAIN_ABOVE = 0.98
"""Share of the eager step time above which they do not."""


def rule(relative: Range) -> Ruling:
    """The verdict on a range of relative step times."""
    low, high = relative
    if high <= (NO_GAIN_ABOVE if low == high else PAYS_BELOW):
        return "graphs pay"
    return "graphs do not pay" if low > NO_GAIN_ABOVE else "measure first"


def modelled_verdict(modelled: ModelledTimes, relative: Range) -> Verdict:
    """The verdict on modelled times, with the reason that launching and computing a layer give."""
    ruling = rule(relative)
    layers = modelled.decoder.num_layers
    time = modelled.at(modelled.shapes.typical)
    low, high = (ms / layers for ms in modelled.host.launch_ms(time))
    gpu = time.gpu_ms / layers
    launching = f"launching a layer takes the host {_span(low, high)} ms"
    reason = {
        "graphs pay": f"{launching}, computing it the GPU {gpu:.2g} ms: eager training waits for the host",
        "graphs do not pay": f"computing a layer takes the GPU {gpu:.3g} ms, and {launching}: the GPU is the bound",
        "measure first": f"{launching}, computing it the GPU {gpu:.2g} ms: it depends on the processor; run "
        "thdprof calibrate on yours",
    }[ruling]
    return Verdict(ruling=ruling, reason=reason)


def measured_verdict(times: Times) -> Verdict:
    """The verdict on measured times."""
    assert times.relative_step_time is not None
    relative = times.relative_step_time[1]
    ruling: Ruling = "graphs pay" if relative <= NO_GAIN_ABOVE else "graphs do not pay"
    saved = f"a step takes {relative:.2f} of its eager time, measured on {times.basis}"
    return Verdict(ruling=ruling, reason=saved)


def _span(low: float, high: float) -> str:
    return f"{low:.2g} to {high:.2g}"
