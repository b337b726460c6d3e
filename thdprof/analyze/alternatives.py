"""Which run: the same documents, rows of a step, model and GPUs under other settings, and the quickest of these.

Levers are rows of a micro-batch, recompute, graphs, and under Hugging Face's Trainer compiled layers and Liger's
kernels. Each alternative is what the analysis says with its settings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from thdprof.analyze.buckets.saved_tensors import layer_kinds
from thdprof.analyze.caveats import find_gpu_memory
from thdprof.analyze.planning import add_plan, list_buckets
from thdprof.analyze.predictions import Alternatives, Verdict
from thdprof.analyze.replay import Replay, replay
from thdprof.analyze.settings.request import Request, override_settings
from thdprof.errors import DataError, UsageError
from thdprof.plan import AlternativePart, Documents
from thdprof.schedule.microbatch_table import MicrobatchTable
from thdprof.schedule.schedule import Memo
from thdprof.systems import find_packer
from thdprof.training import Model, definitions, model_definitions

if TYPE_CHECKING:
    from thdprof.analyze.analysis import Analysis, Study

_PATCHED = """
deepseek_v2 deepseek_v3 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 gpt_oss granite
hunyuan_v1_dense llama llama4 llama4_text ministral mistral nemotron olmo2 olmo3 phi3 qwen2 qwen3 smollm3
"""
LIGER_MODELS = frozenset(_PATCHED.split())
"""Values of `model_type` whose layers liger-kernel 0.8.5 patches (MODEL_TYPE_TO_APPLY_LIGER_FN), but for models of
images and experts, which were not run."""
_ROUTED = "routers' auxiliary losses are means over micro-batches"
_KERNELS = "other kernels change the last digits of losses"


def analyze_with_alternatives(study: Study) -> Analysis:
    """The study's analysis; where times are known and the request wants it, compared with other runs.

    Raises:
        DataError, UsageError: as for `Study.analyze`.
    """
    if not study.request.alternatives:
        return study.analyze()
    if study.request.model is not None:
        study = replace(study, memo=Memo(without="shuffled"))
    replayed = study.replay()
    first = study.analyze_replay(replayed)
    return study.add_spread(_compare_runs(study, first, replayed) if first.timed else first)


def _compare_runs(study: Study, given: Analysis, replayed: Replay) -> Analysis:
    """The analysis `given` of a run whose times are known, with the alternatives and the verdict that follows.

    Measured times are of one setting, so that only graphs are then compared with none.

    Args:
        study: the study whose analysis it is.
        replayed: the schedule that it is of.
    """
    runs, fit, schedules = [_describe(add_plan(given), {}, given)], True, _replay_other_rows(study, given)
    for changes, other in ({}, replayed), *(schedules if given.times.origin == "modelled" else ()):
        if not fit and other.settings.micro_batch_size > given.settings.micro_batch_size:
            break  # more rows take more memory
        found = [*_analyze_levers(study, given, changes, other)]
        fit = not found or any(run.fits is not False for run in found)
        runs += found
    runs.sort(key=lambda run: (run.fits is False, run.step_ms_middle))
    alternatives = Alternatives(runs=tuple(runs), note=_explain_one_row(given, replayed))
    return replace(given, alternatives=alternatives, verdict=_rule(given, alternatives))


def _replay_other_rows(study: Study, given: Analysis) -> Iterator[tuple[dict[str, Any], Replay]]:
    """The changes that give a micro-batch other rows and keep a step's, ascending, and the schedules under them."""
    settings = given.settings
    share = settings.global_batch_size // settings.data_parallel_size
    for rows in (2**power for power in range(share.bit_length())):
        if share % rows or rows == settings.micro_batch_size:
            continue
        changes: dict[str, Any] = {"micro_batch_size": rows}
        if study.request.given.get("gradient_accumulation") is not None:
            changes["gradient_accumulation"] = share // rows
        elif study.request.given.get("global_batch_size") is None:
            changes["global_batch_size"] = settings.global_batch_size
        try:
            yield changes, replay(study.dataset, _change(study.request, changes).given, memo=study.memo)
        except (DataError, UsageError):  # rows that the trainer refuses, or that the data does not fill
            continue


