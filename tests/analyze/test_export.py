"""Every export target, read back by the parser of the system that it is for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shlex
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import yaml
from support.plans import percentiles, training_part

from thdprof.analyze.export import export_plan
from thdprof.errors import UsageError
from thdprof.plan import Plan, parse_plan
from thdprof.systems import find_target
from thdprof.training.systems import EXPORTS

OPTIONAL = ("graphs__overflow", "predictions__packer_limits", "microbatches__unfilled", "microbatches__spread")
OPTIONAL += ("dataset__files",)
RATES = {"microbatch": 0.04, "rank_step": 0.28, "step": 0.93}


def make_plan(**changes) -> Plan:
    """A plan of the example distribution; `changes` are dotted fields with `__` for the dot."""
    values = {
        "schema": "thdprof.plan/1",
        "written_by": "0.1.0",
        "dataset": {
            "uris": ["packs/training_2048.idx.parquet"],
            "format": "bridge",
            "fingerprint": "blake2b:00",
            "rows": 2000,
            "documents": 40_000,
            "tokens": 4_000_000,
        },
        "training": training_part(
            seq_length=2048,
            global_batch_size=8,
            data_parallel_size=8,
            context_parallel_size=2,
            loader="batch",
            pad_to_max_length=True,
        ),
        "microbatches": {
            "exact": True,
            "count": 2000,
            "steps": 250,
            "n_seqs": percentiles(358),
            "max_seqlen": percentiles(1500),
            "n_tokens_max": 2048,
            "n_tokens_constant": True,
        },
        "graphs": {
            "impl": "module",
            "buckets": [{"max_seqs": 64, "max_seqlen": 1500, "cp_size": 1, "share": 0.96}],
            "one_cap": {"max_seqs": 64, "fallback_rate": RATES},
            "slots": [[1]],
            "tail_policy": "none",
        },
        "predictions": {
            "fallback_rate": RATES,
            "fallback_rate_upper_bound": 0.05,
            "relative_step_time": 0.4,
            "step_ms": 10.0,
            "eager_step_ms": 25.0,
            "graph_memory_bytes": None,
            "times": {"origin": "none", "basis": "x"},
        },
        "costs": {"name": "x", "calibrated": False, "hardware": "h", "attention": "a", "n_tokens": 2048},
    }
    for name, value in changes.items():
        *parts, last = name.split("__")
        part = values
        for key in parts:
            part = part[key]
        assert last in part or name in OPTIONAL, name
        part[last] = value
    if values["graphs"]["impl"] == "none":
        values["graphs"]["buckets"] = []
    return parse_plan(values, where="plan")


OWN_PACKERS = {"maxtext": "maxtext_best_fit", "nemo-rl": "modified_first_fit_decreasing"}
"""Packers of the targets that take no other's plans."""


def plan_for(target: str, **changes) -> Plan:
    """`make_plan` for a target, by a packer that it takes."""
    packer = {"training__packer": OWN_PACKERS[target]} if target in OWN_PACKERS else {}
    return make_plan(**packer, **changes)


def words_of(exported) -> list[str]:
    """The words of THDPROF_ARGS as bash has them, which must be those of the one-line file as well."""
    script = exported.text + 'printf "%s\\0" "${THDPROF_ARGS[@]}"'
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    (line,) = exported.extra_files.values()
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert shlex.split(line) == words
    return words


def test_targets_describe_what_they_give():
    megatron = ["megatron-lm", "megatron-lm-dev", "megatron-bridge", "megatron-rl"]
    others = ["axolotl", "torchtitan", "maxtext", "levanter", "nemo-rl", "verl", "torch", "json"]
    assert list(EXPORTS) == [*megatron, *others]
    for name in EXPORTS:
        target, exported = find_target(name), export_plan(plan_for(name), name)
        assert exported.text.endswith("\n")
        assert target.title in exported.text.split("\n")[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"dataset__format": "megatron"},
            "--dataloader-inter-document-masking --cuda-graph-impl transformer_engine --cuda-graph-scope mamba attn "
            "--te-rng-tracker --cuda-graph-max-packed-seqs 64",
        ),
        ({"graphs__impl": "local"}, "--cuda-graph-impl local --cuda-graph-max-packed-seqs 64"),
        ({"graphs__one_cap": None}, "--cuda-graph-impl none"),
        ({"graphs__impl": "none"}, "--cuda-graph-impl none"),
    ],
)
def test_megatron_lm(changes, words):
    assert words_of(export_plan(make_plan(**changes), "megatron-lm")) == words.split()


