"""Trains on packs before and after `thdprof pack`: predicted and measured step times, and losses of the same documents.

    python benchmarks/packed_runs.py trl --gpu h200 --directory build/packed-trl
    python benchmarks/packed_runs.py ranks --gpu h200 --directory build/packed-ranks
    python benchmarks/packed_runs.py sft --megatron-lm ~/Megatron-LM --directory build/packed-sft

`trl` and `sft` train one epoch on one GPU, by SFTTrainer and by Megatron-LM's own pretrain_gpt.py. `ranks` times each
micro-batch of packs of --row tokens on one GPU; a step of two ranks takes as long as the slower of its two. `grown`
trains pretrain_gpt.py on conversations that grow after the steps that its plan is of, and by the plan that this run
wrote; `grown-trl` trains SFTTrainer so. With `--dry` all are tiny: SFTTrainer trains on a processor, and the others end
before the training.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import megatron_lm as lm
import numpy as np
from support import conversations
from transformers_sft import SAME, run_modes, write_rows
from transformers_sft import SHAPES as TRL_SHAPES

from thdprof.plan import load_plan

SIDES = ("before", "after")


def run_trl(options: argparse.Namespace) -> None:
    """Train SFTTrainer on both, with eight micro-batches a step; or one by one, as two ranks would."""
    import pyarrow.parquet as pq

    alone, shape = options.what == "ranks", "tiny" if options.dry else options.shape
    row, rows, accumulation = (options.row, 64, 1) if alone else (4096, 320, 8)
    mean, sigma = (6.5, 1.6) if alone else (5.5, 1.3)
    if options.dry:
        row, rows = row // 16, rows // 8
    directory = options.directory
    config, order = write_settings(directory, shape)
    before, after = (directory / side / "packed.parquet" for side in SIDES)
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(mean, sigma, rows * row).astype(int), 8, row)
    lengths = drawn[: np.searchsorted(np.cumsum(drawn), rows * row)]
    write_rows(before, rng, lengths, row=row, vocabulary=TRL_SHAPES[shape].get("vocab_size", 151_936))
    run = f"--loader trainer --seq-length {row} --seed 42 --gpu {options.gpu} --gradient-accumulation {accumulation}"
    words = [*run.split(), "--model", str(config)]
    ranks = "2" if alone else "1"
    packed = pack(["pack", str(before), *words, "--data-parallel-size", ranks, "--to", "trl", "-o", str(after)])
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


def write_settings(directory: Path, shape: str) -> tuple[Path, Path]:
    """Make a folder for each side, a model's config, and settings of a run that reads its rows in their order."""
    for side in SIDES:
        (directory / side).mkdir(parents=True, exist_ok=True)
    config, order = directory / "config.json", directory / "sequential.yaml"
    config.write_text(json.dumps({**SAME, **TRL_SHAPES[shape], "tie_word_embeddings": True}))
    order.write_text("sampling: sequential\n")
    return config, order


def pack(words: list[str]) -> dict[str, Any]:
    """The JSON that `thdprof pack` prints, after its notes."""
    printed = lm.run_thdprof([*words, "--json", "--force"])
    packed: dict[str, Any] = json.JSONDecoder().raw_decode(printed, printed.index("{\n"))[0]
    return packed


