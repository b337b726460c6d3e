"""Exports to Megatron-LM's dev branch, which has a capacity in documents and no eager fallback.

The packer of that branch keeps to the capacity, `--thd-max-packed-sequences`, and training stops above it. The
capacity counts the dummy document. `--pad-packed-seq-alignment max` makes every micro-batch as long as
`--max-seqlen-per-dp-cp-rank` tokens a rank: its unused tail becomes a document of its own, the dummy
(`append_dummy_seq`, the default), or part of the last document (`extend_last`). Under `append_dummy_seq` the packer
keeps one document of the capacity for the dummy, even in a row without a tail.
"""

from __future__ import annotations

from thdprof.analyze.export.base import Exported, Flag, Target, eager_reason, header, shell_export
from thdprof.plan import Plan

FILE = "megatron_lm_dev_args.txt"


def least_cap(plan: Plan) -> int:
    """Documents of the fullest micro-batch after the dev branch has padded it, by the plan's tail policy.

    - `append_dummy_seq`: the plan's counts include the dummy of each row with a tail. Where the plan's packer had a
      limit of documents, the fullest rows may have no tail, and the packer needs room for one more to form them.
    - `extend_last`: there is no dummy.
    - `none`: the plan's rows have no dummy, and the dev branch appends one to every row that is not full.
    """
    most = plan.microbatches.n_seqs.max
    if plan.graphs.tail_policy == "extend_last":
        return most
    if plan.graphs.tail_policy == "none":
        return most + 1
    limit = plan.training.max_docs_per_pack
    if plan.training.packer == "dp_balanced" and limit is not None:
        most = max(most, min(limit, most + 1))
    return max(most, 2)  # one real document and the dummy: the scheduler refuses a smaller capacity


def render(plan: Plan, cap: int | None) -> Exported:
    """The flags for a cap of `cap` documents, a dummy included; without a cap, `--cuda-graph-impl none`."""
    training = plan.training
    comments = header(plan, "Megatron-LM flags (dev branch)")
    packed_tokens = training.seq_length * training.micro_batch_size
    flags: list[Flag] = []
    if training.packer == "dp_balanced":
        flags.append(("--sequence-packing-scheduler", "dp_balanced"))
    flags.append(("--max-seqlen-per-dp-cp-rank", str(packed_tokens // training.context_parallel_size)))
    if cap is None:
        comments.append(f"no graphs: {eager_reason(plan)}")
        return shell_export([*flags, ("--cuda-graph-impl", "none")], comments, FILE)
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
    return shell_export(flags, comments, FILE)


TARGET = Target(
    name="megatron-lm-dev",
    summary="flags of Megatron-LM's dev branch: capacity for the fullest micro-batch, asserts above it",
    main_file="megatron_lm_dev_args.sh",
    files=(FILE,),
    one_cap=True,
    needs_maximum=True,
    render=render,
    least_cap=least_cap,
)
