"""Turns a plan into flags and files of other training systems.

- `megatron-lm`: Megatron-LM with packed-sequence CUDA graphs (pull requests 3869 and 5046). Both take
  `--cuda-graph-max-packed-seqs N`, pad `cu_seqlens` to N + 1 entries and run a micro-batch with more than N documents
  eagerly, so every cap is safe. The other flags are in the released megatron-core 0.19.2.
- `megatron-lm-dev`: its dev branch, which has a capacity in documents and no eager fallback. The packer keeps to the
  capacity, `--thd-max-packed-sequences`, and training stops above it. The capacity counts the dummy document.
  `--pad-packed-seq-alignment max` makes every micro-batch as long as `--max-seqlen-per-dp-cp-rank` tokens a rank: its
  unused tail becomes a document of its own, the dummy (`append_dummy_seq`, the default), or part of the last document
  (`extend_last`). Under `append_dummy_seq` the packer keeps one document of the capacity for the dummy, even in a row
  without a tail.
- `megatron-bridge`: Megatron-Bridge 0.6 with offline packing. With `pad_cu_seqlens`, Bridge's collate_fn takes the
  largest max_samples_per_bin of the metadata's list and pads `cu_seqlens` of every row to max_samples_per_bin + 2
  entries. So a row has room for max_samples_per_bin stored documents and one tail. Bridge leaves a row with more
  documents unpadded, without a warning; therefore the cap is never below the documents of the fullest row.
- `megatron-rl`, `axolotl`, `torchtitan`, `maxtext`, `levanter`: trainers that pack at run time, by a limit of documents
  that the packer keeps to. A smaller limit costs more packs instead of fallbacks, so the limit is that of the plan, or
  its fullest micro-batch. Levanter pads the room that is left in a pack, and torchtitan reserves room for padding.
  MaxText hands the limit on to attention, which may crash or give wrong results above it; there it is never lower,
  and a plan of another packer is refused.
- `nemo-rl`: has no limit of documents; packer and tokens of a micro-batch are set, so that it packs as analysed.
- `verl`: pads every packed micro-batch to a multiple of `pad_to_length_bucket` tokens, here the plan's tokens.
- `torch`: the lengths of padded `cu_seqlens` for which torch.compile captures graphs; other lengths run without.
- `json`: the plan itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from thdprof.errors import UsageError
from thdprof.files import json_text
from thdprof.plan import Plan
from thdprof.training import AXOLOTL_PACKERS, MEGATRON_RL_PACKERS, NEMO_PACKERS, suggest_setting
from thdprof.words import join_words, wrap_text

Flag = tuple[str, ...]
"""A flag and its values; each string is one word of a shell command."""
Value = bool | int | str | list[str] | dict[str, "Value"]
"""A value of Bridge's overrides."""
_LM_FILE = "megatron_lm_args.txt"
_DEV_FILE = "megatron_lm_dev_args.txt"
_RL_FILE = "megatron_rl_args.txt"
_BRIDGE_LINES = "megatron_bridge_overrides.txt"
_BRIDGE_METADATA = "megatron_bridge_metadata.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan as flags or files of another system."""

    text: str
    """The export itself, ending in a newline."""
    extra_files: Mapping[str, str] = field(default_factory=dict)
    """Contents of further files by name: files that the text refers to, and other forms of the text."""


@dataclass(frozen=True, slots=True)
class Target:
    """A system that a plan can be exported to."""

    main_file: str
    """File name under which the export's text is written."""
    title: str
    """What the export is, in its first comment."""
    render: Callable[[Plan, int | None, list[str]], Exported]
    """Makes the export for a cap in documents, a dummy tail included, below comments; with a cap of None, training runs
    without graphs."""
    least_cap: Callable[[Plan], int] | None = None
    """Documents of the fullest micro-batch as this system forms it, where a micro-batch over the cap stops training or
    gives wrong results; None where it runs eagerly."""
    limits_packer: bool = False
    """Whether the cap is the limit of a packer at run time, so that no micro-batch exceeds it."""
    one_cap: bool = True
    """Whether the system takes one cap in place of a list of buckets."""
    caps_rows: bool = False
    """Whether the cap is of one row, and not of a micro-batch."""


