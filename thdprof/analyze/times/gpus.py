"""The rates of GPUs on which times are modelled.

Sustained rates of the H200 were measured (benchmarks/results/decoder-times.md). Those of other GPUs are scaled from
the vendors' data sheets; the H100's, which has the H200's processor and slower memory, were compared with measured
decoders.
"""

from __future__ import annotations

from dataclasses import dataclass

from thdprof.errors import UsageError


@dataclass(frozen=True, slots=True)
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
    other_kernels: float
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
    peak_tflops: int
    """Dense bf16 peak of the data sheet, in TFLOP/s, by which MFU is counted."""
    compared: bool = False
    """Whether modelled times were compared with measured ones on this GPU."""


_GPUS = (
    # name, label, TFLOP/s in bf16 and FP8, other kernels, memory, cache, multiprocessors, links, memory, peak, compared
    Gpu("h200", "H200", 700, 1250, 1.0, 4.8, 50, 132, 450, 139, 989, compared=True),
    Gpu("h100", "H100 SXM", 650, 1150, 1.0, 3.35, 50, 132, 450, 79, 989, compared=True),
    Gpu("gh200", "GH200", 670, 1200, 1.0, 4.0, 50, 132, 450, 94, 989),
    Gpu("h800", "H800", 670, 1200, 1.0, 3.35, 50, 132, 200, 79, 989),
    Gpu("a100", "A100 SXM 80 GB", 250, None, 0.6, 2.04, 40, 108, 300, 79, 312),
    Gpu("b200", "B200", 1600, 3000, 1.3, 7.7, 126, 148, 900, 178, 2250),
    Gpu("gb200", "GB200", 1750, 3300, 1.35, 7.7, 126, 152, 900, 185, 2500),
    Gpu("b300", "B300", 1600, 3000, 1.3, 7.7, 126, 148, 900, 268, 2250),
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
