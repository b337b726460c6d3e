"""`thdprof calibrate --megatron-args`: measures training steps of the model that a launch script builds."""

from thdprof.runtime.megatron.calibration.script import Request, calibrate_script

__all__ = ["Request", "calibrate_script"]
