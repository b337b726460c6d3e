"""Trains on packs before and after `thdprof pack`: predicted and measured step times, and losses of the same documents.

    python benchmarks/packed_runs.py trl --gpu h200 --directory build/packed-trl
    python benchmarks/packed_runs.py ranks --gpu h200 --directory build/packed-ranks
    python benchmarks/packed_runs.py sft --megatron-lm ~/Megatron-LM --directory build/packed-sft

`trl` and `sft` train one epoch on one GPU, by SFTTrainer and by Megatron-LM's own pretrain_gpt.py. `ranks` times each
micro-batch of packs of --row tokens on one GPU; a step of two ranks takes as long as the slower of its two. With
`--dry` all are tiny: `trl` and `ranks` train on a processor, and `sft` ends before the training.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from statistics import fmean
from typing import Any

import megatron_lm as lm
import numpy as np
from support import conversations
from transformers_sft import SAME, run_modes, write_rows
from transformers_sft import SHAPES as TRL_SHAPES

SIDES = ("before", "after")


def run_trl(options: argparse.Namespace) -> None:
    """Train SFTTrainer on both, with eight micro-batches a step; or one by one, as two ranks would."""
    import pyarrow.parquet as pq

    alone, shape = options.what == "ranks", "tiny" if options.dry else options.shape
    row, rows, accumulation = (options.row, 64, 1) if alone else (4096, 320, 8)
    mean, sigma = (6.5, 1.6) if alone else (5.5, 1.3)
    if options.dry:
        row, rows = row // 16, rows // 8
    directory, config = options.directory, options.directory / "config.json"
    for side in SIDES:
        (directory / side).mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps({**SAME, **TRL_SHAPES[shape], "tie_word_embeddings": True}))
    before, after = (directory / side / "packed.parquet" for side in SIDES)
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(mean, sigma, rows * row).astype(int), 8, row)
    lengths = drawn[: np.searchsorted(np.cumsum(drawn), rows * row)]
    write_rows(before, rng, lengths, row=row, vocabulary=TRL_SHAPES[shape].get("vocab_size", 151_936))
    run = f"--loader trainer --seq-length {row} --seed 42 --gpu {options.gpu} --gradient-accumulation {accumulation}"
    words = [*run.split(), "--model", str(config)]
    ranks = "2" if alone else "1"
    packed = pack(["pack", str(before), *words, "--data-parallel-size", ranks, "--to", "trl", "-o", str(after)])
    order = directory / "sequential.yaml"
    order.write_text("sampling: sequential\n")
    measured, losses = {}, {}
    for side, file, sampling in zip(SIDES, (before, after), ("random", "sequential"), strict=True):
        settings = ["--settings", str(order)] if side == "after" else []
        steps = pq.ParquetFile(file).metadata.num_rows // accumulation
        settings += ["--train-iters", str(steps), "-o", str(directory / side / "plan.yaml"), "--force"]
        lm.run_thdprof(["analyze", str(file), *words, *settings])
        run = f"--shape {shape} --modes {options.mode} --steps {steps} --accumulation {accumulation}"
        run += f" --gpu {options.gpu} --sampling {sampling}"
        kept = ["--directory", str(directory / side), "--out", str(directory / f"{side}.jsonl")]
        found = run_modes([*run.split(), *kept])
        if not found:
            raise SystemExit(f"{side}: the run failed")
        seconds, warm = np.array(found[0]["seconds"]), options.warm
        if alone:  # each two steps are one of two ranks, which takes as long as the slower of them
            seconds, warm = seconds[: len(seconds) // 2 * 2].reshape(-1, 2).max(axis=1), options.warm // 2
        measured[side], losses[side] = 1000 * float(seconds[warm:].mean()), fmean(found[0]["losses"])
    print_sides(packed, measured, losses)


def pack(words: list[str]) -> dict[str, Any]:
    """The JSON that `thdprof pack` prints, after its notes."""
    printed = lm.run_thdprof([*words, "--json", "--force"])
    packed: dict[str, Any] = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))[0]
    return packed


def run_megatron(options: argparse.Namespace) -> None:
    """Train pretrain_gpt.py --sft on lines that were filled in the order of the conversations, and on new ones."""
    directory, shape = options.directory, lm.SMALL if options.dry else lm.SHAPES["qwen3-0.6b"]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = directory / "tokenizer"
    if not tokenizer.exists():
        conversations.write_tokenizer(tokenizer)
    rng, row = np.random.default_rng(1), 1024 if options.dry else 4096
    lines: list[conversations.Line] = [[]]
    filled = 0.0
    for words in np.clip(rng.lognormal(3.5, 1.2, 200 if options.dry else 4000), 2, row // 24):
        one = conversations.conversation(rng, longest=int(words) + 1)
        tokens = 1.7 * sum(len(message["content"].split()) + 6 for message in one)
        if filled + tokens > row and lines[-1]:
            lines.append([])
            filled = 0.0
        lines[-1] += one
        filled += tokens
    before, after = conversations.write_lines(directory / "before.jsonl", lines), directory / "after.jsonl"
    run = "--eval-interval 1000 --eval-iters 0 --log-interval 1 --split 100,0,0 --dataloader-type single"
    flags = lm.train_conversations(lm.merge_flags(lm.COMMON, shape, lm.NO_DROPOUT, run), tokenizer)
    script = directory / "before.sh"
    script.write_text(
        f"torchrun --nproc-per-node 1 pretrain_gpt.py {shlex.join([*flags, '--data-path', str(before)])}\n"
    )
    words = ["pack", "--megatron-args", str(script), "--train-iters", "1000", "--gpu", options.gpu, "-o", str(after)]
    packed = pack([*words, "--to", "megatron-sft"])
    measured, losses = {}, {}
    for side, file in zip(SIDES, (before, after), strict=True):
        steps = packed[side]["packs"] // 8
        words = [*flags, "--data-path", str(file), "--train-iters", str(steps)]
        plan = lm.plan_of(words, directory, side, more=["--gpu", options.gpu])
        if options.dry:
            print(f"{side}: {steps} steps, {plan}, {shlex.join(words)}")
            continue
        ran = lm.script_run(options.megatron_lm / "pretrain_gpt.py", words, directory, f"{side}-run", plan=plan)
        ms = ran.step_ms(after=options.warm)
        if ran.code or ms is None:
            raise SystemExit(f"{side}: exit code {ran.code}: {ran.error}")
        measured[side], losses[side] = ms, fmean(ran.scalars["lm loss"].values())
    print_sides(packed, measured, losses)


def print_sides(packed: dict[str, Any], measured: dict[str, float], losses: dict[str, float]) -> None:
    """A row for each side, and one for the gain; times are milliseconds of a step."""
    rows = [
        ["packs", "number", "slowest over mean", "predicted ms", "measured ms", "predicted / measured", "mean loss"]
    ]
    predicted = {side: fmean(packed[side]["step_ms"]) for side in SIDES}
    for side in SIDES:
        slowest = f"{packed[side]['slowest_over_mean']:.3f}"
        cells = [side, f"{packed[side]['packs']:,}", slowest, f"{predicted[side]:.1f}"]
        if side in measured:
            share = f"{predicted[side] / measured[side]:.3f}"
            cells += [f"{measured[side]:.1f}", share, f"{losses[side]:.4f}"]
        rows.append([*cells, *[""] * (len(rows[0]) - len(cells))])
    gains = [times["after"] / times["before"] for times in (predicted, measured) if times]
    cells = [f"{gain:.3f}" for gain in gains] + ([f"{gains[0] / gains[1]:.3f}"] if measured else [])
    rows.append([*["after / before", "", "", *cells, *[""] * 4][: len(rows[0])]])
    print("\n".join(lm.table(rows)))


def main() -> None:
    """Run one of the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trl", "ranks", "sft"))
    parser.add_argument("--directory", type=Path, required=True, help="data, packs and plans are kept here")
    parser.add_argument("--megatron-lm", type=Path, help="checkout of Megatron-LM, for sft")
    parser.add_argument("--gpu", default="h200", help="the GPU that is predicted for [h200]")
    parser.add_argument("--shape", choices=TRL_SHAPES, default="0.6b", help="model of trl and ranks [0.6b]")
    parser.add_argument("--row", type=int, default=32_768, help="tokens of a pack of ranks [32768]")
    parser.add_argument("--warm", type=int, default=4, help="first steps that are not counted [4]")
    parser.add_argument("--dry", action="store_true", help="tiny, without a GPU")
    options = parser.parse_args()
    options.mode = "padded" if options.dry else "plan"
    if options.what == "sft" and options.megatron_lm is None and not options.dry:
        parser.error("sft needs --megatron-lm")
    (run_megatron if options.what == "sft" else run_trl)(options)


if __name__ == "__main__":
    main()
