"""The parts that all export targets share: a target's description, the result, and the choice of the cap."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from thdprof.errors import UsageError
from thdprof.plan import Plan
from thdprof.training import to_give

Flag = tuple[str, ...]
"""A flag and its values; each string is one word of a shell command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan as flags or files of another system."""

    text: str
    """The export itself, ending in a newline."""
    extra_files: Mapping[str, str] = field(default_factory=dict)
    """Contents of further files by name: files that the text refers to, and other forms of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A system that a plan can be exported to."""

    name: str
    """Name that `thdprof export --to` takes."""
    summary: str
    """One line for the documentation."""
    main_file: str
    """File name under which the export's text is written."""
    files: tuple[str, ...]
    """Names of the extra files that an export can have."""
    one_cap: bool
    """Whether the system takes one cap in place of a list of buckets."""
    needs_maximum: bool
    """Whether a micro-batch over the cap stops training or gives wrong results, where others run it eagerly."""
    render: Callable[[Plan, int | None], Exported]
    """Makes the export for a cap in documents, a dummy tail included; with None, training runs without graphs."""
    least_cap: Callable[[Plan], int] | None = None
    """Documents of the fullest micro-batch as this system forms it; set where `needs_maximum` is true."""


def choose_cap(target: Target, plan: Plan, max_seqs: int | None) -> int | None:
    """The cap in documents for `target`: `max_seqs` if the user gave it, else the plan's; None: run without graphs.

    Raises:
        UsageError: `max_seqs` is out of range, or so small that training would fail; or the plan is for dynamic
            context parallelism, under which the target has no graphs.
    """
    if max_seqs is not None and not target.one_cap:
        raise UsageError(
            f"--max-seqs {max_seqs}: target {target.name} gives the plan as it is and takes no cap; leave it out"
        )
    if max_seqs is not None and not 1 <= max_seqs < 2**31:
        raise UsageError(f"--max-seqs {max_seqs}: must be at least 1 and less than 2**31")
    if target.one_cap and plan.training.max_seqlen_per_dp_cp_rank is not None:
        raise UsageError(
            f"--to {target.name}: no graphs under dynamic context parallelism there, and a plan of --packer "
            f"{plan.training.packer} has buckets for each size; --to json gives it as it is"
        )
    eager = plan.graphs.one_cap is None or plan.graphs.impl == "none"
    if max_seqs is None and eager:
        return None
    if target.least_cap is None:
        return max_seqs if max_seqs is not None or plan.graphs.one_cap is None else plan.graphs.one_cap.max_seqs
    least = target.least_cap(plan)
    if max_seqs is not None and max_seqs < least:
        raise UsageError(
            f"--max-seqs {max_seqs}: target {target.name} has no eager fallback, and the fullest micro-batch "
            f"has {least} documents there: use --max-seqs {least}, or the megatron-lm target, which runs "
            f"longer micro-batches eagerly, or repack with {to_give('max_docs_per_pack', max_seqs)}"
        )
    return least if max_seqs is None else max_seqs


def one_line(text: str) -> str:
    """`text` as one line of printable characters, which can stand behind a comment sign."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def header(plan: Plan, name: str) -> list[str]:
    """Comment lines that say from which plan an export comes, and for which run its cap holds."""
    training = plan.training
    exact = "exact" if plan.microbatches.exact else "not exact"
    offload = ["graphs.offload is left out, and its memory figures do not hold"]
    return [
        f"{name}, exported by thdprof from a plan of thdprof {one_line(plan.written_by)}",
        f"dataset {one_line(plan.dataset.fingerprint)} ({one_line(plan.dataset.format)}); micro-batches {exact}",
        f"holds for sequence length {training.seq_length}, micro-batch size {training.micro_batch_size}, "
        f"global batch size {training.global_batch_size}, data-parallel size {training.data_parallel_size}, "
        f"context-parallel size {training.context_parallel_size}",
        *(offload if plan.graphs.offload is not None else []),
    ]


def eager_reason(plan: Plan) -> str:
    """The reason why a plan has no cap, for a comment of an export."""
    if plan.graphs.impl == "none" and plan.graphs.one_cap is not None:
        return "the plan asks for no graphs (graphs.impl: none)"
    return "no cap makes a step faster than running eagerly, by the plan's cost table"


def shell_export(flags: Sequence[Flag], comments: Sequence[str], file: str) -> Exported:
    """An export of `flags` as a bash array below `comments`; its extra file `file` has them on one line."""
    lines = [" ".join(shlex.quote(word) for word in flag) for flag in flags]
    text = "".join(f"# {one_line(comment)}\n" for comment in comments)
    text += "THDPROF_ARGS=(\n" + "".join(f"    {line}\n" for line in lines) + ")\n"
    return Exported(text=text, extra_files={file: " ".join(lines) + "\n"})