def test_megatron_lm_says_what_to_expect():
    text = export_plan(make_plan(), "megatron-lm").text
    assert "# predicted to run eagerly: 4.000% of micro-batches, in 93.000% of steps\n" in text
    text = export_plan(make_plan(graphs__one_cap=None), "megatron-lm").text
    assert "# no graphs: no cap makes a step faster than running eagerly, by the plan's cost table\n" in text
    text = export_plan(make_plan(graphs__impl="none"), "megatron-lm").text
    assert "# no graphs: the plan asks for no graphs (graphs.impl: none)\n" in text
    text = export_plan(make_plan(microbatches__n_tokens_constant=False), "megatron-lm").text
    assert "pad every row to the sequence length" in text


@pytest.mark.parametrize("one_cap", [None, {"max_seqs": 64, "fallback_rate": RATES}])
def test_megatron_lm_takes_any_cap(one_cap):
    exported = export_plan(make_plan(graphs__one_cap=one_cap), "megatron-lm", max_seqs=16)
    assert words_of(exported)[-2:] == ["--cuda-graph-max-packed-seqs", "16"]
    assert "the cap was given" in exported.text


def test_what_dropless_experts_leave_to_capture_is_said_to_every_target():
    values = make_plan(graphs__impl="transformer_engine").model_dump(mode="json", by_alias=True)
    values["graphs"]["modules"] = ["attn", "moe_router"]
    plan = parse_plan(values, where="plan")
    assert "--cuda-graph-scope attn moe_router" in " ".join(words_of(export_plan(plan, "megatron-lm")))
    assert "--cuda-graph-modules attn moe_router" in " ".join(words_of(export_plan(plan, "megatron-lm-dev")))
    bridge = overrides_of(export_plan(plan, "megatron-bridge"))
    assert bridge["model"]["cuda_graph_modules"] == ["attn", "moe_router"]


@pytest.mark.referee
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_released_megatron_knows_all_but_the_pull_requests_flag(megatron_parser, impl):
    plan = make_plan(dataset__format="megatron", graphs__impl=impl)
    args, unknown = megatron_parser.parse_known_args(words_of(export_plan(plan, "megatron-lm")))
    assert unknown == ["--cuda-graph-max-packed-seqs", "64"]
    assert args.cuda_graph_impl == impl
    assert args.dataloader_inter_document_masking
    modules = [m.name for m in args.cuda_graph_scope_deprecated or []]
    assert modules == (["mamba", "attn"] if impl == "transformer_engine" else [])
    eager = words_of(export_plan(make_plan(graphs__one_cap=None), "megatron-lm"))
    assert megatron_parser.parse_known_args(eager)[1] == []


@pytest.mark.parametrize(
    ("changes", "tail", "capacity"),
    [
        ({"graphs__tail_policy": "append_dummy_seq"}, "append_dummy_seq", 358),
        ({"graphs__tail_policy": "none"}, "append_dummy_seq", 359),
        ({"graphs__tail_policy": "extend_last"}, "extend_last", 358),
        ({"graphs__tail_policy": "append_dummy_seq", "microbatches__n_seqs": percentiles(1)}, "append_dummy_seq", 2),
    ],
)
def test_megatron_lm_dev_counts_the_dummy(changes, tail, capacity):
    words = words_of(export_plan(make_plan(**changes), "megatron-lm-dev"))
    expected = (
        f"--max-seqlen-per-dp-cp-rank 1024 --pad-packed-seq-alignment max --thd-tail-padding-policy {tail} "
        f"--thd-max-packed-sequences {capacity} --cuda-graph-impl transformer_engine --cuda-graph-modules attn "
        "--te-rng-tracker"
    )
    assert words == expected.split()


