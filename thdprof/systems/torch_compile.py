"""torch.compile: the lengths of padded `cu_seqlens` for which it captures graphs; other lengths run without."""

from __future__ import annotations

from thdprof.plan import Plan
from thdprof.systems.base import Exported, Target, write_comment


def _render_torch(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    """A line of Python after which torch.compile captures graphs for the plan's buckets alone, or for `cap` alone."""
    setting = "torch._inductor.config.triton.cudagraph"
    if cap is None:
        return Exported(text=f"{write_comment(comments)}{setting}s = False\n")
    best = plan.graphs.one_cap
    caps = {bucket.max_seqs for bucket in plan.graphs.buckets} if best is not None and best.max_seqs == cap else {cap}
    comments.append(
        "pad cu_seqlens, which has one entry more than documents, to the next of these lengths; where its length is "
        "the only dynamic size, longer ones run without graphs"
    )
    lengths = ", ".join(str(max_seqs + 1) for max_seqs in sorted(caps))
    return Exported(text=f"{write_comment(comments)}{setting}_capture_sizes = ({lengths},)\n")


TARGET = Target("torch_compile.py", "torch.compile", _render_torch)
