"""Plans of made-up runs of TRL's trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.plans import plan_of_shares
from thdprof.plan import Plan


def plan_for(
    *, tokens: int, caps: Sequence[int], rows: int, tail_policy: str = "append_dummy_seq", **training: Any
) -> Plan:
    """A plan of rows of `tokens` tokens whose buckets hold `caps` documents each."""
    share = 1 / len(caps)
    plan = plan_of_shares(
        [share] * len(caps), count=rows, steps=rows, dataset_format="trl",
        **{"loader": "trainer", "tail_policy": tail_policy, "seq_length": tokens, "global_batch_size": 1, **training},
    )  # fmt: skip
    values = plan.model_dump(mode="json", by_alias=True)
    values["graphs"] |= {
        "impl": "module",
        "tail_policy": tail_policy,
        "buckets": [{"max_seqs": cap, "max_seqlen": tokens, "share": share} for cap in caps],
    }
    values["microbatches"] |= {"n_tokens_max": tokens}
    return Plan.model_validate(values)