@pytest.mark.parametrize(("limit", "capacity"), [(358, 358), (359, 359), (1000, 359), (None, 358)])
def test_megatron_lm_dev_keeps_the_packers_own_limit(limit, capacity):
    plan = make_plan(
        graphs__tail_policy="append_dummy_seq", training__packer="dp_balanced", training__max_docs_per_pack=limit
    )
    words = words_of(export_plan(plan, "megatron-lm-dev"))
    assert words[:2] == ["--sequence-packing-scheduler", "dp_balanced"]
    assert words[words.index("--thd-max-packed-sequences") + 1] == str(capacity)


def test_megatron_lm_dev_without_graphs():
    words = words_of(export_plan(make_plan(graphs__one_cap=None), "megatron-lm-dev"))
    assert words == ["--max-seqlen-per-dp-cp-rank", "1024", "--cuda-graph-impl", "none"]


@pytest.mark.referee
def test_released_megatron_knows_all_but_the_dev_branchs_flags(megatron_parser):
    plan = make_plan(training__packer="dp_balanced", graphs__tail_policy="append_dummy_seq")
    args, unknown = megatron_parser.parse_known_args(words_of(export_plan(plan, "megatron-lm-dev")))
    assert args.max_seqlen_per_dp_cp_rank == 1024
    assert [w for w in unknown if w.startswith("--")] == [
        "--sequence-packing-scheduler",
        "--pad-packed-seq-alignment",
        "--thd-tail-padding-policy",
        "--thd-max-packed-sequences",
    ]


def overrides_of(exported):
    """The nested overrides, which must be those of the KEY=VALUE lines as well."""
    omegaconf = pytest.importorskip("omegaconf", reason="parses the Megatron-Bridge export")
    nested = omegaconf.OmegaConf.create(yaml.safe_load(exported.text))
    lines = exported.extra_files["megatron_bridge_overrides.txt"].splitlines()
    dotted = omegaconf.OmegaConf.from_dotlist(lines)
    assert dotted == nested
    return omegaconf.OmegaConf.to_container(dotted, resolve=True)


def metadata_of(exported) -> dict:
    (entry,) = json.loads(exported.extra_files["megatron_bridge_metadata.jsonl"])
    return entry


def test_megatron_bridge():
    exported = export_plan(make_plan(), "megatron-bridge")
    assert overrides_of(exported) == {
        "dataset": {
            "enable_offline_packing": True,
            "dataset_kwargs": {"pad_to_max_length": True},
            "offline_packing_specs": {
                "packed_sequence_size": 2048,
                "pad_cu_seqlens": True,
                "packed_metadata_path": "megatron_bridge_metadata.jsonl",
                "packed_train_data_path": "packs/training_2048.idx.parquet",
            },
        },
        "model": {
            "cuda_graph_impl": "transformer_engine",
            "cuda_graph_modules": ["attn"],
            "use_te_rng_tracker": True,
        },
    }
    assert metadata_of(exported) == {
        "max_samples_per_bin": 357,
        "dataset_max_seqlen": 1500,
        "min_packed_seqlen": 548,
        "pack_size": 2048,
        "packing_factor": 20.0,
        "packing_efficiency": 97.66,
    }


def test_an_export_says_what_of_the_plan_it_cannot_keep():
    exported = export_plan(make_plan(dataset__format="megatron"), "megatron-bridge", max_seqs=400)
    comments = " ".join(exported.text.replace("#", "").split())
    assert "one cap of 400 documents: the plan's times are of caps 64" in comments
    assert "to packs of Bridge, and analyse those" in comments
    assert "the plan's times" not in export_plan(make_plan(), "megatron-lm", max_seqs=64).text


def test_megatron_bridge_without_graphs():
    exported = export_plan(make_plan(graphs__one_cap=None), "megatron-bridge")
    assert yaml.safe_load(exported.text) == {"model": {"cuda_graph_impl": "none"}}
    assert exported.extra_files == {"megatron_bridge_overrides.txt": "model.cuda_graph_impl=none\n"}


