"""Times `thdprof.pack` beside the packers of Megatron-Bridge and TRL, and prints Markdown tables of packs and orders.

    python benchmarks/pack.py [--documents 10000000]

Each packer gets the same lengths in a process of its own, whose imports and drawing are not timed, but count as memory.
Bridge's packs a list of lengths. TRL's packs the tokens themselves, one byte each here, so it gets a tenth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import numpy as np
from analyze import print_page, run
from megatron_lm import table
from support import pack_lengths

from thdprof.pack.order import measure_order, order_packs
from thdprof.pack.packs import pack_documents

NAME = "chat 8k"
CAPS, RANKS, MICROBATCHES = (16, 32, 64, 128), (2, 8, 64, 512), (1, 2, 4, 8, 16)
IN_TABLES, STEPS = 200_000, 200


def pack_once(packer: str, count: int) -> dict[str, float]:
    """Seconds of a packer, its packs and the most documents of one. numba's loops are compiled before."""
    lengths, seq_length = pack_lengths.draw(NAME, count), pack_lengths.SEQ_LENGTHS[NAME]
    if packer == "Megatron-Bridge":
        from support import bridge_referee

        began = time.perf_counter()
        counts = np.array([*map(len, bridge_referee.algorithms.first_fit_decreasing(lengths.tolist(), seq_length))])
    elif packer == "TRL":
        import datasets
        import pyarrow as pa
        from trl import pack_dataset

        tokens = pa.LargeListArray.from_arrays([0, *np.cumsum(lengths)], np.zeros(lengths.sum(), dtype=np.int8))
        data = datasets.Dataset(pa.table({"input_ids": tokens}))
        began = time.perf_counter()
        packed = pack_dataset(data, seq_length, "bfd").with_format("arrow")[:]
        counts = np.diff(packed["seq_lengths"].combine_chunks().offsets.to_numpy())
    else:
        pack_documents(lengths[:10_000], seq_length=seq_length)
        began = time.perf_counter()
        cap = 12 if "12" in packer else None
        counts = np.bincount(pack_documents(lengths, seq_length=seq_length, max_docs=cap))
    seconds = time.perf_counter() - began
    fill = lengths.sum() / len(counts) / seq_length
    return {"seconds": seconds, "packs": len(counts), "fill": fill, "most": int(counts.max())}


def time_packers(documents: int) -> list[tuple[str, ...]]:
    """A row for each packer and number of documents."""
    rows = [("packer", "documents", "seconds", "peak memory", "packs", "fill", "documents of a pack, at most")]
    whole = [(packer, documents) for packer in ("thdprof", "thdprof, at most 12", "Megatron-Bridge")]
    for packer, count in [*whole, ("thdprof", documents // 10), ("TRL", documents // 10)]:
        ran = run([sys.executable, __file__, "--packer", packer, "--documents", str(count)])
        got = json.loads(ran.stdout.splitlines()[-1])
        sizes = (f"{got['packs']:,}", f"{got['fill']:.3%}", f"{got['most']:,}")
        rows.append((packer, f"{count:,}", f"{got['seconds']:.2f}", f"{ran.peak_mib:,.0f} MiB", *sizes))
    return rows


def compare_caps() -> list[tuple[str, ...]]:
    """A row for each distribution: more packs by each cap than best fit decreasing makes without one, in percent."""
    rows = [("lengths", "documents of a pack: mean", "P50, P99, max", "no cap", *map(str, CAPS), "2x mean", "4x mean")]
    for name, seq_length in pack_lengths.SEQ_LENGTHS.items():
        lengths = pack_lengths.draw(name, IN_TABLES)
        best = pack_lengths.count_best_fit(lengths.tolist(), seq_length, None)
        mean = len(lengths) / best
        caps = [None, *CAPS, int(np.ceil(2 * mean)), int(np.ceil(4 * mean))]
        counts = [np.bincount(pack_documents(lengths, seq_length=seq_length, max_docs=cap)) for cap in caps]
        middle, high = np.percentile(counts[0], (50, 99), method="inverted_cdf").astype(int).tolist()
        by_best = [pack_lengths.count_best_fit(lengths.tolist(), seq_length, cap) for cap in caps]
        more = [(len(packs) / best - 1, other / best - 1) for packs, other in zip(counts, by_best, strict=True)]
        cells = [f"{100 * ours:.2f} ({100 * other:.1f})" for ours, other in more]
        rows.append((name, f"{mean:.1f}", f"{middle}, {high}, {counts[0].max()}", *cells))
    return rows


def compare_orders() -> list[tuple[str, ...]]:
    """A row for each distribution and number of ranks: slowest rank over mean by micro-batches of a rank and step."""
    rows = [("lengths", "ranks", *(f"{count} a rank" for count in MICROBATCHES), "correlation of neighbours, at most")]
    for name, seq_length in pack_lengths.SEQ_LENGTHS.items():
        lengths = pack_lengths.draw(name, IN_TABLES)
        squares = np.bincount(pack_documents(lengths, seq_length=seq_length), lengths.astype(float) ** 2)
        for ranks in RANKS:
            cells, correlations = [], []
            for microbatches in MICROBATCHES:
                numbers = {"num_ranks": ranks, "num_microbatches": microbatches}
                costs = np.random.default_rng(0).choice(squares, ranks * microbatches * STEPS)
                ours, random = measure_order(costs, order_packs(costs, **numbers), **numbers)
                cells.append(f"{ours.slowest_over_mean:.4f} ({random.slowest_over_mean:.2f})")
                correlations.append(abs(ours.correlation))
            rows.append((name, str(ranks), *cells, f"{max(correlations):.2f}"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--packer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.packer:
        print(json.dumps(pack_once(options.packer, options.documents)))
        return
    note = f"{NAME}, packs of 8,192 tokens, processors only"
    print_page(("numpy", "numba", "trl", "datasets", "megatron-bridge"), note, time_packers(options.documents))
    caps = f"{IN_TABLES:,} documents: percent more packs than best fit decreasing makes without a cap (by best fit)"
    orders = f"{STEPS} steps, costs of squared lengths: slowest rank over mean, mean of the steps (of a random order)"
    for note, rows in ((caps, compare_caps()), (orders, compare_orders())):
        print(f"\n{note}\n", *table(rows), sep="\n")


if __name__ == "__main__":
    main()
