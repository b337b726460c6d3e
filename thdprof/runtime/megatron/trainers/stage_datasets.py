"""Lets every pipeline stage read its documents' boundaries from the data.

With `--dataloader-inter-document-masking` every stage reads a micro-batch, but the scripts of Megatron-LM 0.19 build
their datasets for the first and last stage, and for stages that predict further tokens, alone: a middle stage ends in
its first micro-batch. The samplers of one data-parallel rank give all its stages the same samples, as they do for the
first and the last one, so that boundaries need no message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from thdprof.runtime.megatron.trainers.replaced import replaced

READ_BY_ALL = (
    "--dataloader-inter-document-masking: every stage of the pipeline builds the datasets and reads its documents' "
    "boundaries from them, since Megatron-LM 0.19 builds none for middle stages"
)


@contextmanager
def datasets_on_all_stages(say: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, datasets with boundaries between documents are built for every stage and virtual stage.

    The tensor-parallel ranks of a stage that read no data go on reading none.

    Args:
        say: takes one line for the log, once, where the pipeline has middle stages.
    """
    from megatron.core import parallel_state
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    own_init = BlendedMegatronDatasetBuilder.__init__
    lines = [READ_BY_ALL]

    def init(builder: Any, *args: Any, **kwargs: Any) -> None:
        own_init(builder, *args, **kwargs)
        masked = getattr(builder.config, "inter_document_masking", False)
        if not masked or not parallel_state.model_parallel_is_initialized():
            return
        is_built_by_script = builder.is_built_on_rank
        builder.is_built_on_rank = lambda: is_built_by_script() or parallel_state.get_tensor_model_parallel_rank() == 0
        virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        if virtual * parallel_state.get_pipeline_model_parallel_world_size() > 2 and lines:
            say(lines.pop())

    with replaced(BlendedMegatronDatasetBuilder, "__init__", init):
        yield
