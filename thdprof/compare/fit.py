"""Does a plan fit the run that is about to begin? The plan's settings beside the run's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from thdprof.errors import UsageError
from thdprof.plan import Plan
from thdprof.training import FORMATS, definitions, has_dynamic_cp
from thdprof.training.pipeline_slots import slots
from thdprof.words import list_some

Changes = Literal["graphs", "prediction"]

_SAME_NAMES = """
seq_length micro_batch_size global_batch_size context_parallel_size seed split max_seqlen_per_dp_cp_rank
min_dynamic_context_parallel_size sft_tokenizer_prompt_format
"""
MEGATRON_ARGUMENTS: Mapping[str, str] = {
    **{name: definitions()[name].option for name in _SAME_NAMES.split()},
    "data_parallel_size": "data-parallel size (ranks / tensor, pipeline and context parallel sizes)",
    "pipeline_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_size": "model chunks of a pipeline rank (--num-virtual-stages-per-pipeline-rank)",
    "microbatch_group_size": "--microbatch-group-size-per-virtual-pipeline-stage",
    "loader": "--dataloader-type",
    "experts": "experts (--num-experts, --moe-pad-expert-input-to-capacity)",
    "shared_capture_ranks": "data-parallel ranks that share experts (--expert-model-parallel-size)",
    "data_sharding": "data sharding (--no-data-sharding)",
    "train_samples": "samples of the run (--train-samples, or --train-iters x --global-batch-size)",
    "weights": "weights of --data-path",
    "tokenizer_model": "--tokenizer-model",
    "dataset": "--data-path",
}
"""What Megatron-LM's command line calls the settings of a run."""

_OTHER_SHAPE = "graphs were chosen for micro-batches of another shape, so that none would replay"
_OTHER_LENGTHS = "documents have other lengths, so that shares and times may differ"
_OTHER_ROWS = "micro-batches hold other rows, so that shares and times may differ"

_ALWAYS_REFUSED = "data_parallel_size context_parallel_size pipeline_parallel_size virtual_pipeline_size"
"""Settings that `install` refuses even where the plan captures nothing."""
_ROWS: tuple[tuple[Changes, str, str], ...] = (
    ("graphs", _OTHER_SHAPE, "seq_length micro_batch_size max_seqlen_per_dp_cp_rank"),
    (
        "graphs",
        "slots and counts are those of other ranks, and install refuses the plan",
        _ALWAYS_REFUSED,
    ),
    ("graphs", "another part of each layer is captured", "experts"),
    ("graphs", "micro-batches are padded in another way than graphs expect", "tail_policy pad_to_max_length"),
    ("prediction", "other ranks decide together, so that shares and times differ", "shared_capture_ranks"),
    (
        "prediction",
        _OTHER_LENGTHS,
        "pad_seq_to_mult sft_tokenizer_prompt_format length_column chat_template text_column eos_token "
        "completion_only_loss assistant_only_loss",
    ),
    (
        "prediction",
        "a step holds other micro-batches, so that shares and times of steps differ",
        "global_batch_size",
    ),
    (
        "prediction",
        "the rows are read in another order, so that shares and times are only about right",
        "loader data_sharding drop_last seed shuffle_seed sampling max_num_samples",
    ),
    (
        "prediction",
        _OTHER_ROWS,
        "min_dynamic_context_parallel_size add_extra_token packing_processes packing_batch packing_bins "
        "max_docs_per_pack",
    ),
)
_CHANGES = {name: (changes, why) for changes, why, names in _ROWS for name in names.split()}
"""What each setting changes that is compared as it stands."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """One setting in which a run is not the one that was analysed."""

    setting: str
    """Name of the setting in `thdprof.training.TrainingOptions`, or `dataset`."""
    planned: Any
    """The plan's value."""
    run: Any
    """The run's value."""
    changes: Changes
    """What the difference makes untrue: `graphs` (the run must not begin) or `prediction` (it may)."""
    why: str
    """What the difference does, as a clause."""

    def describe(self, arguments: Mapping[str, str]) -> str:
        """The difference in one line.

        Args:
            arguments: what the run calls its settings, such as MEGATRON_ARGUMENTS; others keep their own names.
        """
        name = arguments.get(self.setting, self.setting)
        return f"{name}: the plan was made for {_text(self.planned)}, the run has {_text(self.run)}: {self.why}"


