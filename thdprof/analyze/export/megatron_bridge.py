"""Exports to Megatron-Bridge 0.6 with offline packing: overrides, and metadata on how far to pad `cu_seqlens`.

With `pad_cu_seqlens`, Bridge's collate_fn takes the largest max_samples_per_bin of the metadata's list and pads
`cu_seqlens` of every row to max_samples_per_bin + 2 entries. So a row has room for max_samples_per_bin stored
documents and one tail. Bridge leaves a row with more documents unpadded, without a warning; therefore the cap is
never below the documents of the fullest row.
"""

from __future__ import annotations

import json

from thdprof.analyze.export.base import Exported, Target, eager_reason, header, one_line
from thdprof.files import json_text
from thdprof.plan import Plan

LINES_FILE = "megatron_bridge_overrides.txt"
METADATA_FILE = "megatron_bridge_metadata.jsonl"

_Tree = dict[str, "Value"]
Value = bool | int | str | list[str] | _Tree


def least_cap(plan: Plan) -> int:
    """Documents of the fullest row, its tail included; pad_cu_seqlens requires pad_to_max_length, which adds tails."""
    return plan.microbatches.n_seqs.max + (0 if _tails_counted(plan) else 1)


def _tails_counted(plan: Plan) -> bool:
    """Whether the plan's counts and lengths include the tail that fills a row up to the pack size."""
    if plan.dataset.format.startswith("bridge"):
        return plan.training.pad_to_max_length
    return plan.training.tail_policy == "append_dummy_seq"


def metadata(plan: Plan, cap: int) -> dict[str, int | float]:
    """One object of the metadata list, with every key that Bridge writes; Bridge reads only the first three.

    Bridge captures max(dataset_max_seqlen, pack size - min_packed_seqlen) as the longest document; the difference
    is the longest tail. Where the plan counted tails, its longest document covers them, and min_packed_seqlen is the
    smallest value that does not prolong it: a lower bound of the true value. Where the plan did not count tails,
    min_packed_seqlen is 0, so that Bridge captures the pack size, and no document is longer.
    """
    pack = plan.training.seq_length
    longest = min(plan.microbatches.max_seqlen.max, pack)
    dataset = plan.dataset
    packed_rows = 0 < dataset.rows < dataset.documents
    documents_a_row = dataset.documents / dataset.rows if packed_rows else plan.microbatches.n_seqs.mean
    rows = max(1.0, dataset.documents / documents_a_row)
    return {
        "max_samples_per_bin": cap - 1,
        "dataset_max_seqlen": longest,
        "min_packed_seqlen": pack - longest if _tails_counted(plan) else 0,
        "pack_size": pack,
        "packing_factor": round(documents_a_row, 2),
        "packing_efficiency": round(min(100.0, 100 * dataset.tokens / rows / pack), 2),
    }


def render(plan: Plan, cap: int | None) -> Exported:
    """Overrides and metadata for a cap of `cap` documents, the tail included; None: an override to no graphs."""
    comments = header(plan, "Megatron-Bridge overrides")
    if cap is None:
        comments.append(f"no graphs: {eager_reason(plan)}")
        return _export({"model": {"cuda_graph_impl": "none"}}, comments, {})
    specs: _Tree = {
        "packed_sequence_size": plan.training.seq_length,
        "pad_cu_seqlens": True,
        "packed_metadata_path": METADATA_FILE,
    }
    uris = plan.dataset.uris
    if plan.dataset.format.startswith("bridge") and len(uris) == 1 and _is_text(uris[0]):
        specs["packed_train_data_path"] = uris[0].replace("${", "\\${")  # else OmegaConf interpolates it
    else:
        comments.append("also set dataset.offline_packing_specs.packed_train_data_path to the packs analysed")
    comments += [
        "Bridge names its own pack directory by a hash over dataset_kwargs: without packed_train_data_path, "
        "these settings would make it pack again",
        f"{METADATA_FILE}: give its full path; Bridge takes the maxima over its list, so append the objects "
        "of other splits (validation) if those have fuller or longer rows",
        "on the command line, put ++ before a key that the recipe does not have yet",
    ]
    overrides: _Tree = {
        "dataset": {
            "enable_offline_packing": True,
            "dataset_kwargs": {"pad_to_max_length": True},
            "offline_packing_specs": specs,
        },
        "model": {
            "cuda_graph_impl": "local" if plan.graphs.impl == "local" else "transformer_engine",
            "cuda_graph_modules": list(plan.graphs.modules) or ["attn"],
            "use_te_rng_tracker": True,
        },
    }
    extra = {METADATA_FILE: json_text([metadata(plan, cap)], indent=None) + "\n"}
    return _export(overrides, comments, extra)


def _is_text(path: str) -> bool:
    """Whether `path` can be written into a file of overrides, which is UTF-8."""
    return not any("\ud800" <= c <= "\udfff" for c in path)


def _export(overrides: _Tree, comments: list[str], extra: dict[str, str]) -> Exported:
    import yaml

    text = "".join(f"# {one_line(comment)}\n" for comment in comments)
    text += yaml.safe_dump(overrides, sort_keys=False, width=10_000, allow_unicode=True)
    lines = "".join(f"{line}\n" for line in _key_value_lines(overrides))
    return Exported(text=text, extra_files={LINES_FILE: lines, **extra})


def _key_value_lines(tree: _Tree, prefix: str = "") -> list[str]:
    """The leaves of `tree` as dotted KEY=VALUE, in the grammar that OmegaConf and Hydra share."""
    lines = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += _key_value_lines(value, f"{prefix}{key}.")
        else:
            lines.append(f"{prefix}{key}={_value(value)}")
    return lines


def _value(value: bool | int | str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    if isinstance(value, str):
        plain = value and all(c.isalnum() or c in "_./-" for c in value) and not value[0].isdigit()
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json_text(value, indent=None)


TARGET = Target(
    name="megatron-bridge",
    summary="overrides and pack metadata of Megatron-Bridge 0.6: padded to the fullest row, never under it",
    main_file="megatron_bridge_overrides.yaml",
    files=(LINES_FILE, METADATA_FILE),
    one_cap=True,
    needs_maximum=True,
    render=render,
    least_cap=least_cap,
)