def export_plan(plan: Plan, target: str, max_seqs: int | None = None) -> Exported:
    """The flags or files that make the system `target`, a key of TARGETS, train by `plan`.

    `max_seqs` takes the place of the plan's cap: documents of one micro-batch, a dummy tail included.

    Raises:
        UsageError: the target is unknown, or training in that system would fail under the cap.
    """
    if target not in TARGETS:
        raise UsageError(f"--to {target}: unknown; choose one of {', '.join(TARGETS)}")
    chosen = TARGETS[target]
    cap, comments = _choose_cap(target, plan, max_seqs), _header(plan, chosen.title)
    most, foreign = _count_fullest(plan), _explain_packs(target, plan)
    comments += [foreign] if foreign else []
    if chosen.one_cap and cap is None:
        comments.append(f"no graphs: {_eager_reason(plan)}")
    elif chosen.limits_packer and cap is not None and cap < min(plan.training.max_docs_per_pack or most, most):
        price = "" if foreign else _price(plan, cap)
        comments.append(
            f"packs analysed have up to {most} documents: the packer will form more packs{price}, and "
            f"other ones; {suggest_setting('max_docs_per_pack', cap)} analyses them"
        )
    caps = [bucket.max_seqs for bucket in plan.graphs.buckets]
    if chosen.one_cap and cap is not None and caps and {*caps} != {cap}:
        comments.append(f"one cap of {cap} documents: the plan's times are of caps {join_words([*map(str, caps)])}")
    return chosen.render(plan, cap, comments)


def _explain_packs(name: str, plan: Plan) -> str:
    """Why packs of the plan are none of the target's; empty where they are, or the target has no packer."""
    packer, own = plan.training.packer, _PACKERS.get(name)
    if own is None or packer in own:
        return ""
    return (
        f"the packs that the plan counts say nothing of those that {name} makes: analyse lengths with "
        f"--packer {' or '.join(own)}, as its configuration has it"
    )


def _count_fullest(plan: Plan) -> int:
    """Documents of the fullest micro-batch; of what was drawn, over all draws."""
    drawn = plan.microbatches.spread
    return plan.microbatches.n_seqs.max if drawn is None else drawn.most.n_seqs.max


def _price(plan: Plan, cap: int) -> str:
    """What a limit of `cap` documents costs at most, by the plan; empty where it does not say."""
    lower = [limit for limit in plan.predictions.packer_limits or () if limit.max_docs <= cap]
    if not lower:
        return ""
    most = "" if lower[-1].max_docs == cap else "at most "
    return f" ({most}{lower[-1].packs_more:.2%} more, {most}{lower[-1].unfilled:.2%} of their tokens unfilled)"


def _choose_cap(name: str, plan: Plan, max_seqs: int | None) -> int | None:
    """The cap in documents for a target: `max_seqs` if the user gave it, else the plan's; None: run without graphs."""
    target = TARGETS[name]
    if max_seqs is not None and not target.one_cap:
        raise UsageError(f"--max-seqs {max_seqs}: target {name} gives the plan as it is and takes no cap; leave it out")
    if max_seqs is not None and not 1 <= max_seqs < 2**31:
        raise UsageError(f"--max-seqs {max_seqs}: must be at least 1 and less than 2**31")
    if name in ("maxtext", "nemo-rl") and (foreign := _explain_packs(name, plan)):
        raise UsageError(f"--to {name}: {foreign}")
    if target.caps_rows and (rows := plan.training.micro_batch_size) > 1:
        raise UsageError(
            f"--to {name}: its limit is of one row, and the plan counts documents of {rows} together: analyse with "
            "--micro-batch-size 1"
        )
    if target.one_cap and plan.training.max_seqlen_per_dp_cp_rank is not None:
        raise UsageError(
            f"--to {name}: no graphs under dynamic context parallelism there, and a plan of --packer "
            f"{plan.training.packer} has buckets for each size; --to json gives it as it is"
        )
    eager = plan.graphs.one_cap is None or plan.graphs.impl == "none"
    if max_seqs is None and target.limits_packer:
        return plan.training.max_docs_per_pack or _count_fullest(plan)
    if max_seqs is None and eager:
        return None
    if target.least_cap is None:
        return max_seqs if max_seqs is not None or plan.graphs.one_cap is None else plan.graphs.one_cap.max_seqs
    least = target.least_cap(plan)
    if max_seqs is not None and max_seqs < least:
        other = "" if target.limits_packer else "or the megatron-lm target, which runs longer micro-batches eagerly, "
        raise UsageError(
            f"--max-seqs {max_seqs}: target {name} has no eager fallback, and the fullest micro-batch "
            f"has {least} documents there: use --max-seqs {least}, {other}or repack with "
            f"{suggest_setting('max_docs_per_pack', max_seqs)}"
        )
    return least if max_seqs is None else max_seqs