@pytest.mark.parametrize(
    ("changes", "samples"),
    [
        ({}, 357),
        ({"training__pad_to_max_length": False}, 358),  # padded to the pack, the fullest row may gain a tail
        ({"dataset__format": "lengths", "training__tail_policy": "append_dummy_seq"}, 357),
        ({"dataset__format": "lengths"}, 358),
    ],
)
def test_megatron_bridge_leaves_room_for_the_tail(changes, samples):
    entry = metadata_of(export_plan(make_plan(**changes), "megatron-bridge"))
    assert entry["max_samples_per_bin"] == samples
    captured = max(entry["dataset_max_seqlen"], entry["pack_size"] - entry["min_packed_seqlen"])
    assert captured == (1500 if samples == 357 else 2048)


@pytest.mark.parametrize("uri", ["a b/c.parquet", "x=y,[z].parquet", "${HOME}/p.parquet", "q\"'.pq", "12", "ü: #.pq"])
def test_megatron_bridge_paths_survive(uri):
    overrides = overrides_of(export_plan(make_plan(dataset__uris=[uri]), "megatron-bridge"))
    assert overrides["dataset"]["offline_packing_specs"]["packed_train_data_path"] == uri


@pytest.mark.parametrize(
    ("changes", "is_given"),
    [
        ({"uris": ["packs/*.parquet"], "files": 3}, True),  # Bridge finds the files of a glob itself
        ({"uris": ["packs/*.npy"], "files": 3, "format": "bridge-npy"}, False),  # and takes one file of these
        ({"uris": ["packs/a.npy"], "format": "bridge-npy"}, True),
        ({"uris": ["packs/a.parquet", "packs/b.parquet"]}, False),
        ({"uris": ["packs/a.parquet"], "format": "lengths"}, False),
    ],
)
def test_megatron_bridge_gets_a_path_that_it_can_read(changes, is_given):
    exported = export_plan(
        make_plan(**{f"dataset__{name}": value for name, value in changes.items()}), "megatron-bridge"
    )
    specs = overrides_of(exported)["dataset"]["offline_packing_specs"]
    assert specs.get("packed_train_data_path") == (changes["uris"][0] if is_given else None)
    assert ("also set dataset.offline_packing_specs.packed_train_data_path" in exported.text) is not is_given


