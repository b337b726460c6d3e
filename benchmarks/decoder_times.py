"""Modelled times of decoders beside measured ones, as Markdown; no GPU.

    python benchmarks/decoder_times.py benchmarks/results/decoder-times.jsonl

A row of the file is a model in one precision with one recomputation: `case`, `way`, `fitted`, `model` (fields of
`thdprof.training.Model`), `batch` (tokens, documents, cap), `lengths` of its documents, `replay_ms` and
`eager_queued_ms`. `thdprof calibrate` measures such times of one model. Commit 3eaf6cb has the script that measured
the rows of the file, case by case and kernel by kernel.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lm import table

from thdprof.analyze.times.decoder import Decoder, Work
from thdprof.analyze.times.gpus import find_gpu
from thdprof.analyze.times.modelled_costs import STATED
from thdprof.training import Model

LATER = ("qwen3-8b", "phi3-mini", "gpt3-1.3b", "qwen2.5-1.5b", "olmoe", "deepseek-v2-lite")
"""Cases that were first measured after the constants of the model of times were fixed."""
COLUMNS = (
    "model", "layers", "way", "tokens", "documents", "cap", "set", "replay ms", "modelled", "ratio", "eager ms",
    "modelled range", "inside",
)  # fmt: skip


def compared(row: dict[str, Any], gpu: str) -> tuple[str, float, bool, tuple[str, ...]]:
    """A row beside the model of times: its kind, modelled replay over measured, eager in its range, cells."""
    fields = {f.name for f in dataclasses.fields(Model)}
    model = Model(**{k: tuple(v) if isinstance(v, list) else v for k, v in row["model"].items() if k in fields})
    batch, squared = row["batch"], float(sum(n * n for n in row["lengths"]))
    decoder = Decoder(model, find_gpu(gpu))
    replayed, eagerly = (
        decoder.time(Work(tokens=batch["tokens"], squared=squared, max_seqs=batch[n])) for n in ("cap", "documents")
    )
    low, _, high = STATED.eager_ms(eagerly)
    kind = "fitted" if row["fitted"] else "later" if row["case"] in LATER else "held out"
    ratio, eager = replayed.replay_ms / row["replay_ms"], row["eager_queued_ms"]
    inside = low * 0.99 <= eager <= high
    cells = (
        row["case"], str(model.num_layers), row["way"], f"{batch['tokens']:,}", str(batch["documents"]),
        str(batch["cap"]), kind, f"{row['replay_ms']:.1f}", f"{replayed.replay_ms:.1f}", f"{ratio:.3f}",
        f"{eager:.1f}", f"{low:.1f} to {high:.1f}", "yes" if inside else "no",
    )  # fmt: skip
    return kind, ratio, inside, cells


def compare(files: Sequence[Path]) -> str:
    """All rows of `files` as Markdown, and how near the modelled times are to them."""
    read = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    gpu = [row["gpu"] for row in read if row["case"] == "environment"][-1]
    results = [compared(row, gpu) for row in read if "replay_ms" in row]
    lines = table([COLUMNS, *(cells for *_, cells in results)])
    for kind in ("fitted", "held out", "later", "all"):
        chosen = [(ratio, inside) for its, ratio, inside, _ in results if kind in (its, "all")]
        if chosen:
            errors = [abs(ratio - 1) for ratio, _ in chosen]
            lines.append(
                f"\n{kind}: {len(chosen)} rows; replay within 15% in {sum(e <= 0.15 for e in errors)}, within 25% in "
                f"{sum(e <= 0.25 for e in errors)}, largest error {max(errors):.1%}, mean ratio "
                f"{statistics.fmean(ratio for ratio, _ in chosen):.3f}; eager inside the range in "
                f"{sum(inside for _, inside in chosen)}"
            )
    return "\n".join(lines)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    print(compare(parser.parse_args().files))


if __name__ == "__main__":
    main()
