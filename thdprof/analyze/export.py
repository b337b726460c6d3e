"""Turns a plan into flags and files of other training systems, each of which has its `Target` in its own module."""

from __future__ import annotations

from thdprof.errors import UsageError
from thdprof.plan import Plan
from thdprof.systems import find_target
from thdprof.systems.base import Exported, count_fullest, explain_no_graphs, one_line
from thdprof.training import suggest_setting
from thdprof.training.systems import EXPORTS
from thdprof.words import join_words


def export_plan(plan: Plan, target: str, max_seqs: int | None = None) -> Exported:
    """The flags or files that make the system `target`, a key of `EXPORTS`, train by `plan`.

    `max_seqs` takes the place of the plan's cap: documents of one micro-batch, a dummy tail included.

    Raises:
        UsageError: the target is unknown, or training in that system would fail under the cap.
    """
    if target not in EXPORTS:
        raise UsageError(f"--to {target}: unknown; choose one of {', '.join(EXPORTS)}")
    chosen = find_target(target)
    cap, comments = _choose_cap(target, plan, max_seqs), _header(plan, chosen.title)
    most, foreign = count_fullest(plan), chosen.explain_packs(target, plan)
    comments += [foreign] if foreign else []
    if chosen.one_cap and cap is None:
        comments.append(f"no graphs: {explain_no_graphs(plan)}")
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


def _price(plan: Plan, cap: int) -> str:
    """What a limit of `cap` documents costs at most, by the plan; empty where it does not say."""
    lower = [limit for limit in plan.predictions.packer_limits or () if limit.max_docs <= cap]
    if not lower:
        return ""
    most = "" if lower[-1].max_docs == cap else "at most "
    return f" ({most}{lower[-1].packs_more:.2%} more, {most}{lower[-1].unfilled:.2%} of their tokens unfilled)"


def _choose_cap(name: str, plan: Plan, max_seqs: int | None) -> int | None:
    """The cap in documents for a target: `max_seqs` if the user gave it, else the plan's; None: run without graphs."""
    target = find_target(name)
    if max_seqs is not None and not target.one_cap:
        raise UsageError(f"--max-seqs {max_seqs}: target {name} gives the plan as it is and takes no cap; leave it out")
    if max_seqs is not None and not 1 <= max_seqs < 2**31:
        raise UsageError(f"--max-seqs {max_seqs}: must be at least 1 and less than 2**31")
    if target.refuses_other_packs and (foreign := target.explain_packs(name, plan)):
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
        return plan.training.max_docs_per_pack or count_fullest(plan)
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


def _header(plan: Plan, name: str) -> list[str]:
    training = plan.training
    exact = "exact" if plan.microbatches.exact else "not exact"
    lines = [
        f"{name}, exported by thdprof from a plan of thdprof {one_line(plan.written_by)}",
        f"dataset {one_line(plan.dataset.fingerprint)} ({one_line(plan.dataset.format)}); micro-batches {exact}",
        f"holds for sequence length {training.seq_length}, micro-batch size {training.micro_batch_size}, "
        f"global batch size {training.global_batch_size}, data-parallel size {training.data_parallel_size}, "
        f"context-parallel size {training.context_parallel_size}",
    ]
    if plan.graphs.offload is not None:
        lines.append("graphs.offload is left out, and its memory figures do not hold")
    return lines
