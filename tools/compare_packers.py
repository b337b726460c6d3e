"""Packs random documents by the released packers of other trainers and by thdprof's, and counts what was compared.

Usage: python tools/compare_packers.py DIRECTORY [CASES], after `pip install --no-deps --target DIRECTORY PACKAGES`
(`make compare-packers`). Only the functions that pack are taken out of the packages' files, since the files import
whole trainers. NeMo-RL is compared where its checkout is `DIRECTORY/nemo-rl`: it is on no index. The exit code is 1 if
packs differ.
"""

from __future__ import annotations
import __future__

import abc
import ast
import bisect
import copy
import enum
import heapq
import math
import queue
import random
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from thdprof.systems import find_packer  # noqa: E402
from thdprof.training import TrainingSettings  # noqa: E402

Packs = list[list[int]]
Case = tuple[list[int], int]
"""Lengths of documents, and the most tokens of a pack."""
Source = Callable[[Path, np.random.Generator, Case], tuple[Packs, Packs]]
"""The packs of a released packer and thdprof's, for a case and random settings."""


def load(path: Path, *names: str, **given: Any) -> SimpleNamespace:
    """The functions and classes `names` of a file as they stand in it; `given` is what they use besides."""
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.ClassDef
    tree.body = [node for node in ast.walk(tree) if isinstance(node, kinds) and node.name in names]
    exec(compile(tree, str(path), "exec", __future__.annotations.compiler_flag), given)
    return SimpleNamespace(**{name: given[name] for name in names})


def pack(documents: list[int], **values: Any) -> Packs:
    """thdprof's packs."""
    settings = TrainingSettings(**values)
    packing = find_packer(settings.packer).pack(np.array(documents, dtype=np.int32), settings)
    return [part.tolist() for part in np.split(packing.rows.document_tokens, packing.rows.row_offsets[1:-1])]


def compare_axolotl(directory: Path, rng: np.random.Generator, case: Case) -> tuple[Packs, Packs]:
    """`pack_group` of each group, as `pack_parallel` calls it."""
    file = directory / "axolotl/utils/samplers/multipack.py"
    pack_group = load(file, "pack_group", numba=numba, np=np).pack_group.py_func
    (documents, size), group, cap = case, int(rng.choice([7, 100, 100_000])), int(rng.integers(1, 6))
    lengths = np.array(documents)
    parts = [(lengths[start : start + group], start) for start in range(0, len(lengths), group)]
    theirs = chain.from_iterable(pack_group(part, start, size, len(part), cap) for part, start in parts)
    ours = pack(documents, seq_length=size, packer="multipack", packing_batch=group, max_docs_per_pack=cap)
    return [[documents[at] for at in each] for each in theirs], ours


def compare_llamafactory(directory: Path, rng: np.random.Generator, case: Case) -> tuple[Packs, Packs]:
    """`greedy_knapsack` of each batch; its documents are cut to `cutoff_len` - 1 before."""
    file = directory / "llamafactory/data/processor/processor_utils.py"
    source = load(file, "search_for_fit", "greedy_knapsack", bisect=bisect)
    (documents, size), batch = case, int(rng.choice([1, 7, 50, 1000]))
    cut = [min(length, size - 1) for length in documents]
    theirs = [source.greedy_knapsack(cut[start : start + batch], size - 1) for start in range(0, len(cut), batch)]
    ours = pack(documents, seq_length=size, packer="greedy_knapsack", packing_batch=batch)
    return list(chain.from_iterable(theirs)), ours


def compare_swift(directory: Path, rng: np.random.Generator, case: Case) -> tuple[Packs, Packs]:
    """`create_packed_idx` of each part of `split_list`."""
    sys.path.append(str(directory))  # for binpacking
    file = directory / "swift/dataset/packing.py"
    source = load(file, "calculate_matched_group", "PackingDataset", Dataset=object, Optional=None)
    split_list = load(directory / "swift/utils/utils.py", "split_list", np=np).split_list
    (documents, size), processes = case, int(rng.integers(1, 4))
    packer = str(rng.choice(["binpack", "swift_sequential"]))
    theirs = []
    for part in split_list(
        documents, min(processes, math.ceil(len(documents) / source.PackingDataset.PACKING_BATCH_SIZE))
    ):
        answers: queue.SimpleQueue[tuple[int, Any, int]] = queue.SimpleQueue()
        source.PackingDataset.create_packed_idx(0, 0, part, answers, size, packer.removeprefix("swift_"))
        while (answer := answers.get())[2] != -1:
            theirs += [[length for _, length in each] for each in answer[1]]
    return theirs, pack(documents, seq_length=size, packer=packer, packing_processes=processes)