def _one_line(text: str) -> str:
    """`text` as one line of printable characters, which can stand behind a comment sign."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _header(plan: Plan, name: str) -> list[str]:
    training = plan.training
    exact = "exact" if plan.microbatches.exact else "not exact"
    lines = [
        f"{name}, exported by thdprof from a plan of thdprof {_one_line(plan.written_by)}",
        f"dataset {_one_line(plan.dataset.fingerprint)} ({_one_line(plan.dataset.format)}); micro-batches {exact}",
        f"holds for sequence length {training.seq_length}, micro-batch size {training.micro_batch_size}, "
        f"global batch size {training.global_batch_size}, data-parallel size {training.data_parallel_size}, "
        f"context-parallel size {training.context_parallel_size}",
    ]
    if plan.graphs.offload is not None:
        lines.append("graphs.offload is left out, and its memory figures do not hold")
    return lines


def _eager_reason(plan: Plan) -> str:
    if plan.graphs.impl == "none" and plan.graphs.one_cap is not None:
        return "the plan asks for no graphs (graphs.impl: none)"
    return "no cap makes a step faster than running eagerly, by the plan's cost table"


def _comment(lines: Sequence[str]) -> str:
    return "".join(f"{part}\n" for line in lines for part in wrap_text(f"# {_one_line(line)}", "#   "))


def _shell_export(flags: Sequence[Flag], comments: Sequence[str], file: str) -> Exported:
    """An export of `flags` as a bash array below `comments`; its extra file `file` has them on one line."""
    lines = [shlex.join(flag) for flag in flags]
    text = _comment(comments) + "THDPROF_ARGS=(\n" + "".join(f"    {line}\n" for line in lines) + ")\n"
    return Exported(text=text, extra_files={file: " ".join(lines) + "\n"})


def _render_lm(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    flags: list[Flag] = []
    if plan.dataset.format == "megatron":
        # Without this flag GPTDataset gives no cu_seqlens: each row is one document.
        flags.append(("--dataloader-inter-document-masking",))
    if cap is None:
        return _shell_export([*flags, ("--cuda-graph-impl", "none")], comments, _LM_FILE)
    if plan.graphs.impl == "local":
        comments.append("needs a Megatron-LM with pull request 5046; no release has --cuda-graph-max-packed-seqs")
        flags.append(("--cuda-graph-impl", "local"))
    else:
        comments.append("needs a Megatron-LM with pull request 3869; no release has --cuda-graph-max-packed-seqs")
        comments.append(
            "releases since 0.19 call --cuda-graph-scope --cuda-graph-modules, and still take the name below"
        )
        comments.append("if PYTORCH_CUDA_ALLOC_CONF has expandable_segments:True, also set NCCL_GRAPH_REGISTER=0")
        flags += [
            ("--cuda-graph-impl", "transformer_engine"),
            ("--cuda-graph-scope", *(plan.graphs.modules or ("mamba", "attn"))),
            ("--te-rng-tracker",),
        ]
    flags.append(("--cuda-graph-max-packed-seqs", str(cap)))
    best = plan.graphs.one_cap
    if best is not None and best.max_seqs == cap:
        rate = best.fallback_rate
        comments.append(
            f"predicted to run eagerly: {rate.microbatch:.3%} of micro-batches, in {rate.step:.3%} of steps"
        )
    elif best is not None:
        comments.append(f"the cap was given; the plan's own is {best.max_seqs}")
    else:
        comments.append(f"the cap was given; the plan advises against graphs: {_eager_reason(plan)}")
    if not plan.microbatches.n_tokens_constant:
        comments.append(
            "micro-batches differ in tokens, and a graph replays one token count: pad every row to the sequence length"
        )
    return _shell_export(flags, comments, _LM_FILE)


def _least_dev_cap(plan: Plan) -> int:
    """Documents of the fullest micro-batch after the dev branch has padded it, by the plan's tail policy.

    - `append_dummy_seq`: the plan's counts include the dummy of each row with a tail. Where the plan's packer had a
      limit of documents, the fullest rows may have no tail, and the packer needs room for one more to form them.
    - `extend_last`: there is no dummy.
    - `none`: the plan's rows have no dummy, and the dev branch appends one to every row that is not full.
    """
    most = _count_fullest(plan)
    if plan.graphs.tail_policy == "extend_last":
        return most
    if plan.graphs.tail_policy == "none":
        return most + 1
    limit = plan.training.max_docs_per_pack
    if plan.training.packer == "dp_balanced" and limit is not None:
        most = max(most, min(limit, most + 1))
    return max(most, 2)  # one real document and the dummy: the scheduler refuses a smaller capacity


def _render_dev(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    training = plan.training
    packed_tokens = training.seq_length * training.micro_batch_size
    flags: list[Flag] = []
    if training.packer == "dp_balanced":
        flags.append(("--sequence-packing-scheduler", "dp_balanced"))
    flags.append(("--max-seqlen-per-dp-cp-rank", str(packed_tokens // training.context_parallel_size)))
    if cap is None:
        return _shell_export([*flags, ("--cuda-graph-impl", "none")], comments, _DEV_FILE)
    tail = "extend_last" if plan.graphs.tail_policy == "extend_last" else "append_dummy_seq"
    comments.append("no eager fallback: training stops on a micro-batch with more documents than the capacity")
    if tail == "append_dummy_seq":
        comments.append(f"the capacity counts the dummy document: {cap - 1} real documents and one dummy")
    flags += [
        ("--pad-packed-seq-alignment", "max"),
        ("--thd-tail-padding-policy", tail),
        ("--thd-max-packed-sequences", str(cap)),
        ("--cuda-graph-impl", "local" if plan.graphs.impl == "local" else "transformer_engine"),
        ("--cuda-graph-modules", *(plan.graphs.modules or ("attn",))),
        ("--te-rng-tracker",),
    ]
    return _shell_export(flags, comments, _DEV_FILE)


def _least_bridge_cap(plan: Plan) -> int:
    """Documents of the fullest row, its tail included; pad_cu_seqlens requires pad_to_max_length, which adds tails."""
    return _count_fullest(plan) + (0 if _tails_counted(plan) else 1)


def _tails_counted(plan: Plan) -> bool:
    """Whether the plan's counts and lengths include the tail that fills a row up to the pack size."""
    if plan.dataset.format.startswith("bridge"):
        return plan.training.pad_to_max_length
    return plan.training.tail_policy == "append_dummy_seq"