def misfits(plan: Plan, settings: Mapping[str, Any], *, data_paths: Sequence[str] | None) -> list[Misfit]:
    """Every difference between the run that `plan` was made for and a run of these settings.

    The data is not read: datasets are compared by their paths, and by their names where the paths differ, since a
    plan may have been made on another machine.

    Args:
        settings: the run's settings by their names in `TrainingOptions`; those that are not known are missing, and are
            not compared.
        data_paths: the run's datasets; None where they are not known.
    """
    # who decides together follows from the plan, too, where its graphs exchange tokens
    if "moe_preprocess" in plan.graphs.modules or plan.graphs.expert_room is not None:
        settings = {name: value for name, value in settings.items() if name != "shared_capture_ranks"}
    entry = FORMATS.get(plan.dataset.format)
    known = {
        name: value
        for name, value in settings.items()
        if entry is None or definitions()[name].has_effect(entry.kinds, plan.dataset.format)
    }
    found = [*_plain(plan, known), *_packing(plan, known), *_slots(plan, known), *_length(plan, known)]
    found += _contents(plan, known, data_paths)
    order = [*definitions(), "dataset"]
    return sorted(found, key=lambda misfit: (misfit.changes, order.index(misfit.setting)))


def describe(found: Sequence[Misfit], arguments: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Lines of the misfits that change graphs, and of those that only change the prediction.

    Args:
        arguments: what the run calls its settings, such as MEGATRON_ARGUMENTS; others keep their own names.
    """
    lines: dict[Changes, list[str]] = {"graphs": [], "prediction": []}
    for misfit in found:
        lines[misfit.changes].append(misfit.describe(arguments))
    return lines["graphs"], lines["prediction"]


def _plain(plan: Plan, settings: Mapping[str, Any]) -> Iterator[Misfit]:
    dynamic = plan.training.has_dynamic_cp and plan.training.max_seqlen_per_dp_cp_rank is not None
    for name, (changes, why) in _CHANGES.items():
        planned = getattr(plan.training, name)
        if name not in settings or (dynamic and name == "seq_length"):  # then it is what all ranks hold together
            continue
        if name == "loader" and planned is None:
            continue  # the plan drew an order, as its caveats say
        run = settings[name]
        if name == "virtual_pipeline_size":
            planned, run = planned or 1, run or 1
        if run != planned:
            if not plan.captured and name not in _ALWAYS_REFUSED.split():
                changes = "prediction"
            yield Misfit(name, planned, run, changes, why)


def _packing(plan: Plan, settings: Mapping[str, Any]) -> Iterator[Misfit]:
    """The packer. Only dynamic context parallelism makes micro-batches that the graphs of other plans cannot take."""
    planned, run = plan.training.packer, settings.get("packer")
    if run is None or run == planned:
        return
    other_graphs = has_dynamic_cp(planned) != has_dynamic_cp(run) and bool(plan.captured)
    yield Misfit("packer", planned, run, *(("graphs", _OTHER_SHAPE) if other_graphs else ("prediction", _OTHER_ROWS)))


def _slots(plan: Plan, settings: Mapping[str, Any]) -> Iterator[Misfit]:
    """More micro-batches in flight than the plan has slots for: a larger step or larger groups on the same ranks."""
    training = plan.training
    names = ("micro_batch_size", "data_parallel_size", "pipeline_parallel_size")
    if (
        not plan.captured
        or training.has_dynamic_cp
        or any(settings.get(name, getattr(training, name)) != getattr(training, name) for name in names)
    ):
        return
    batch = settings.get("global_batch_size", training.global_batch_size)
    group = settings.get("microbatch_group_size", training.microbatch_group_size)
    try:
        lacking = find_lacking_slots(plan, global_batch_size=batch, group=group)
    except UsageError:
        return  # Megatron refuses it, with its own words
    if lacking:
        why = f"a model chunk has up to {lacking} micro-batches in flight, more than the plan has slots for"
        is_group = group != training.microbatch_group_size
        name, run = ("microbatch_group_size", group) if is_group else ("global_batch_size", batch)
        yield Misfit(name, getattr(training, name), run, "graphs", why)


def find_lacking_slots(plan: Plan, *, global_batch_size: int, group: int | None) -> int:
    """Most micro-batches that a model chunk has in flight where the plan has too few slots; 0 where it has enough.

    Args:
        group: micro-batches that the interleaved schedule groups; None: as many as pipeline stages.

    Raises:
        UsageError: Megatron takes no such group with these micro-batches.
    """
    training = plan.training
    needed = slots(
        pipeline_size=training.pipeline_parallel_size,
        num_chunks=training.virtual_pipeline_size or 1,
        num_microbatches=max(1, global_batch_size // (training.micro_batch_size * training.data_parallel_size)),
        group=group,
    )
    lacking = (
        max(mine, default=0)
        for mine, planned in zip(needed, plan.graphs.slots, strict=False)
        if any(n > p for n, p in zip(mine, planned, strict=False))
    )
    return max(lacking, default=0)


def _length(plan: Plan, settings: Mapping[str, Any]) -> Iterator[Misfit]:
    """The samples of the run, which decide how many epochs GPTDataset shuffles together."""
    training = plan.training
    batch = settings.get("global_batch_size", training.global_batch_size)
    run = settings.get("train_samples")
    if run is None and settings.get("train_iters") is not None:
        run = settings["train_iters"] * batch
    planned: Any = training.train_samples
    epochs = settings.get("train_epochs")  # of the Trainer, which reads each in an order of its own
    if epochs not in (None, training.train_epochs) and (planned is not None or training.train_epochs is not None):
        why = "shares are those of the epochs that were analysed"
        yield Misfit("train_epochs", training.train_epochs, epochs, "prediction", why)
    if run is None or run == planned:
        return
    counted = plan.microbatches.steps * training.global_batch_size
    if planned is None and run == counted:
        return
    if planned is None:
        passes = f"{training.train_epochs} epochs" if (training.train_epochs or 1) > 1 else "one epoch"
        planned = f"{passes} ({counted:,})"
    why = "shares are those of the plan's samples, and of the order in which it reads them"
    yield Misfit("train_samples", planned, run, "prediction", why)


def _contents(plan: Plan, settings: Mapping[str, Any], data_paths: Sequence[str] | None) -> Iterator[Misfit]:
    """Other data: its split, its weights, the tokenizer of conversations, and the datasets.

    Tokenizers and datasets are compared by resolved paths or else by names, and a plan of plain lengths names no
    dataset of a run. The contents of tokenizers are not compared.
    """
    training = plan.training
    if "split" in settings and _split_shares(settings["split"]) != _split_shares(training.split):
        yield Misfit("split", training.split, settings["split"], "prediction", _OTHER_ROWS)
    if "weights" in settings and _shares(training.weights) != _shares(settings["weights"]):
        yield Misfit("weights", training.weights, settings["weights"], "prediction", _OTHER_ROWS)
    planned, run = training.tokenizer_model, settings.get("tokenizer_model")
    if run is not None and (planned is None or not _same([Path(planned)], [Path(run)])):
        yield Misfit("tokenizer_model", planned, run, "prediction", _OTHER_LENGTHS)
    uris = plan.dataset.uris
    if data_paths is None or plan.dataset.format == "lengths":
        return
    if not _same([_stem(uri) for uri in uris], [_stem(path) for path in data_paths]):
        yield Misfit(
            "dataset", list_some(uris, 3) or "none", list_some(data_paths, 3) or "none", "prediction", _OTHER_ROWS
        )


def _same(planned: Sequence[Path], run: Sequence[Path]) -> bool:
    """Whether files or directories are the same by their resolved paths, or else by their names."""
    return any([*map(form, planned)] == [*map(form, run)] for form in (Path.resolve, attrgetter("name")))


def _stem(path: str) -> Path:
    """The prefix of a Megatron dataset; other paths as they stand."""
    found = Path(path.strip())
    return found.with_suffix("") if found.suffix in (".idx", ".bin") else found


def _split_shares(split: str) -> tuple[float, ...] | str | None:
    """The shares of a split such as `90,5,5`; of a text that is no split the text."""
    try:
        weights = [float(part) for part in split.split(",")]
    except ValueError:
        return split
    return _shares([*weights, *[0.0] * (3 - len(weights))]) if sum(weights) > 0 else split


def _shares(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    """Weights as shares of their sum, rounded so that other spellings of one blend are equal."""
    if weights is None:
        return None
    total = sum(weights)
    return tuple(round(weight / total, 9) if total > 0 else weight for weight in weights)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
    return "none" if value is None else str(value)
