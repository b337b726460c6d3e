"""Reports that tests look at: the demo's, and others with times of each origin."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from thdprof.analyze import analyze_dataset, make_plan, make_profile
from thdprof.analyze.analysis import Analysis
from thdprof.analyze.predictions import Capture, Memory, Origin, Ruling, Times, Verdict, Worth
from thdprof.analyze.report.contents import Report
from thdprof.analyze.sources.demo import write_demo
from thdprof.training import Model

SETTINGS = {"loader": "single", "pad_to_max_length": True, "data_parallel_size": 8, "global_batch_size": 64}
"""Settings of the demo's run."""
REASON = "launching takes 5.1 ms of a 5.3 ms layer"
BASIS = "Llama 3 8B on H100, bf16"


def write_demo_report(directory: Path) -> Path:
    """Write plan.yaml, plan.profile.parquet and stats.jsonl of the demo to a directory."""
    data = write_demo(directory / "demo")
    analysis = analyze_dataset(data.bridge, **SETTINGS)
    plan = make_plan(analysis)
    plan.save(directory / "plan.yaml")
    make_profile(analysis).save(directory / "plan.profile.parquet")
    replays = [
        {"max_seqs": b.max_seqs, "max_seqlen": b.max_seqlen, "cp_size": 1, "count": round(b.share * 1984) - (i == 0)}
        for i, b in enumerate(plan.graphs.buckets)
    ]
    line = {"schema": "thdprof.stats/1", "microbatches": 1984, "replays": replays, "fallbacks": {"no_free_slot": 1}}
    (directory / "stats.jsonl").write_text(json.dumps({**line, "replay_ms": 12.5, "eager_ms": 51.0}) + "\n")
    return directory


def write_rows(path: Path, rows: list[list[int]]) -> Path:
    """Write packed rows, as lengths of documents."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def report_on(analysis: Analysis) -> Report:
    """The report of an analysis, without files."""
    return Report(plan=make_plan(analysis), profile=make_profile(analysis), comparison=None)


def report_of(path: Path, **settings) -> Report:
    """The report of the dataset at a path."""
    return report_on(analyze_dataset(path, **settings))


def with_times(analysis: Analysis, origin: Origin, *, ruling: Ruling = "graphs pay") -> Analysis:
    """An analysis with made-up times of an origin: modelled eager times, and what rests on them, are ranges."""
    modelled = origin == "modelled"
    eager = [p.model_copy(update={"range_ms": (40.0, 62.0) if modelled else None}) for p in analysis.costs.eager]
    costs = {"calibrated": origin == "measured", "modelled": modelled, "name": "the run's model", "eager": eager}
    return replace(
        analysis,
        costs=analysis.costs.model_copy(update=costs),
        recommendation=replace(analysis.recommendation, relative_step_time=0.256, step_ms=190.0, eager_step_ms=742.0),
        model=Model(num_layers=32, hidden_size=4096, num_attention_heads=32),
        gpu="h100" if modelled else None,
        times=Times(
            origin=origin,
            basis=BASIS,
            decoder_replay_ms=21.3,
            decoder_eager_ms=(62.0, 88.0) if modelled else (70.2, 70.2),
            outside_decoder_ms=3.4,
            relative_step_time=(0.19, 0.31) if modelled else (0.256, 0.256),
            step_ms=(190.0, 190.0),
            eager_step_ms=(612.0, 1000.0) if modelled else (742.0, 742.0),
        ),
        verdict=Verdict(ruling=ruling, reason=REASON),
        worth=Worth(
            gpus=64,
            steps=31000,
            tokens_per_second=(2.1e6, 2.1e6),
            eager_tokens_per_second=(4.1e5, 6.6e5),
            gpu_hours=(104.0, 104.0),
            gpu_hours_saved=(231.0, 443.0),
            gpu_hour_price=2.5,
            saved=(577.0, 1107.0),
        ),
        memory=Memory(
            moment="training",
            peak_bytes=61 * 2**30,
            state_bytes=40 * 2**30,
            graph_bytes=12 * 2**30,
            static_bytes=2**30,
            eager_bytes=4 * 2**30,
            experts_bytes=2**30,
            outside_bytes=3 * 2**30,
            eager_in_flight=1,
            pipeline_rank=0,
        ),
        capture=Capture(graphs=96, passes=288, seconds=(21.0, 34.0)),
    )