@pytest.fixture
def bridge_collate(monkeypatch):
    """Megatron-Bridge's own collate_fn: (pack size, alignment, metadata) -> function of a list of rows.

    Its module is loaded by itself, for its package imports every model family.
    """
    pytest.importorskip("torch", reason="needs torch")
    try:
        distribution = importlib.metadata.distribution("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs megatron-bridge")

    class Base:
        def _collate_item(self, item, max_length, pad_id):
            return [list(row) + [pad_id] * (max_length - len(row)) for row in item]

        def _ceil_to_nearest(self, n, m):
            return (n + m - 1) // m * m

    for name, values in {
        "megatron.core.msc_utils": {"MultiStorageClientFeature": None},
        "megatron.bridge": {},
        "megatron.bridge.data": {},
        "megatron.bridge.data.datasets": {},
        "megatron.bridge.data.datasets.gpt_sft": {"GPTSFTDataset": Base},
        "megatron.bridge.training": {},
        "megatron.bridge.training.tokenizers": {},
        "megatron.bridge.training.tokenizers.tokenizer": {"MegatronTokenizer": object},
        "megatron.bridge.utils": {},
        "megatron.bridge.utils.safe_pickle": {"safe_load_npy": None},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    path = distribution.locate_file("megatron/bridge/data/packing/gpt_sft.py")
    spec = importlib.util.spec_from_file_location("bridge_gpt_sft", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def collate(pack_size, alignment, metadata):
        dataset = object.__new__(module.GPTSFTPackedDataset)
        vars(dataset).update(
            tokenizer=SimpleNamespace(eos_id=0),
            answer_only_loss=True,
            pad_to_max_length=True,
            max_seq_length=pack_size,
            pad_seq_length_to_mult=16,
            _pad_seq_to_mult=alignment,
            pad_cu_seqlens=True,
            pack_metadata=metadata,
            return_cu_seqlen=True,
        )
        return dataset.collate_fn

    return collate


@pytest.mark.referee
@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("fullest_has_tail", [False, True])
def test_bridges_own_collate_pads_every_row_to_the_cap(bridge_collate, fullest_has_tail, alignment):
    random = np.random.default_rng(5)
    pack = 64
    rows, documents, longest = [], [], []
    for index in range(30):
        count = 12 - fullest_has_tail if index == 0 else int(random.integers(1, 11))
        tail = fullest_has_tail if index == 0 else index % 3 == 0
        lengths = np.full(count, 4)
        lengths[-1] += pack - lengths.sum() - (20 if tail else 0)
        assert lengths.min() > 0
        starts = np.concatenate(([0], np.cumsum(lengths + 1)))
        tokens = random.integers(1, 9, size=starts[-1])
        rows.append({"input_ids": tokens, "seq_boundaries": starts.tolist(), "loss_mask": np.ones(len(tokens))})
        documents.append(count + bool(tail))
        longest.append(max(lengths.max(), 20 * bool(tail)))
    cap = max(documents)
    plan = make_plan(
        training__seq_length=pack,
        microbatches__n_seqs=percentiles(cap),
        microbatches__max_seqlen=percentiles(int(max(longest))),
    )
    entry = metadata_of(export_plan(plan, "megatron-bridge"))
    collate = bridge_collate(pack, alignment, [entry])
    key = "cu_seqlens_q" if alignment == 1 else "cu_seqlens_q_padded"
    for row, count in zip(rows, documents, strict=True):
        batch = collate([row])
        assert batch[key].shape[1] == cap + 1
        lengths = batch[key][0].diff()
        assert int((lengths > 0).sum()) == count
        assert int(batch["max_seqlen_q"][0]) == max(longest)
    assert documents[0] == cap


@pytest.mark.parametrize(
    ("target", "least"), [("megatron-lm-dev", 359), ("megatron-bridge", 358)]
)  # the plan's fullest micro-batch has 358 documents; the dev branch appends a dummy to it
def test_a_cap_that_would_fail_is_refused(target, least):
    with pytest.raises(UsageError) as error:
        export_plan(make_plan(), target, max_seqs=64)
    assert str(error.value) == (
        f"--max-seqs 64: target {target} has no eager fallback, and the fullest micro-batch has {least} documents "
        f"there: use --max-seqs {least}, or the megatron-lm target, which runs longer micro-batches eagerly, or "
        "repack with max_docs_per_pack 64 in --settings"
    )
    assert error.value.exit_code == 2
    text = export_plan(make_plan(), target, max_seqs=least)
    assert text == export_plan(make_plan(), target)
    higher = export_plan(make_plan(graphs__one_cap=None), target, max_seqs=400)
    if target == "megatron-bridge":
        assert metadata_of(higher)["max_samples_per_bin"] == 399
    else:
        assert "400" in words_of(higher)


@pytest.mark.parametrize(
    ("target", "max_seqs", "message"),
    [
        ("nemo", None, f"--to nemo: unknown; choose one of {', '.join(EXPORTS)}"),
        ("json", 5, "--max-seqs 5: target json gives the plan as it is and takes no cap; leave it out"),
        ("megatron-lm", 0, "--max-seqs 0: must be at least 1 and less than 2**31"),
    ],
)
def test_usage_errors(target, max_seqs, message):
    with pytest.raises(UsageError) as error:
        export_plan(make_plan(), target, max_seqs)
    assert str(error.value) == message


def test_json_is_the_plan():
    plan = make_plan()
    exported = export_plan(plan, "json")
    assert parse_plan(json.loads(exported.text), where="export") == plan
    assert json.loads(exported.text)["schema"] == "thdprof.plan/1"


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-lm-dev", "megatron-bridge"])
def test_nothing_of_a_plan_runs_in_a_shell(target, tmp_path):
    hostile = f"x\n$(touch {tmp_path}/a) `touch {tmp_path}/b`\n; touch {tmp_path}/c\u2028\x85\r touch"
    plan = make_plan(dataset__fingerprint=hostile, written_by=hostile, dataset__format=f"bridge{hostile}")
    exported = export_plan(plan, target)
    assert all(
        line.startswith(("#", " ", "THDPROF_ARGS", ")", "dataset", "model")) for line in exported.text.split("\n")[:-1]
    )
    if target == "megatron-bridge":
        overrides_of(exported)
    else:
        words_of(exported)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["megatron-lm", "megatron-lm-dev", "megatron-bridge"])
def test_offloading_that_is_not_exported_is_told(target):
    assert "graphs.offload" not in export_plan(make_plan(), target).text
    values = make_plan().model_dump(mode="json", by_alias=True)
    values["graphs"]["offload"] = {}
    assert "# graphs.offload is left out" in export_plan(Plan.model_validate(values), target).text


@pytest.mark.parametrize("target", ["axolotl", "torchtitan", "maxtext", "levanter", "megatron-rl"])
@pytest.mark.parametrize(
    ("changes", "given", "cap"),
    [
        ({}, None, 358),
        ({"training__max_docs_per_pack": 400}, None, 400),
        ({"graphs__one_cap": None}, None, 358),
        ({"graphs__impl": "none"}, None, 358),
        ({}, 500, 500),
        ({}, 64, 64),
    ],
)
def test_a_packers_limit_is_that_of_the_fullest_micro_batch(target, changes, given, cap):
    if target == "maxtext" and cap < 358:
        with pytest.raises(UsageError, match="use --max-seqs 358, or repack with max_docs_per_pack 64"):
            export_plan(plan_for(target, **changes), target, given)
        return
    exported = export_plan(plan_for(target, **changes), target, given)
    if target == "megatron-rl":
        found = words_of(exported)[-1]
    elif target == "torchtitan":
        *comments, line = exported.text.splitlines()
        assert "no release has max_num_documents" in " ".join(comments)
        assert "pull request 4156" in " ".join(comments)
        config = SimpleNamespace(dataloader=SimpleNamespace(max_num_documents=None))
        exec(line, {"config": config})
        found = config.dataloader.max_num_documents
    elif target == "levanter":
        written = yaml.safe_load(exported.text)
        found = written["data"]["components"]["train"]["pack"]
        assert written["train_seq_len"] == 2048
        assert "room left in a pack is padded" in exported.text
    else:
        key = {"axolotl": "sample_packing_bin_size", "maxtext": "max_segments_per_seq"}[target]
        found = yaml.safe_load(exported.text)[key]
    assert int(found) == cap
    assert ("the packer will form more packs" in exported.text) == (cap < 358)


@pytest.mark.parametrize("target", ["maxtext", "levanter"])
def test_a_limit_of_rows_is_not_taken_from_micro_batches_of_several(target):
    with pytest.raises(UsageError, match="limit is of one row, and the plan counts documents of 4 together"):
        export_plan(plan_for(target, training__micro_batch_size=4), target)


@pytest.mark.parametrize("target", OWN_PACKERS)
@pytest.mark.parametrize("max_seqs", [None, 5000])
def test_plans_of_other_packs_than_a_trainers_own_are_refused(target, max_seqs):
    with pytest.raises(UsageError) as error:
        export_plan(make_plan(training__packer="next_fit"), target, None if target == "nemo-rl" else max_seqs)
    assert str(error.value).startswith(
        f"--to {target}: the packs that the plan counts say nothing of those that {target} makes: analyse "
    )
    assert OWN_PACKERS[target] in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("target", ["megatron-rl", "axolotl", "torchtitan", "levanter", "verl"])
def test_other_packs_than_a_trainers_own_are_named_and_tell_no_cost(target):
    limits = [{"max_docs": 16, "packs_more": 0.25, "unfilled": 0.45}]
    plan = make_plan(predictions__packer_limits=limits, microbatches__unfilled=0.2, training__packer="dp_balanced")
    text = " ".join(export_plan(plan, target, None if target == "verl" else 16).text.replace("#", "").split())
    assert f"the packs that the plan counts say nothing of those that {target} makes: analyse lengths with" in text
    assert "%" not in text
    assert ("the packer will form more packs, and other ones" in text) == (target != "verl")


def test_a_limit_that_no_pack_reaches_makes_no_more_packs():
    plan = make_plan(training__packer="multipack", training__max_docs_per_pack=400)
    for cap, more in ((399, False), (358, False), (357, True)):
        assert ("more packs" in export_plan(plan, "axolotl", cap).text) == more


@pytest.mark.parametrize("target", ["maxtext", "torchtitan", "megatron-lm-dev", "megatron-bridge"])
def test_the_limit_of_drawn_lengths_holds_every_draw(target):
    most, least = (
        {"n_seqs": percentiles(n), "max_seqlen": percentiles(9), "fallback_rate": RATES, "max_seqs": 64}
        for n in (400, 300)
    )
    spread = {"draws": 8, "least": least, "most": most}
    drawn, alone = (
        export_plan(plan_for(target, microbatches__n_seqs=percentiles(n), microbatches__spread=drawn), target)
        for n, drawn in ((358, spread), (400, None))
    )
    assert drawn == alone


def test_a_lower_limit_says_what_it_costs():
    limits = [{"max_docs": n, "packs_more": more, "unfilled": 0.2 + more} for n, more in ((16, 0.25), (64, 0.0125))]
    plan = make_plan(predictions__packer_limits=limits, training__packer="torchtitan_first_fit")
    comments = {cap: " ".join(export_plan(plan, "torchtitan", cap).text.split("# ")) for cap in (64, 63, 8, 358)}
    comments = {cap: " ".join(text.split()) for cap, text in comments.items()}
    assert "more packs (1.25% more, 21.25% of their tokens unfilled), and other ones" in comments[64]
    assert "more packs (at most 25.00% more, at most 45.00% of their tokens unfilled), and" in comments[63]
    assert "more packs, and other ones" in comments[8]
    assert "more packs" not in comments[358]


def test_nemo_rl_packs_as_analysed_and_says_that_there_is_no_cap():
    plan = make_plan(training__packer="nemo_first_fit_shuffle")
    text = export_plan(plan, "nemo-rl").text
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        "policy.sequence_packing.enabled=true",
        "policy.sequence_packing.train_mb_tokens=2048",
        "policy.sequence_packing.algorithm=first_fit_shuffle",
    ]
    assert "NeMo-RL has no cap of documents" in text
    with pytest.raises(UsageError, match="takes no cap"):
        export_plan(plan, "nemo-rl", 5)