def _metadata(plan: Plan, cap: int) -> dict[str, int | float]:
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


def _render_bridge(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    if cap is None:
        return _bridge_export({"model": {"cuda_graph_impl": "none"}}, comments, {})
    specs: dict[str, Value] = {
        "packed_sequence_size": plan.training.seq_length,
        "pad_cu_seqlens": True,
        "packed_metadata_path": _BRIDGE_METADATA,
    }
    uris = plan.dataset.uris
    is_text = not any("\ud800" <= c <= "\udfff" for c in uris[0])  # as a file of overrides is, in UTF-8
    is_one = len(uris) == 1 and (plan.dataset.files is None or plan.dataset.format == "bridge")  # Bridge globs parquet
    if plan.dataset.format.startswith("bridge") and is_one and is_text:
        specs["packed_train_data_path"] = uris[0].replace("${", "\\${")  # else OmegaConf interpolates it
    else:
        what = (
            "the packs analysed" if plan.dataset.format.startswith("bridge") else "packs of Bridge, and analyse those"
        )
        comments.append(f"also set dataset.offline_packing_specs.packed_train_data_path to {what}")
    comments += [
        "Bridge names its own pack directory by a hash over dataset_kwargs: without packed_train_data_path, "
        "these settings would make it pack again",
        f"{_BRIDGE_METADATA}: give its full path; Bridge takes the maxima over its list, so append the objects "
        "of other splits (validation) if those have fuller or longer rows",
        "on the command line, put ++ before a key that the recipe does not have yet",
    ]
    overrides: dict[str, Value] = {
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
    extra = {_BRIDGE_METADATA: json_text([_metadata(plan, cap)], indent=None) + "\n"}
    return _bridge_export(overrides, comments, extra)


def _bridge_export(overrides: dict[str, Value], comments: list[str], extra: dict[str, str]) -> Exported:
    return _yaml_export(comments, overrides, {_BRIDGE_LINES: "".join(_key_value_lines(overrides)), **extra})


def _key_value_lines(tree: dict[str, Value], prefix: str = "") -> Iterator[str]:
    """The leaves of `tree` as lines of dotted KEY=VALUE, in the grammar that OmegaConf and Hydra share."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _key_value_lines(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}={_value(value)}\n"


def _value(value: bool | int | str | list[str]) -> str:
    if isinstance(value, list):
        return f"[{','.join(value)}]"
    if isinstance(value, str):
        plain = value and all(c.isalnum() or c in "_./-" for c in value) and not value[0].isdigit()
        return value if plain else json.dumps(value, ensure_ascii=False)
    return json_text(value, indent=None)


def _yaml_export(comments: Sequence[str], keys: dict[str, Value], extra: Mapping[str, str] | None = None) -> Exported:
    import yaml

    text = _comment(comments) + yaml.safe_dump(keys, sort_keys=False, width=10_000, allow_unicode=True)
    return Exported(text=text, extra_files=extra or {})


def _render_rl(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    flags = [("--rl-use-sequence-packing",), ("--rl-sequence-packing-max-sequences-per-bin", str(cap))]
    return _shell_export(flags, comments, _RL_FILE)


def _render_axolotl(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    keys: dict[str, Value] = {
        "sample_packing": True,
        "sample_packing_bin_size": cap or 1,
        "pad_to_sequence_len": True,
        "sequence_len": plan.training.seq_length,
        "micro_batch_size": plan.training.micro_batch_size,
    }
    return _yaml_export(comments, keys)


def _render_maxtext(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    comments.append("attention of Transformer Engine may crash or give wrong results with more segments than this")
    keys: dict[str, Value] = {"packing": True, "max_segments_per_seq": cap or 1}
    return _yaml_export(comments, keys | {"max_target_length": plan.training.seq_length})


def _render_torchtitan(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    """A line of Python for a configuration function of torchtitan; its packers keep to the limit."""
    comments += [
        "needs torchtitan's main branch with pull request 4156: no release has max_num_documents, 0.3.0 neither",
        "documents of padding do not count: torchtitan reserves room for them besides",
    ]
    return Exported(text=f"{_comment(comments)}config.dataloader.max_num_documents = {cap or 1}\n")


def _render_levanter(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    """Keys of Levanter's configuration for packs of at most `cap` segments.

    In marin-levanter 0.2.227, `levanter.data.text.datasets` hands an integer `pack` of a component on as
    `max_segments_per_example`, and `levanter.data.packing` begins a new pack at that limit.
    """
    comments.append(
        "set pack in each component that the plan is of, here one named train; room left in a pack is padded"
    )
    data: dict[str, Value] = {"components": {"train": {"pack": cap or 1}}}
    return _yaml_export(comments, {"data": data, "train_seq_len": plan.training.seq_length})


def _render_verl(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    tokens = plan.training.seq_length * plan.training.micro_batch_size
    unfilled = None if _explain_packs("verl", plan) else plan.microbatches.unfilled
    cost = "" if unfilled is None else f", {unfilled:.2%} of all tokens"
    comments.append(
        f"verl has no cap of documents: this makes the number of tokens constant, at the cost of padding{cost}"
    )
    fsdp, megatron = (
        f"actor_rollout_ref.actor.{engine}.pad_to_length=true\n"
        f"actor_rollout_ref.actor.{engine}.pad_to_length_bucket={tokens}\n"
        for engine in ("fsdp_config", "megatron")
    )
    return Exported(text=_comment(comments) + fsdp, extra_files={"verl_megatron_overrides.txt": megatron})


def _render_nemo(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    """Overrides of NeMo-RL by which its packer makes the packs of the plan."""
    algorithm = plan.training.packer.removeprefix("nemo_")
    comments.append(
        "NeMo-RL has no cap of documents, neither 0.7.0 nor its main branch of 2026-08-22 (PyPI has no release): "
        "cu_seqlens changes its length, and the plan's graphs cannot be set; this packs as analysed"
    )
    keys = {"enabled": "true", "train_mb_tokens": plan.training.seq_length, "algorithm": algorithm}
    lines = "".join(f"policy.sequence_packing.{key}={value}\n" for key, value in keys.items())
    return Exported(text=_comment(comments) + lines)


def _render_torch(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    """A line of Python after which torch.compile captures graphs for the plan's buckets alone, or for `cap` alone."""
    setting = "torch._inductor.config.triton.cudagraph"
    if cap is None:
        return Exported(text=f"{_comment(comments)}{setting}s = False\n")
    best = plan.graphs.one_cap
    caps = {bucket.max_seqs for bucket in plan.graphs.buckets} if best is not None and best.max_seqs == cap else {cap}
    comments.append(
        "pad cu_seqlens, which has one entry more than documents, to the next of these lengths; where its length is "
        "the only dynamic size, longer ones run without graphs"
    )
    lengths = ", ".join(str(max_seqs + 1) for max_seqs in sorted(caps))
    return Exported(text=f"{_comment(comments)}{setting}_capture_sizes = ({lengths},)\n")


def _render_json(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    return Exported(text=json_text(plan.model_dump(mode="json", by_alias=True)) + "\n")


_PACKERS = {
    "megatron-rl": MEGATRON_RL_PACKERS,
    "axolotl": AXOLOTL_PACKERS,
    "torchtitan": ("torchtitan_first_fit",),
    "maxtext": ("maxtext_first_fit", "maxtext_best_fit"),
    "levanter": ("next_fit",),
    "nemo-rl": NEMO_PACKERS,
    "verl": ("karmarkar_karp",),
}
"""Target -> its packers while training; it takes the limit of a plan of others, but for MaxText and NeMo-RL."""
TARGETS = {
    "megatron-lm": Target("megatron_lm_args.sh", "Megatron-LM flags", _render_lm),
    "megatron-lm-dev": Target("megatron_lm_dev_args.sh", "Megatron-LM flags (dev branch)", _render_dev, _least_dev_cap),
    "megatron-bridge": Target(
        "megatron_bridge_overrides.yaml", "Megatron-Bridge overrides", _render_bridge, _least_bridge_cap
    ),
    "megatron-rl": Target(
        "megatron_rl_args.sh", "Megatron-LM's flags for reinforcement learning", _render_rl, limits_packer=True
    ),
    "axolotl": Target("axolotl.yaml", "Axolotl's configuration", _render_axolotl, limits_packer=True),
    "torchtitan": Target("torchtitan.py", "torchtitan's configuration", _render_torchtitan, limits_packer=True),
    "maxtext": Target(
        "maxtext.yml",
        "MaxText's configuration",
        _render_maxtext,
        _count_fullest,
        limits_packer=True,
        caps_rows=True,
    ),
    "levanter": Target(
        "levanter.yaml", "Levanter's configuration", _render_levanter, limits_packer=True, caps_rows=True
    ),
    "nemo-rl": Target("nemo_rl_overrides.txt", "NeMo-RL's overrides", _render_nemo, one_cap=False),
    "verl": Target("verl_fsdp_overrides.txt", "verl's overrides", _render_verl, one_cap=False),
    "torch": Target("torch_compile.py", "torch.compile", _render_torch),
    "json": Target("plan.json", "", _render_json, one_cap=False),
}
"""The systems that a plan can be exported to, by the name that `thdprof export --to` takes."""