def run_megatron(options: argparse.Namespace) -> None:
    """Train pretrain_gpt.py --sft on lines that were filled in the order of the conversations, and on new ones."""
    directory, row = options.directory, 1024 if options.dry else 4096
    flags = sft_flags(directory, lm.SMALL if options.dry else lm.SHAPES["qwen3-0.6b"])
    rng = np.random.default_rng(1)
    words = np.clip(rng.lognormal(3.5, 1.2, 200 if options.dry else 4000), 2, row // 24)
    before = conversations.write_lines(directory / "before.jsonl", fill_lines(rng, words, row))
    after, script = directory / "after.jsonl", directory / "before.sh"
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
        if ran := train(options, words, side, plan):
            measured[side] = ran.step_ms(after=options.warm) or 0.0
            losses[side] = fmean(ran.scalars["lm loss"].values())
    print_sides(packed, measured, losses)


def run_grown(options: argparse.Namespace) -> None:
    """Train pretrain_gpt.py --sft on conversations that grow, by the plan of the short ones, and by the revised one."""
    directory, rng, steps = options.directory, np.random.default_rng(2), 100
    flags = sft_flags(directory, lm.SMALL)
    short, grown = (fill_lines(rng, [longest] * 20 * 8 * steps, 1024)[: 8 * steps] for longest in (3, 40))
    both, plan = [*flags, "--data-path", str(conversations.write_lines(directory / "both.jsonl", short + grown))], None
    for name, lines in (("short", short), ("grown", grown)):
        data = ["--data-path", str(conversations.write_lines(directory / f"{name}.jsonl", lines))]
        words = [*flags, *data, "--train-iters", str(steps)]
        if plan is None:
            plan = lm.plan_of(words, directory, "plan", caps=(1.0,))
            most = load_plan(plan).microbatches
            cap = {"max_seqs": int(most.n_seqs.max), "max_seqlen": int(most.max_seqlen.max), "share": 1.0}
            lm.change_graphs(plan, plan, buckets=[cap])
            words = [*both, "--train-iters", str(2 * steps)]
        if ran := train(options, words, name, plan):
            said = [line for line in ran.log.splitlines() if "the data is not what the plan" in line]
            print(f"{plan.name}: {ran.count('replayed')} replayed, {ran.eager} eager", *said, sep="\n", flush=True)
            plan = directory / "plan-revised.yaml"


def run_grown_rows(options: argparse.Namespace) -> None:
    """Train SFTTrainer on rows of documents that grow, by the plan of the short ones, and by the revised one."""
    from datasets import Dataset, concatenate_datasets

    shape, rows = ("tiny", 16) if options.dry else ("smollm2-135m", 200)
    rng, data = np.random.default_rng(3), []
    directory, plan = options.directory, options.directory / "plan.yaml"
    config, order = write_settings(directory, shape)
    for name, mean, longest in (("short", 3.5, 128), ("grown", 5.5, 2048)):
        lengths = np.clip(rng.lognormal(mean, 0.7, rows * 4096 // 25).astype(int), 8, longest)
        write_rows(path := directory / f"{name}.parquet", rng, lengths, row=4096, vocabulary=512)
        filled = Dataset.from_parquet(str(path)).filter(lambda row: len(row["input_ids"]) > 4000)
        data.append(filled.select(range(rows)))
        data[-1].to_parquet(str(path))
    run = f"--loader trainer --seq-length 4096 --seed 42 --gradient-accumulation 2 --train-iters {rows // 2}"
    words = [*run.split(), "--gpu", options.gpu, "--model", str(config), "--settings", str(order)]
    lm.run_thdprof(["analyze", str(directory / "short.parquet"), *words, "-o", str(plan), "--force"])
    most = load_plan(plan).microbatches
    cap = {"max_seqs": int(most.n_seqs.max), "max_seqlen": int(most.max_seqlen.max), "share": 1.0}
    lm.change_graphs(plan, plan, buckets=[cap], impl="module")
    for side, trained in zip(SIDES, (concatenate_datasets(data), data[1]), strict=True):
        trained.to_parquet(str(directory / side / "packed.parquet"))
        (directory / side / "plan.yaml").write_text(plan.read_text())
        run = f"--shape {shape} --modes {options.mode} --accumulation 2 --sampling sequential --gpu {options.gpu}"
        run_modes([*run.split(), "--steps", str(len(trained) // 2), "--directory", str(directory / side)])
        if options.dry:
            break
        plan = directory / side / options.mode / "thdprof-plan-revised.yaml"


def sft_flags(directory: Path, shape: str) -> list[str]:
    """Arguments of a script that trains on conversations in the order of their file, with a new tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = directory / "tokenizer"
    if not tokenizer.exists():
        conversations.write_tokenizer(tokenizer)
    run = "--eval-interval 1000 --eval-iters 0 --log-interval 1 --split 100,0,0 --dataloader-type single"
    return lm.train_conversations(lm.merge_flags(lm.COMMON, shape, lm.NO_DROPOUT, run), tokenizer)


def fill_lines(rng: np.random.Generator, words: Sequence[float], row: int) -> list[conversations.Line]:
    """Lines of at most about `row` tokens, filled with conversations whose texts have at most so many words."""
    lines: list[conversations.Line] = [[]]
    filled = 0.0
    for longest in words:
        one = conversations.conversation(rng, longest=int(longest) + 1)
        tokens = 1.7 * sum(len(message["content"].split()) + 6 for message in one)
        if filled + tokens > row and lines[-1]:
            lines.append([])
            filled = 0.0
        lines[-1] += one
        filled += tokens
    return lines


def train(options: argparse.Namespace, words: Sequence[str], name: str, plan: Path) -> lm.Ran | None:
    """One run of pretrain_gpt.py by a plan; None where none is to be made."""
    if options.dry:
        print(f"{name}: {plan}, {shlex.join(words)}")
        return None
    ran = lm.script_run(options.megatron_lm / "pretrain_gpt.py", words, options.directory, f"{name}-run", plan=plan)
    if ran.code:
        raise SystemExit(f"{name}: exit code {ran.code}: {ran.error}")
    return ran


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
    parser.add_argument("what", choices=("trl", "ranks", "sft", "grown", "grown-trl"))
    parser.add_argument("--directory", type=Path, required=True, help="data, packs and plans are kept here")
    parser.add_argument("--megatron-lm", type=Path, help="checkout of Megatron-LM, for sft and grown")
    parser.add_argument("--gpu", default="h200", help="the GPU that is predicted for [h200]")
    parser.add_argument("--shape", choices=TRL_SHAPES, default="0.6b", help="model of trl and ranks [0.6b]")
    parser.add_argument("--row", type=int, default=32_768, help="tokens of a pack of ranks [32768]")
    parser.add_argument("--warm", type=int, default=4, help="first steps that are not counted [4]")
    parser.add_argument("--dry", action="store_true", help="tiny, without a GPU")
    options = parser.parse_args()
    options.mode = "padded" if options.dry else "plan"
    if options.what in ("sft", "grown") and options.megatron_lm is None and not options.dry:
        parser.error(f"{options.what} needs --megatron-lm")
    {"sft": run_megatron, "grown": run_grown, "grown-trl": run_grown_rows}.get(options.what, run_trl)(options)


if __name__ == "__main__":
    main()