@pytest.mark.referee
def test_megatrons_reinforcement_learning_takes_the_limit(megatron_parser):
    args, unknown = megatron_parser.parse_known_args(words_of(export_plan(make_plan(), "megatron-rl")))
    assert unknown == []
    assert args.rl_use_sequence_packing
    assert args.rl_sequence_packing_max_sequences_per_bin == 358


def test_verl_pads_to_the_tokens_of_the_plan():
    exported = export_plan(make_plan(training__micro_batch_size=2), "verl")
    engines = {"fsdp_config": exported.text, "megatron": exported.extra_files["verl_megatron_overrides.txt"]}
    for engine, text in engines.items():
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        assert lines == [
            f"actor_rollout_ref.actor.{engine}.pad_to_length=true",
            f"actor_rollout_ref.actor.{engine}.pad_to_length_bucket=4096",
        ]
    assert "at the cost of padding\n" in exported.text
    assert "% of all tokens" not in export_plan(make_plan(microbatches__unfilled=0.125), "verl").text
    balanced = make_plan(microbatches__unfilled=0.125, training__packer="karmarkar_karp")
    padded = export_plan(balanced, "verl").text
    assert "at the cost of padding, 12.50% of all tokens" in " ".join(padded.replace("#", "").split())
    with pytest.raises(UsageError, match="takes no cap"):
        export_plan(make_plan(), "verl", 5)


def test_torch_compile_captures_the_padded_lengths_alone():
    import torch
    import torch._inductor.config as inductor
    from torch._inductor.cudagraph_trees import is_cudagraph_capture_sizes

    buckets = [{"max_seqs": n, "max_seqlen": 1500, "cp_size": 1, "share": 0.5} for n in (16, 64)]
    with inductor.patch({"triton.cudagraph_capture_sizes": None, "triton.cudagraphs": True}):
        for max_seqs, lengths in ((None, {17, 65}), (16, {17}), (64, {17, 65})):
            inductor.triton.cudagraph_capture_sizes = None
            exec(export_plan(make_plan(graphs__buckets=buckets), "torch", max_seqs).text, {"torch": torch})
            assert {length for length in range(2, 100) if is_cudagraph_capture_sizes(length)} == lengths
        assert inductor.triton.cudagraphs
        exec(export_plan(make_plan(graphs__one_cap=None), "torch").text, {"torch": torch})
        assert not inductor.triton.cudagraphs
