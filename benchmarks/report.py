"""Times `thdprof report` on the demo and on the profile of a long run, and prints a Markdown table.

    python benchmarks/report.py [--microbatches 10000000]

The long run is made up (seeded): as many micro-batches as asked for, of two packs of 8,192 tokens, on 8 ranks with 8 of
them a step. Every figure is the best of `--repeat` whole processes, interpreter start, kernel start and imports
included.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCUMENTS = 1_000_000


def write_long_run(directory: Path, num_microbatches: int) -> float:
    """Write plan.yaml and plan.profile.parquet of a made-up run; seconds that counting the profile took.

    A micro-batch joins two random packs, so that hardly any two are the same.
    """
    from support import pack_lengths

    from thdprof.analyze import analyze_dataset, make_plan, make_profile

    analysis = analyze_dataset(
        pack_lengths.draw("chat 8k", DOCUMENTS),
        packer="bfd",
        seq_length=8192,
        micro_batch_size=2,
        data_parallel_size=8,
        global_batch_size=128,
        loader="cyclic",
        tail_policy="extend_last",
        train_samples=num_microbatches * 2,
    )
    make_plan(analysis).save(directory / "plan.yaml")
    began = time.perf_counter()
    make_profile(analysis).save(directory / "plan.profile.parquet")
    return time.perf_counter() - began


def write_demo_plan(directory: Path) -> None:
    """Write the demo's plan and profile, as `make demo` does."""
    run = "--loader single --pad-to-max-length --data-parallel-size 8 --global-batch-size 64 -o plan.yaml"
    for words in ("demo demo", f"analyze demo/bridge {run} --profile plan.profile.parquet"):
        command = [sys.executable, "-m", "thdprof", *words.split()]
        subprocess.run(command, check=True, cwd=directory, stdout=subprocess.DEVNULL)


def time_reports(folder: Path, name: str, repeat: int) -> list[tuple[str, str, str, str]]:
    """A row for each form of the report on the plan in `folder`."""
    from analyze import best

    rows = []
    thdprof = [sys.executable, "-m", "thdprof", "report", str(folder / "plan.yaml"), "--force"]
    for what, output in (
        ("sentences alone", None),
        ("page", "r.html"),
        ("notebook, run by a kernel", "r.ipynb"),
        ("figures", "figures"),
    ):
        target = folder / (output or "")
        timed = best([*thdprof, *(["-o", str(target)] if output else [])], repeat)
        size = sum(p.stat().st_size for p in ([*target.iterdir()] if target.is_dir() else [target])) if output else 0
        times = f"{timed.wall_s:.2f} s", f"{timed.cpu_s:.2f} s"
        rows.append((f"{name}, {what}", *times, f"{size / 1e6:.2f} MB" if output else ""))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--microbatches", type=int, default=10_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    from analyze import print_page

    rows = [("what", "time", "CPU time", "size")]
    with tempfile.TemporaryDirectory() as name:
        demo, folder = Path(name) / "small", Path(name) / "long"
        demo.mkdir()
        folder.mkdir()
        write_demo_plan(demo)
        rows += time_reports(demo, "demo", options.repeat)
        counting = write_long_run(folder, options.microbatches)
        size = f"{(folder / 'plan.profile.parquet').stat().st_size / 1e6:.2f} MB"
        many = f"{options.microbatches:,} micro-batches"
        rows.append((f"{many}, counting the profile in `analyze`", f"{counting:.2f} s", "", size))
        rows += time_reports(folder, many, options.repeat)
    note = f"best of {options.repeat} whole processes; allowed for the page: 3 s and 2 MB"
    print_page(("pandas", "nbclient", "ipykernel"), note, rows)


if __name__ == "__main__":
    main()
