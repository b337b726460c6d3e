"""`thdprof pack`: the comparison, the files that it writes, and what it refuses."""

from __future__ import annotations

import json
import re

import pyarrow.parquet as pq
import pytest

from thdprof.analyze.sources.demo import write_demo
from thdprof.plan import load_plan

MODEL = """{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000}"""
RUN = ("--data-parallel-size", 8, "--global-batch-size", 16)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pack") / "demo"
    write_demo(directory)
    (directory / "config.json").write_text(MODEL)
    return directory


def compared(thdprof, *arguments) -> dict:
    done = thdprof("pack", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["megatron", "bridge", "trl", "lengths"])
def test_the_ranks_of_a_step_are_evened_out_in_every_format(name, demo, thdprof):
    found = compared(thdprof, demo / name, *RUN, "--dry-run")
    before, after = found["before"], found["after"]
    assert found["schema"] == "thdprof.packs/1"
    assert after["packs"] <= 1.001 * before["packs"]
    assert 0.98 < after["fill"] <= 1
    assert after["slowest_over_mean"] < 1.05 < before["slowest_over_mean"]
    assert after["slowest_over_mean_random"] > 1.05
    assert after["documents_per_microbatch"]["p99"] < before["documents_per_microbatch"]["p99"]
    random = compared(thdprof, demo / name, *RUN, "--dry-run", "--window", 0)
    assert random["after"]["slowest_over_mean"] > 1.05
    assert random["after"]["packs"] == after["packs"]


def test_both_sides_are_what_analyze_says(demo, thdprof, tmp_path):
    output, plan = tmp_path / "packs.parquet", tmp_path / "plan.yaml"
    model = ("--model", demo / "config.json", "--gpu", "h100")
    run = (*RUN, "--loader", "trainer", *model)
    found = compared(thdprof, demo / "trl", *run, "--to", "trl", "-o", output, "--plan", plan, "--seq-length", 2048)
    old = json.loads(thdprof("analyze", demo / "trl", *run, "--json").stdout)
    (tmp_path / "order.yaml").write_text("sampling: sequential\n")
    new = json.loads(
        thdprof("analyze", output, *run, "--seq-length", 2048, "--settings", tmp_path / "order.yaml", "--json").stdout
    )
    for side, analysis in ((found["before"], old), (found["after"], new)):
        assert side["documents_per_microbatch"] == analysis["n_seqs"]
        assert side["step_ms"] == analysis["times"]["step_ms"]
        assert side["tokens_per_second"] == analysis["worth"]["tokens_per_second"]
        assert [bucket["max_seqs"] for bucket in side["buckets"]] == [
            bucket["max_seqs"] for bucket in analysis["recommendation"]["buckets"]
        ]
    assert found["before"]["packs"] == 1000
    assert found["after"]["packs"] == pq.ParquetFile(output).metadata.num_rows
    assert load_plan(plan).training.sampling == "sequential"
    assert load_plan(plan).dataset.uris == [str(output)]
    checked = thdprof("check", plan)
    assert checked.returncode == 0, checked.stderr


def test_a_cap_holds_for_every_pack_and_auto_takes_the_quickest(demo, thdprof, tmp_path):
    output = tmp_path / "index.parquet"
    compared(thdprof, demo / "lengths", "--seq-length", 4096, "--max-docs", 12, "-o", output)
    assert pq.read_table(output)["position"].to_numpy().max() == 10  # 11, and one for the unused tail
    model = ("--model", demo / "config.json", "--gpu", "h100")
    found = compared(thdprof, demo / "lengths", "--seq-length", 4096, "--max-docs", "auto", "--dry-run", *model)
    best = max(found["caps"], key=lambda cap: cap["tokens_per_second"])
    assert found["max_docs"] == best["max_docs"]
    assert len(found["caps"]) >= 2


