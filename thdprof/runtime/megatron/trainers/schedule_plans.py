"""Gives Megatron's schedule plans the packed metadata that trainers make for a micro-batch, and then leave out.

Under `overlap_moe_expert_parallel_comm`, `pretrain_gpt.py` of Megatron-LM 0.19 and the forward steps of Megatron-Bridge
0.6.2 make the PackedSeqParams of a micro-batch and call the model's `build_schedule_plan` without them: documents of a
row attend to each other then, and there is nothing that a graph could be replayed for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from thdprof.runtime.megatron.decoder.packed_seq_params import is_of_a_bucket
from thdprof.runtime.megatron.trainers.replaced import replaced

GIVEN = (
    "overlap_moe_expert_parallel_comm: this trainer builds its schedule plan without packed_seq_params, so that "
    "documents would attend to each other; it is given those of the micro-batch"
)
_METADATA = "packed_seq_params"


@contextmanager
def packed_schedule_plans(say: Callable[[str], None]) -> Iterator[None]:
    """Inside the block, a schedule plan that is built without `packed_seq_params` gets those that were made since the
    last plan or the last ordinary forward, if there are any. Enter it before graphs are installed.

    Args:
        say: told once that it happens.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams

    made: list[Any] = []
    told: list[str] = []
    own_post_init = PackedSeqParams.__post_init__
    own_build, own_forward = GPTModel.build_schedule_plan, GPTModel.forward
    signature = inspect.signature(own_build)

    def post_init(params: Any) -> None:
        own_post_init(params)
        made[:] = [params]

    @functools.wraps(own_forward)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        made.clear()  # an evaluation's metadata is no later micro-batch's
        return own_forward(model, *args, **kwargs)

    @functools.wraps(own_build)
    def build_schedule_plan(model: Any, *args: Any, **kwargs: Any) -> Any:
        of_script = [params for params in made if not is_of_a_bucket(params)]
        made.clear()
        call = signature.bind(model, *args, **kwargs)
        if of_script and call.arguments.get(_METADATA) is None:
            call.arguments[_METADATA] = of_script[0]
            if not told:
                told.append(GIVEN)
                say(GIVEN)
        return own_build(*call.args, **call.kwargs)

    with ExitStack() as stack:
        for owner, name, value in (
            (PackedSeqParams, "__post_init__", post_init),
            (GPTModel, "forward", forward),
            (GPTModel, "build_schedule_plan", build_schedule_plan),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield
