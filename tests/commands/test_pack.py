"""`thdprof pack`: the comparison, the files that it writes, and what it refuses."""

from __future__ import annotations

import json
import re
import resource

import numpy as np
import pyarrow as pa
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


@pytest.mark.parametrize("more", [(), ("--micro-batch-size", 2)])
def test_ranks_are_even_where_training_fills_the_tails_of_packs(more, thdprof, tmp_path):
    rng, file = np.random.default_rng(1), tmp_path / "lengths.npy"
    short, long = rng.normal(14_000, 300, 30_000), rng.normal(19_200, 400, 30_000)
    np.save(file, np.clip(np.where(rng.random(30_000) < 0.6, short, long), 1, 32_768).astype(np.int64))
    run = ("--seq-length", 32_768, "--data-parallel-size", 64, "--loader", "trainer", "--packer", "bfd", *more)
    found = compared(thdprof, file, *run, "--dry-run")
    assert found["after"]["slowest_over_mean"] <= 1.02 < found["before"]["slowest_over_mean"]
    assert found["steps"]["ordered"]["slowest_over_mean"] <= 1.02


def test_token_ids_that_rows_cannot_hold_are_refused(thdprof, tmp_path):
    rows, output = tmp_path / "rows.jsonl", tmp_path / "packs.parquet"
    rows.write_text('{"input_ids": [1, 4294967301]}\n{"input_ids": [3]}\n')
    done = thdprof("pack", rows, "--seq-length", 8, "--to", "trl", "-o", output)
    assert (done.returncode, output.exists()) == (1, False)
    assert done.stderr.splitlines()[-1] == f"thdprof: {rows}: input_ids holds 4294967301, no int32"


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


def test_tokens_a_second_are_those_of_documents(demo, thdprof):
    run = ("--loader", "trainer", "--data-parallel-size", 8, "--model", demo / "config.json", "--gpu", "h100")
    found = compared(thdprof, demo / "trl", *run, "--seq-length", 2048, "--max-docs", 4, "--dry-run")
    filled = []
    for side in (found["before"], found["after"]):
        in_step = side["fill"] * 2048 * 8
        assert side["tokens_per_second"][1] * side["step_ms"][0] / 1000 == pytest.approx(in_step, rel=0.02)
        filled.append(side["fill"])
    assert filled[1] < 0.9 < filled[0]


def test_auto_without_times_takes_the_least_cap_that_adds_few_packs(demo, thdprof):
    arguments = (demo / "lengths", "--seq-length", 4096, "--max-docs", "auto", "--dry-run")
    found = compared(thdprof, *arguments)
    first, *others = found["caps"]
    assert (first["max_docs"], first["more_packs"], first["tokens_per_second"]) == (None, 0, None)
    assert len(others) > 1
    for cap in others:
        assert cap["more_packs"] == pytest.approx(cap["packs"] / first["packs"] - 1)
    assert found["max_docs"] == min(cap["max_docs"] for cap in others if cap["more_packs"] <= 0.003)
    done = thdprof("pack", *arguments)
    assert "No times are known, so the cap (*) is the least that adds at most 0.3% of packs." in done.stdout
    assert "not known" in done.stdout


def test_the_report_page_has_the_table_of_before_and_after(demo, thdprof, tmp_path):
    model = ("--model", demo / "config.json", "--gpu", "h100")
    for to, data in (("trl", demo / "trl"), ("index", demo / "lengths")):
        page = tmp_path / f"{to}.html"
        arguments = (data, "--seq-length", 4096, "--loader", "trainer", *model, "--to", to, "-o", tmp_path / to)
        found = compared(thdprof, *arguments, "--report", page)
        text = page.read_text()
        assert "What do the new packs change?" in text
        cells = re.findall(r"<td[^>]*>([^<]*)</td>", text)
        for name, key in (("packs", "packs"), ("slowest rank by the mean rank", "slowest_over_mean")):
            at = cells.index(name)
            values = [found[side][key] for side in ("before", "after")]
            shown = [f"{value:,}" if key == "packs" else f"{value:.3f}" for value in values]
            assert cells[at + 1 : at + 3] == shown
        assert {"memory of graphs", "steps with an eager micro-batch", "a step", "tokens a second"} <= set(cells)


def test_analyze_reads_an_index_as_the_packs_that_it_names(demo, thdprof, tmp_path):
    output = tmp_path / "index.parquet"
    run = ("--seq-length", 4096, *RUN, "--loader", "single")
    found = compared(thdprof, demo / "lengths", *run, "-o", output)
    done = thdprof("analyze", output, *run, "--tail-policy", "append_dummy_seq", "--json")
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert read["exact"]
    assert read["dataset"]["rows"] == found["after"]["packs"]
    assert read["n_seqs"] == found["after"]["documents_per_microbatch"]


def test_a_plan_that_training_would_refuse_is_written_and_fails(demo, thdprof, tmp_path):
    fields = {"per_device_train_batch_size": 1, "output_dir": "out", "packing": False, "padding_free": True}
    fields |= {
        "max_length": 2048,
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
    }  # written without a GPU
    (tmp_path / "args.json").write_text(json.dumps(fields))
    arguments = (demo / "trl", "--training-args", tmp_path / "args.json", "--model", demo / "config.json")
    arguments += ("--gpu", "h100", "--to", "trl", "-o", tmp_path / "packs.parquet", "--plan", tmp_path / "plan.yaml")
    done = thdprof("pack", *arguments)
    assert done.returncode == 3
    assert "training by this plan would be refused: bf16 and fp16 are False" in " ".join(done.stderr.split())
    assert load_plan(tmp_path / "plan.yaml").predictions.refused
    assert (tmp_path / "packs.parquet").exists()


