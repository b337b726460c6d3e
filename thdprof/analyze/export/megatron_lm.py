"""Exports flags with one cap to Megatron-LM with packed-sequence CUDA graphs (pull requests 3869 and 5046).

Both pull requests take `--cuda-graph-max-packed-seqs N`, pad `cu_seqlens` to N + 1 entries and run a micro-batch
with more than N documents eagerly, so every cap is safe. The other flags are in the released megatron-core 0.19.2.
"""

from __future__ import annotations

from thdprof.analyze.export.base import Exported, Flag, Target, eager_reason, header, shell_export
from thdprof.plan import Plan

FILE = "megatron_lm_args.txt"


def render(plan: Plan, cap: int | None) -> Exported:
    """The flags for a cap of `cap` documents; without a cap, `--cuda-graph-impl none`."""
    comments = header(plan, "Megatron-LM flags")
    flags: list[Flag] = []
    if plan.dataset.format == "megatron":
        # Without this flag GPTDataset gives no cu_seqlens: each row is one document.
        flags.append(("--dataloader-inter-document-masking",))
    if cap is None:
        comments.append(f"no graphs: {eager_reason(plan)}")
        flags.append(("--cuda-graph-impl", "none"))
        return shell_export(flags, comments, FILE)
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
    comments += _cap_comments(plan, cap)
    flags.append(("--cuda-graph-max-packed-seqs", str(cap)))
    return shell_export(flags, comments, FILE)


def _cap_comments(plan: Plan, cap: int) -> list[str]:
    """Comments on how the cap was chosen, what runs eagerly under it, and when graphs need padded rows."""
    comments = []
    best = plan.graphs.one_cap
    if best is not None and best.max_seqs == cap:
        rate = best.fallback_rate
        comments.append(
            f"predicted to run eagerly: {rate.microbatch:.3%} of micro-batches, in {rate.step:.3%} of steps"
        )
    elif best is not None:
        comments.append(f"the cap was given; the plan's own is {best.max_seqs}")
    else:
        comments.append(f"the cap was given; the plan advises against graphs: {eager_reason(plan)}")
    if not plan.microbatches.n_tokens_constant:
        comments.append(
            "micro-batches differ in tokens, and a graph replays one token count: pad every row to the sequence length"
        )
    return comments


TARGET = Target(
    name="megatron-lm",
    summary="flags of Megatron-LM with packed-sequence graphs (PR 3869, 5046): one cap, eager above it",
    main_file="megatron_lm_args.sh",
    files=(FILE,),
    one_cap=True,
    needs_maximum=False,
    render=render,
)
