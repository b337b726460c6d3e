"""Plans of short micro-batches of the demo's data, some of which fit no bucket."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from thdprof.analyze import Analysis, analyze_dataset, make_plan
from thdprof.analyze.sources.demo import write_demo
from thdprof.plan import Plan

TOKENS, STEPS = 512, 12
CAPS = {1: [3], 2: [1, 3]}
"""Most documents of each bucket, by number of buckets."""

EXPERTS = {"moe": "padded", "dropless": "dropless", "mamba with experts": "dropless"}
"""The setting of a plan, by model."""


class Plans:
    """Plans of one dataset, as files."""

    def __init__(self, directory: Path) -> None:
        """Write the dataset to `directory`, and analyse it."""
        self._directory, self._numbers = directory, itertools.count()
        write_demo(directory)
        self.analysis = self._analysed()

    def __call__(
        self,
        buckets: int,
        *,
        model: str = "dense",
        impl: str = "chunk",
        offload: dict[str, Any] | None = None,
        layers_per_graph: int | None = None,
        stages: int = 1,
        verify: str | None = None,
        preprocess: bool = False,
    ) -> Path:
        """The file of a plan with this many buckets.

        Args:
            buckets: number of buckets, a key of CAPS.
            model: the model that is to be trained, by its name in `gpu_training.MODELS`.
            impl: what is captured.
            offload: fields of the plan's graphs.offload.
            layers_per_graph: the plan's graphs.layers_per_graph.
            stages: the size of the pipeline.
            verify: the plan's graphs.verify.
            preprocess: whether layers of dropless experts are captured up to the exchange of tokens.
        """
        analysis = self.analysis if stages == 1 else self._analysed(pipeline_parallel_size=stages)
        n_seqs, caps = analysis.microbatches.n_seqs, CAPS[buckets]
        shares = [float(((n_seqs > low) & (n_seqs <= cap)).mean()) for low, cap in zip([0, *caps], caps, strict=False)]
        modules = ["attn", "moe_router", *(["moe_preprocess"] if preprocess else [])]
        values = make_plan(analysis, impl="chunk").model_dump(mode="json", by_alias=True)
        values["graphs"] |= {
            "impl": impl,
            "modules": modules if EXPERTS.get(model) == "dropless" and impl == "transformer_engine" else [],
            "offload": offload,
            "layers_per_graph": layers_per_graph,
            "verify": verify,
            "buckets": [
                {"max_seqs": cap, "max_seqlen": TOKENS, "share": share} for cap, share in zip(caps, shares, strict=True)
            ],
        }
        values["training"]["experts"] = EXPERTS.get(model, "none")
        values["predictions"]["fallback_rate"]["microbatch"] = float((n_seqs > caps[-1]).mean())
        path = self._directory / f"plan{next(self._numbers)}.yaml"
        Plan.model_validate(values).save(path)
        return path

    def _analysed(self, **settings: Any) -> Analysis:
        documents = self._directory / "megatron" / "documents"
        return analyze_dataset(
            documents, seq_length=TOKENS, global_batch_size=4, train_iters=STEPS, buckets=1, **settings
        )
