"""Pipelines with middle stages on documents that a model learns: by the plan, eagerly, and beside one stage alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_lm import (
    COMMON,
    EXACT,
    FEW_THREADS,
    MEASURES,
    NO_DROPOUT,
    SMALL,
    UNTUNED,
    Ran,
    different_steps,
    environment_here,
    file_name,
    largest_difference,
    plan_of,
    script_run,
    without,
)
from trainer_cases import CAPS

ENVIRONMENT = {**FEW_THREADS, **EXACT, "PYTHONPATH": environment_here(UNTUNED)["PYTHONPATH"]}
ONE_STAGE = "PP 1"
PIPELINES: Mapping[str, tuple[int, str]] = {
    ONE_STAGE: (1, ""),
    "PP 4": (4, "--pipeline-model-parallel-size 4"),
    "PP 2, VPP 2": (2, "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"),
}
"""Ranks and arguments of each pipeline. Ranks share one GPU, as if each were on a host of its own."""
LEARNED = "--lr 6e-4 --min-lr 1e-4 --lr-warmup-iters 10 --lr-decay-iters 100 --lr-decay-style cosine --clip-grad 1.0"
_TABLES, _WORDS, _NEXT = 8, 1500, 3


def stages_lines(script: Path, directory: Path, *, steps: int, jobs: int, names: Sequence[str]) -> list[list[str]]:
    """Lines of the table, the first of which is its head.

    All runs begin with the same weights, which one stage alone has saved: each stage draws its own otherwise.

    Args:
        script: pretrain_gpt.py.
        directory: folder for data, weights, plans and logs.
        steps: steps of each run.
        jobs: runs at once.
        names: pipelines of PIPELINES; runs of one stage are added.
    """
    names = [*dict.fromkeys((ONE_STAGE, *names))]
    data, weights = directory / "data" / "learned", directory / "weights"
    write_learned(data)
    saving = [*stages_flags(ONE_STAGE, data, 1), "--save", str(weights), "--save-interval", "1"]
    saved = script_run(script, saving, environment=ENVIRONMENT, log=directory / "weights.log")
    if saved.code:
        raise SystemExit(f"no weights were saved: {saved.error}; see {directory / 'weights.log'}")
    plans = {}
    for name in names:
        ranks, _ = PIPELINES[name]
        plans[name] = plan_of(
            stages_flags(name, data, steps), directory, file_name(name), gpus=ranks, caps=CAPS, layers_per_graph="all"
        )

    def run(name: str, kind: str) -> Ran:
        ranks, _ = PIPELINES[name]
        folder = directory / file_name(f"{name} {kind}")
        ran = script_run(
            script,
            [*stages_flags(name, data, steps), "--load", str(weights), "--finetune"],
            plan=plans[name],
            replay=kind == "on",
            hosts=ranks,
            tensorboard=folder,
            environment=ENVIRONMENT,
            limit=400,
            log=folder.with_suffix(".log"),
        )
        print(name, kind, ran.code, f"{ran.seconds:.0f} s", ran.error, flush=True)
        return ran

    asked = [(name, kind) for name in reversed(names) for kind in ("on", "off")]
    with ThreadPoolExecutor(jobs) as pool:
        ran = dict(zip(asked, pool.map(lambda one: run(*one), asked), strict=True))
    return lines_of(ran, names)


def stages_flags(name: str, data: Path, steps: int) -> list[str]:
    """Megatron's arguments of a pipeline of PIPELINES."""
    flags = without(shlex.split(f"{SMALL} {COMMON}"), "--lr", "--min-lr", "--lr-decay-style")
    flags += shlex.split(f"{PIPELINES[name][1]} {NO_DROPOUT} {LEARNED}")
    evaluated = f"--eval-interval {max(1, steps // 2)} --eval-iters 2"
    return [*flags, *shlex.split(f"--train-iters {steps} --log-interval 10 {evaluated} --data-path {data}")]


def lines_of(ran: Mapping[tuple[str, str], Ran], names: Sequence[str]) -> list[list[str]]:
    """A line a pipeline: replayed beside eager steps, and its eager losses beside those of one stage."""
    lines = [
        [
            "pipeline",
            "exit codes (on, off)",
            "losses differ",
            "gradient norms differ",
            "validation losses differ",
            "micro-batches replayed, eager",
            "losses, first to last",
            "losses (norms) from one stage's, eagerly",
        ]
    ]
    one = ran[ONE_STAGE, "off"]
    for name in names:
        on, off = ran[name, "on"], ran[name, "off"]
        losses = [value for _, value in sorted(off.scalars.get("lm loss", {}).items())]
        apart = [largest_difference(off, one, measure) for measure in MEASURES]
        lines.append(
            [
                name,
                f"{on.code}, {off.code}",
                *("{} of {}".format(*different_steps(on, off, name)) for name in (*MEASURES, "lm loss validation")),
                f"{on.replayed}, {on.eager}",
                f"{losses[0]:.3f} to {losses[-1]:.3f}" if losses else on.error or off.error,
                f"{apart[0]:.1e} ({apart[1]:.1e}) at most" if losses else "-",
            ]
        )
    return lines


def write_learned(
    prefix: Path,
    *,
    tokens: int = 2_000_000,
    lengths: tuple[float, float] = (4.0, 1.0),
    longest: int = 1024,
    seed: int = 5,
) -> None:
    """A Megatron dataset of documents whose tokens follow one of a few tables, which the first token names.

    Every token has three successors in a table, so that losses fall fast, and fall less where documents attend to each
    other.

    Args:
        prefix: path without .bin and .idx.
        tokens: least number of tokens in all.
        lengths: mean and standard deviation of the logarithm of documents' lengths.
        longest: most tokens of a document.
        seed: of tables, lengths and tokens.
    """
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tables = random.integers(_TABLES, _WORDS, (_TABLES, _WORDS, _NEXT))
    builder, written = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16), 0
    while written < tokens:
        length = max(8, min(longest, int(random.lognormal(*lengths))))
        table = int(random.integers(_TABLES))
        document = [table, _TABLES + table]
        for choice in random.integers(_NEXT, size=length - 2):
            document.append(int(tables[table, document[-1], choice]))
        builder.add_document(torch.tensor(document), [length])
        written += length
    builder.finalize(f"{prefix}.idx")