def _explain_one_row(given: Analysis, replayed: Replay) -> str:
    settings = given.settings
    refuses = find_packer(settings.packer).more_rows == "refused"
    is_one_row = replayed.kind == "bridge" or (replayed.kind == "documents" and refuses)
    if not is_one_row or settings.global_batch_size == settings.data_parallel_size or given.times.origin != "modelled":
        return ""
    return f"a micro-batch is one packed row here: longer packs are the lever ({definitions()['seq_length'].option})"


def _analyze_levers(
    study: Study, given: Analysis, changes: Mapping[str, Any], replayed: Replay
) -> Iterator[AlternativePart]:
    """The runs of one schedule under each recompute, kernels and graphs; without the run as given."""
    for more in _list_changes(study.request, given):
        all_changes = {**changes, **more}
        request = _change(study.request, all_changes)
        captures_none = request.impl == "none" and not given.recommendation.buckets
        if not all_changes or (captures_none and {*all_changes} == {"impl"}):
            continue  # the run as given
        try:
            found = add_plan(replace(study, request=request, whole=False).analyze_replay(replayed))
        except UsageError:  # what graphs of this kind cannot hold
            continue
        if request.impl == "none" or found.recommendation.buckets:
            yield _describe(found, all_changes, given)


def _list_changes(request: Request, given: Analysis) -> Iterator[dict[str, Any]]:
    """Every combination of recompute, kernels and graphs, as what differs from the run as given."""
    model, of_trainer = given.model, given.settings.is_of_trainer
    impls = [request.usual_impl if request.impl == "none" else request.impl, "none"]
    if model is None or given.times.origin != "modelled":
        yield from ({"impl": impl} for impl in impls if impl != request.impl)
        return
    kernels = [{"compile": False, "liger": False}]
    if of_trainer and model.num_experts is None:
        kernels += [{"compile": True, "liger": False}]
        kernels += [{"compile": False, "liger": True}] if request.model_type in LIGER_MODELS or model.liger else []
    for impl in impls:
        for granularity in (None, "full") if of_trainer else (None, "selective", "full"):
            for names in kernels:
                if impl == "none" and names["compile"]:
                    continue  # the callback compiles the layers that it captures
                wanted = {"recompute_granularity": granularity, **names}
                changes = {name: value for name, value in wanted.items() if value != getattr(model, name)}
                yield {**changes, **({"impl": impl} if impl != request.impl else {})}


def _change(request: Request, changes: Mapping[str, Any]) -> Request:
    """The request with these settings, model's fields and kind of graphs."""
    of_model = {name: value for name, value in changes.items() if name in model_definitions()}
    given = {**request.given}
    override_settings(given, {name: value for name, value in changes.items() if name in definitions()})
    return replace(
        request,
        given=given,
        model=replace(request.model, **of_model) if request.model is not None and of_model else request.model,
        impl=changes.get("impl", request.impl),
        alternatives=False,
    )


def _describe(found: Analysis, changes: Mapping[str, Any], given: Analysis) -> AlternativePart:
    """The run `found`, which differs from the one as `given` by these changes."""
    times, chosen, worth, graphs = found.times, found.recommendation, found.worth, bool(found.recommendation.buckets)
    step_ms, middle = (times.step_ms, chosen.step_ms) if graphs else (times.eager_step_ms, chosen.eager_step_ms)
    assert step_ms is not None
    assert middle is not None
    assert worth is not None
    rates = worth.tokens_per_second if graphs else worth.eager_tokens_per_second
    room, peak = find_gpu_memory(found.gpu), None if found.memory is None else found.memory.peak_bytes
    model, own = found.model, given.model
    numbers = []
    if model is not None and own is not None:
        if "micro_batch_size" in changes and model.num_experts is not None:
            numbers.append(_ROUTED)
        if (model.compile and graphs, model.liger) != (own.compile and bool(given.recommendation.buckets), own.liger):
            numbers.append(_KERNELS)
    return AlternativePart(
        changes=dict(changes),
        flags=_write_flags(changes),
        graphs=graphs,
        compile=model is not None and model.compile and graphs,
        liger=model is not None and model.liger,
        documents=found.microbatches.hold(
            ("documents", id(given.microbatches)), lambda: compare_documents(given.microbatches, found.microbatches)
        ),
        numbers=numbers,
        step_ms=step_ms,
        step_ms_middle=middle,
        tokens_per_second_per_gpu=(rates[0] / worth.gpus, rates[1] / worth.gpus),
        mfu=_find_mfu(found, middle, worth.gpus, tokens=rates[1] * step_ms[0] / 1000),
        peak_memory_bytes=peak,
        fits=None if room is None or peak is None else peak <= room * 2**30,
        refused=found.refused if graphs else [],
        buckets=list_buckets(found.recommendation),
        as_given=not changes,
    )