def compare_verl(directory: Path, rng: np.random.Generator, case: Case) -> tuple[Packs, Packs]:
    """`_balance_batch` of the trainer, then `rearrange_micro_batches`, both on one rank."""
    no_group = SimpleNamespace(is_initialized=lambda: False)
    select = SimpleNamespace(index_select_tensor_dict=lambda batch, partition: partition)
    names = ("calculate_workload", "karmarkar_karp", "get_seqlen_balanced_partitions", "ceildiv", "roundup_divisible",
             "rearrange_micro_batches")  # fmt: skip
    file = directory / "verl/utils/seqlen_balancing.py"
    source = load(file, *names, torch=torch, dist=no_group, tu=select, heapq=heapq, copy=copy)
    trainer = load(
        directory / "verl/trainer/ppo/ray_trainer.py",
        "_balance_batch",
        torch=torch,
        log_seqlen_unbalance=lambda **_: {},
        calculate_workload=source.calculate_workload,
        get_seqlen_balanced_partitions=source.get_seqlen_balanced_partitions,
    )
    documents, size, order = case[0][:64], case[1], []
    mask = torch.arange(size)[None] < torch.tensor(documents)[:, None]
    one_rank = SimpleNamespace(_get_dp_size=lambda *_: 1, actor_rollout_wg=None)
    trainer._balance_batch(one_rank, SimpleNamespace(batch={"attention_mask": mask}, reorder=order.extend), {})
    lengths = [documents[at] for at in order]
    ends = torch.tensor([0, *np.cumsum(lengths).tolist()])
    batch = {"input_ids": SimpleNamespace(is_nested=True, offsets=lambda: ends)}
    parts, _ = source.rearrange_micro_batches(batch, size)
    ours = pack(documents, loader="single", seq_length=size, packer="karmarkar_karp", global_batch_size=len(documents))
    return [[lengths[at] for at in each] for each in parts], ours


def compare_nemo(directory: Path, rng: np.random.Generator, case: Case) -> tuple[Packs, Packs]:
    """`_pack_implementation` and `_adjust_bin_count` of a packer, and every so-many-th pack for a rank."""
    packers = {"concatenative": "ConcatenativePacker", "nemo_first_fit_decreasing": "FirstFitDecreasingPacker",
               "modified_first_fit_decreasing": "ModifiedFirstFitDecreasingPacker"}  # fmt: skip
    names = ("SequencePacker", "FirstFitPacker", *packers.values())
    given = {
        "ABC": abc.ABC,
        "abstractmethod": abc.abstractmethod,
        "math": math,
        "random": random,
        "enum": enum,
        "bisect": bisect.bisect,
    }
    source = vars(load(directory / "nemo-rl/nemo_rl/data/packing/algorithms.py", *names, **given))
    (documents, size), ranks, packer = case, int(rng.integers(1, 5)), str(rng.choice([*packers]))
    documents += documents[: -len(documents) % ranks]
    theirs = source[packers[packer]](size, bin_count_multiple=ranks)
    try:
        packs = theirs._adjust_bin_count(theirs._pack_implementation(documents))
    except ValueError:  # fewer documents than ranks, on which both stop
        return [], []
    ours = pack(documents, loader="single", seq_length=size, packer=packer, data_parallel_size=ranks,
                global_batch_size=len(documents))  # fmt: skip
    return [[documents[at] for at in each] for rank in range(ranks) for each in packs[rank::ranks]], ours


SOURCES: dict[str, Source] = {
    "axolotl": compare_axolotl,
    "llamafactory": compare_llamafactory,
    "ms-swift": compare_swift,
    "verl": compare_verl,
    "nemo-rl": compare_nemo,
}


def find_version(directory: Path, name: str) -> str | None:
    """The version of a package in `directory`, or the commit of a checkout; None where it is not there."""
    if name == "nemo-rl":
        command = ["git", "-C", str(directory / name), "rev-parse", "--short=8", "HEAD"]
        has_history = (directory / name / ".git").exists()
        return subprocess.check_output(command, text=True).strip() if has_history else None
    wanted = name.replace("-", "_")
    found = metadata.distributions(path=[str(directory)])
    return next((each.version for each in found if each.metadata["Name"].replace("-", "_") == wanted), None)


def main(directory: Path, num_cases: int = 200) -> None:
    """Compare every packer that is there, and print a line for each."""
    num_compared = num_differing = 0
    for name, compare in SOURCES.items():
        version, packs, differing = find_version(directory, name), 0, []
        if version is None:
            print(f"{name}: not in {directory}")
            continue
        for seed in range(num_cases):
            rng = np.random.default_rng(seed)
            size = int(rng.choice([8, 60, 500]))
            count = int(rng.integers(1, 300) if seed % 20 else rng.integers(1000, 4000))
            documents = np.clip(rng.lognormal(np.log(size / 6), 1, count).astype(int), 2, size).tolist()
            theirs, ours = compare(directory, rng, (documents, size))
            packs += len(theirs)
            if theirs != ours:
                differing.append(seed)
        print(f"{name} {version}: {num_cases} cases, {packs:,} packs, {len(differing)} cases differ {differing[:5]}")
        num_compared, num_differing = num_compared + packs, num_differing + len(differing)
    sys.exit(num_differing > 0 or num_compared == 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