def test_the_table_shows_what_the_json_holds(demo, thdprof):
    arguments = (demo / "lengths", "--seq-length", 4096, *RUN, "--dry-run")
    found = compared(thdprof, *arguments)
    done = thdprof("pack", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    correlation = found["neighbouring_steps_correlation"]["ordered"]
    assert abs(correlation) < 0.1
    assert f"Costs of neighbouring steps correlate by {correlation:.2f}, and by " in done.stdout
    cells = {line[:44].strip(): re.split(r"\s{2,}", line[44:].strip()) for line in done.stdout.splitlines()}
    assert done.stdout.startswith("packs of 4,096 tokens, for steps of 8 ranks x 2 micro-batches x 1 pack\n")
    assert (found["settings"]["seq_length"], found["settings"]["global_batch_size"]) == (4096, 16)
    sides = found["before"], found["after"]
    assert cells["packs"] == [f"{side['packs']:,}" for side in sides]
    assert cells["slowest rank by the mean rank"] == [f"{side['slowest_over_mean']:.3f}" for side in sides]
    counts = [[side["documents_per_microbatch"][name] for name in ("p50", "p99", "max")] for side in sides]
    assert cells["documents of a micro-batch: P50; P99; max"] == ["; ".join(map(str, each)) for each in counts]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no output named: give -o FILE, or --dry-run"),
        (("-o", "out.parquet", "--dry-run"), "--dry-run writes nothing"),
        (("-o", "taken.parquet"), "taken.parquet: exists; give --force to replace it"),
        (("--dry-run", "--max-docs", "0"), "--max-docs 0: give a number from 1 on, or auto"),
        (("--dry-run", "--max-docs", "1"), "--max-docs 1: training adds a document for an unused tail; use 2 or more"),
        (("--dry-run", "--max-docs", "auto"), "--max-docs auto: weighs times, and there are none"),
        (("--dry-run", "--weights", "1,2"), "--weights: pack each dataset of a blend for itself"),
        (("-o", "out.parquet", "--to", "trl"), "holds lengths and no input_ids, so there is nothing to write"),
        (("-o", "out.parquet", "--plan", "plan.yaml"), "--plan: an index is no data that training reads"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(arguments, message, demo, thdprof, tmp_path):
    (tmp_path / "taken.parquet").write_text("mine")
    done = thdprof("pack", demo / "lengths", "--seq-length", 4096, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())
    assert done.stderr.count("\n") <= 3
    assert [path.name for path in tmp_path.iterdir()] == ["taken.parquet"]
    assert (tmp_path / "taken.parquet").read_text() == "mine"


def test_the_input_is_never_replaced(demo, thdprof):
    file = demo / "trl" / "packed.parquet"
    before = file.read_bytes()
    done = thdprof("pack", demo / "trl", "-o", file, "--to", "trl", "--force")
    assert done.returncode == 2
    assert "which is read; give another name" in " ".join(done.stderr.split())
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["packed.parquet"]


def test_metadata_beside_the_packs_are_an_output_too(demo, thdprof, tmp_path):
    arguments = ("pack", demo / "bridge", *RUN, "--to", "bridge", "-o", tmp_path / "training_2048.idx.parquet")
    (tmp_path / "training_2048_metadata.jsonl").write_text("mine")
    refused = thdprof(*arguments)
    assert refused.returncode == 2
    assert "training_2048_metadata.jsonl: exists; give --force to replace it" in " ".join(refused.stderr.split())
    done = thdprof(*arguments, "--force")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "training_2048.idx.parquet",
        "training_2048_metadata.jsonl",
    ]
    assert 'dataloader_type="single"' in done.stdout
    assert "packed_sequence_size=2048" in done.stdout


def test_documents_that_training_cuts_or_leaves_out_are_counted(thdprof, tmp_path):
    data = tmp_path / "lengths.jsonl"
    data.write_text("".join(f"{n}\n" for n in [*range(1, 60), 80, 200, 0]))
    for packer, said in (
        ("bfd", "2 documents longer than 64 tokens cut to that"),
        ("bfd_split", "2 documents longer than 64 tokens split"),
        ("ffd", "2 documents longer than 64 tokens left out"),
    ):
        notes = compared(thdprof, data, "--seq-length", 64, "--packer", packer, "--dry-run")["notes"]
        assert notes == ["1 document without a token to train on left out", said]
