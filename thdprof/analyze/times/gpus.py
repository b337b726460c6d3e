"""The rates of GPUs on which times are modelled.

Sustained rates of the H200 were measured (benchmarks/results/decoder-times.md). Those of other GPUs are scaled from
the vendors' data sheets; the H100's, which has the H200's processor and slower memory, were compared with measured
decoders.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from thdprof.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU: what it sustains in training, not its peak."""

    name: str
    """Name for `--gpu`."""
    label: str
    """Name in sentences."""
    bf16_tflops: float
    """Rate of large bf16 matrix products, in TFLOP/s."""
    fp8_tflops: float | None
    """Rate of large FP8 matrix products, in TFLOP/s; None where the GPU has none."""
    other_kernels: float = 1.0
    """Rate of kernels that are bound neither by matrix products nor by memory, beside the H200's."""
    memory_tbps: float
    """Rate at which kernels read and write memory beyond the cache, in TB/s, by the data sheet."""
    cache_mib: int
    """Level-2 cache, in MiB: smaller tensors are read at the H200's rate whatever the memory."""
    multiprocessors: int
    """Streaming multiprocessors."""
    link_gbps: float
    """Bandwidth of one GPU to the others of its host, in GB/s and one direction, by the data sheet."""
    memory_gib: int
    """Memory of the GPU in GiB."""
    compared: bool = False
    """Whether modelled times were compared with measured ones on this GPU."""


_H200 = Gpu(
    name="h200",
    label="H200",
    bf16_tflops=700,
    fp8_tflops=1250,
    memory_tbps=4.8,
    cache_mib=50,
    multiprocessors=132,
    link_gbps=450,
    memory_gib=139,
    compared=True,
)
_H100 = replace(_H200, name="h100", label="H100 SXM", bf16_tflops=650, fp8_tflops=1150, memory_tbps=3.35, memory_gib=79)
_HOPPER = replace(_H200, bf16_tflops=670, fp8_tflops=1200, compared=False)
_A100 = Gpu(
    name="a100",
    label="A100 SXM 80 GB",
    bf16_tflops=250,
    fp8_tflops=None,
    other_kernels=0.6,
    memory_tbps=2.04,
    cache_mib=40,
    multiprocessors=108,
    link_gbps=300,
    memory_gib=79,
)
_B200 = Gpu(
    name="b200",
    label="B200",
    bf16_tflops=1600,
    fp8_tflops=3000,
    other_kernels=1.3,
    memory_tbps=7.7,
    cache_mib=126,
    multiprocessors=148,
    link_gbps=900,
    memory_gib=178,
)
_GPUS = (
    _H200,
    _H100,
    replace(_HOPPER, name="gh200", label="GH200", memory_tbps=4.0, memory_gib=94),
    replace(_HOPPER, name="h800", label="H800", memory_tbps=3.35, link_gbps=200, memory_gib=79),
    _A100,
    _B200,
    replace(
        _B200,
        name="gb200",
        label="GB200",
        bf16_tflops=1750,
        fp8_tflops=3300,
        other_kernels=1.35,
        multiprocessors=152,
        memory_gib=185,
    ),
    replace(_B200, name="b300", label="B300", memory_gib=268),
)
GPUS = {gpu.name: gpu for gpu in _GPUS}
"""Every GPU that times are modelled for, by its name."""


def find_gpu(name: str) -> Gpu:
    """The GPU that `--gpu` names; also by the name that the driver gives, such as "NVIDIA H100 80GB HBM3".

    Raises:
        UsageError: no such GPU is known.
    """
    gpu = known_gpu(name)
    if gpu is None:
        raise UsageError(f"--gpu {name}: choose one of {', '.join(GPUS)}, or measure on yours with thdprof calibrate")
    return gpu


_OTHER_BOARDS = frozenset(("pcie", "nvl", "40gb"))


def known_gpu(text: str) -> Gpu | None:
    """The GPU whose name is a word of `text`; None where times are modelled for none of them."""
    words = text.lower().replace("-", " ").split()
    if _OTHER_BOARDS & {*words}:  # boards with fewer processors, less memory or lower power than their namesakes
        return None
    return next((gpu for gpu in _GPUS if gpu.name in words), None)