@pytest.mark.parametrize("to", ["trl", "bridge", "index"])
def test_a_full_disk_is_named_and_leaves_nothing_behind(to, thdprof, tmp_path):
    data, output = tmp_path / "rows.parquet", tmp_path / "packs.parquet"
    rows = np.random.default_rng(0).integers(1, 60_000, (2000, 40)).tolist()
    pq.write_table(pa.table({"input_ids": rows}), data)
    output.write_text("mine")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        done = thdprof("pack", data, "--seq-length", 512, "--to", to, "-o", output, "--force")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"thdprof: {output}: cannot be written: File too large\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["packs.parquet", "rows.parquet"]
    assert output.read_text() == "mine"


def test_splits_that_are_packed_or_left_alone_are_named(thdprof, tmp_path):
    data, saved = tmp_path / "data", tmp_path / "saved"
    (saved / "train").mkdir(parents=True)
    (saved / "test").mkdir()
    data.mkdir()
    for name in ("data/train.jsonl", "data/validation-0.jsonl", "saved/train/rows.jsonl", "saved/test/rows.jsonl"):
        (tmp_path / name).write_text("".join(f"{n}\n" for n in range(1, 60)))
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    arguments = ("--seq-length", 64, "--dry-run")
    found = compared(thdprof, data, *arguments)
    said = "packed with the other files: validation-0.jsonl; if these are for validation, name the others alone"
    assert (found["documents"], found["notes"]) == (118, [said])
    found = compared(thdprof, saved, *arguments)
    assert (found["documents"], found["notes"]) == (59, [f"only the split train of {saved} is packed"])
    found = compared(thdprof, data / "validation-0.jsonl", *arguments)
    assert (found["documents"], found["notes"]) == (59, [])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_sources_that_rows_name_stay_mixed(kind, thdprof, tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"length": int(n), "dataset": name}
        for name, mean in (("chat", 4), ("code", 5), ("web", 5.5))
        for n in rng.lognormal(mean, 1, 3000).clip(1, 1024)
    ]
    data = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    else:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = (data, "--seq-length", 1024, "--data-parallel-size", 8, "--dry-run")
    found = compared(thdprof, *arguments)
    assert found["sources"] == ["chat", "code", "web"]
    ordered, random = (found["steps"][order]["source_distance"] for order in ("ordered", "random"))
    assert 0.01 < ordered < 2 * random < 0.5
    said = thdprof("pack", *arguments).stdout
    assert "The mix of 3 sources in a step differs from that of all data by " in said
    for row in rows:
        row["dataset"] = "one"
    data.unlink()
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), data)
    else:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compared(thdprof, *arguments)
    assert (found["sources"], found["steps"]["ordered"]["source_distance"]) == ([], None)


def test_the_table_shows_what_the_json_holds(demo, thdprof):
    arguments = (demo / "lengths", "--seq-length", 4096, *RUN, "--dry-run")
    found = compared(thdprof, *arguments)
    done = thdprof("pack", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    correlation = found["steps"]["ordered"]["correlation"]
    assert abs(correlation) < 0.1
    assert f"Mean lengths of neighbouring steps' documents correlate by {correlation:.2f}, and by " in done.stdout
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
        (("-o", "out.parquet", "--dry-run"), "--dry-run writes no packs"),
        (("-o", "taken.parquet"), "taken.parquet: exists; give --force to replace it"),
        (("--dry-run", "--max-docs", "0"), "--max-docs 0: give a number from 1 on, or auto"),
        (("--dry-run", "--max-docs", "1"), "--max-docs 1: training adds a document for an unused tail; use 2 or more"),
        (("--dry-run", "--weights", "1,2"), "--weights: pack each dataset of a blend for itself"),
        (("-o", "out.parquet", "--to", "trl"), "holds lengths and no input_ids, so there is nothing to write"),
        (("-o", "out.parquet", "--plan", "plan.yaml"), "--plan: an index is no data that training reads"),
        (("--dry-run", "--report", "page.html"), "--dry-run writes no packs"),
        (("-o", "-"), "-: packs, plan and report cannot go to stdout; name files"),
        (("--settings", "taken.yaml", "-o", "taken.yaml", "--force"), "which is read; give another name"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(arguments, message, demo, thdprof, tmp_path):
    (tmp_path / "taken.parquet").write_text("mine")
    (tmp_path / "taken.yaml").write_text("seed: 3\n")
    done = thdprof("pack", demo / "lengths", "--seq-length", 4096, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in " ".join(done.stderr.split())
    assert done.stderr.count("\n") <= 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken.parquet", "taken.yaml"]
    assert (tmp_path / "taken.parquet").read_text() == "mine"
    assert (tmp_path / "taken.yaml").read_text() == "seed: 3\n"


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


def test_eager_ranks_wait_for_the_longest_document_where_the_gpu_is_busy(demo, thdprof, tmp_path):
    is_long = np.random.default_rng(0).random(64) < 0.5
    rows = [[32_768] if long else [128] * 256 for long in is_long]
    table = pa.table({"input_ids": [np.ones(32_768, dtype=np.int32)] * 64, "seq_lengths": rows})
    pq.write_table(table, tmp_path / "rows.parquet")
    run = ("--loader", "trainer", "--seq-length", 32_768, "--data-parallel-size", 2)
    found = compared(
        thdprof, tmp_path / "rows.parquet", *run, "--model", demo / "config.json", "--gpu", "h200", "--dry-run"
    )
    assert found["before"]["buckets"] == []
    assert found["before"]["slowest_over_mean"] > 1.1