def _write_flags(changes: Mapping[str, Any]) -> str:
    known = {**definitions(), **model_definitions()}
    words = []
    for name, value in changes.items():
        if isinstance(value, bool):
            words.append(known[name].option if value else known[name].off_option)
        else:
            words.append(f"{known[name].option if name in known else f'--{name}'} {'none' if value is None else value}")
    return " ".join(words)


def compare_documents(one: MicrobatchTable, other: MicrobatchTable) -> Documents:
    """What the second schedule does to the steps of the first one, by the sums of their documents' squared lengths.

    The last step, which may hold fewer rows, is not compared.
    """
    if one is other:
        return "same"
    steps = max(1, min(one.num_steps, other.num_steps) - 1)
    first, second = (
        table.per_rank_step(table.n_seqs.astype(np.float64) if table.squared is None else table.squared, np.add)[:steps]
        for table in (one, other)
    )
    if first.shape == second.shape and bool((first == second).all()):
        return "same"
    return "other ranks" if bool((first.sum(axis=1) == second.sum(axis=1)).all()) else "other order"


def _find_mfu(found: Analysis, ms: float, gpus: int, *, tokens: float) -> float | None:
    """Model FLOPs utilization of steps of `ms` milliseconds and so many tokens of documents."""
    from thdprof.analyze.times.gpus import known_gpu

    model, gpu, table = found.model, known_gpu(found.costs.hardware), found.microbatches
    if model is None or gpu is None or table.total_squared is None:
        return None
    flops = 6 * count_used_parameters(model) * tokens
    flops += count_attention_flops(model) * table.total_squared / table.num_steps
    return flops / (ms / 1000 * gpus * gpu.peak_tflops * 1e12)


def count_used_parameters(model: Model) -> float:
    """Parameters that a token is multiplied with: the layers', of experts those that it goes to, and one table of the
    vocabulary."""
    from thdprof.analyze.times.parameters import count_table_elements, stage_parameters, stages

    whole = replace(model, tensor_model_parallel_size=1, expert_model_parallel_size=1, expert_tensor_parallel_size=None)
    (stage,) = stages(whole, pipeline_size=1, num_chunks=1)
    count = stage_parameters(whole, stage)
    experts = count.experts * model.moe_router_topk / (model.num_experts or 1)
    return count.dense - count.outside + experts + count_table_elements(whole)


def count_attention_flops(model: Model) -> float:
    """Operations of causal attention, forward and backward, for a squared token, over all layers."""
    width = model.head_dim
    if model.multi_latent_attention:
        width = (model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim) // 2
    return 6.0 * model.num_attention_heads * width * sum("attention" in kind for kind in layer_kinds(model))


def _rule(given: Analysis, alternatives: Alternatives) -> Verdict:
    """The verdict on the best run with graphs beside the best without; that of the run as given without either."""
    from thdprof.analyze.times.answer import rule

    best, without = (alternatives.find_best(graphs=graphs) for graphs in (True, False))
    if best is None or without is None:
        return given.verdict
    within = given.costs.replays_within
    ends = (best.step_ms[0] * within / without.step_ms[0], best.step_ms[1] / within / without.step_ms[1])
    return replace(given.verdict, ruling=rule(best.step_ms_middle / without.step_ms_middle, ends))
