"""What an upstream system brings: its packers, and the form in which a plan is exported to it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from thdprof.errors import UsageError
from thdprof.files import json_text
from thdprof.plan import Plan
from thdprof.read.dataset import RowRule
from thdprof.schedule.packing import DocumentsToPack, Packing
from thdprof.schedule.samplers import MoreRows
from thdprof.schedule.schedule import Schedule
from thdprof.training import PACKERS, Loader, TrainingSettings
from thdprof.words import wrap_text

Prepare = Callable[[NDArray[np.int64], TrainingSettings, list[str]], DocumentsToPack]
"""(tokens of the documents in file order, the run, notes to add to) -> the documents that are packed before training
starts, and the rule."""
PackSteps = Callable[[NDArray[np.int32], TrainingSettings], Packing]
"""(tokens of the documents in file order, the run) -> the packs of every step, in order of step and data-parallel rank.
"""
Replay = Callable[[NDArray[np.int32], TrainingSettings], Schedule]
"""(tokens of the documents in file order, the run) -> the schedule of documents that are packed while training."""
Overlong = Literal["cut", "split", "leave out"]
"""What becomes of a document that is longer than a pack."""
Problem = tuple[str, str]
"""A setting, or words for it and its value; what is wrong with it, and what to use instead."""
Assumed = tuple[str, Any, str]
"""A setting that nobody gave, its value, and whose default that is."""


def refuse_rows(trainer: str) -> Callable[[Mapping[str, Any]], None]:
    """What refuses more than one row of a micro-batch, for a trainer whose micro-batch is one packed row."""

    def refuse(values: Mapping[str, Any]) -> None:
        if values["micro_batch_size"] != 1:
            raise UsageError(
                f"--micro-batch-size {values['micro_batch_size']}: --packer {values['packer']} packs for {trainer}, "
                "which trains packed rows with 1; make the packs longer, or give another packer"
            )

    return refuse


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The most documents of a pack that a packer keeps to, the setting `max_docs_per_pack`."""

    in_training: bool = False
    """Whether packs are made at run time, so that a limit costs packs and no fallbacks."""
    of_row: bool = False
    """Whether it is the limit of one row, where a micro-batch joins several."""
    counts_padding: bool = False
    """Whether every document of a micro-batch counts; otherwise those of padding come besides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """How unpacked documents become rows or micro-batches, the value of `--packer`."""

    name: str
    prepare: Prepare | None = None
    """For rows that are made before training starts, or before an epoch; None: see `by_step` and `replay`."""
    by_step: PackSteps | None = None
    """For documents of which each step's are packed for themselves."""
    replay: Replay | None = None
    """For documents that are packed in another way while training; None: the rows are read by the run's loader."""
    rule: RowRule = "trl"
    """How training turns its rows into documents."""
    loader: Loader | None = None
    """The loader that reads the data unless the user says otherwise; None: that of the format, else not known."""
    needs_loader: bool = False
    """Whether no other loader reads them."""
    is_trl: bool = False
    """Whether it is one of TRL's packing strategies, or TRL without packing."""
    row_is_document: bool = False
    """Whether nothing is packed: every document is a row."""
    usual: str = ""
    """Whose default it is, as the reason to assume it for files of that system."""
    limit: Limit | None = field(default_factory=Limit)
    """What `max_docs_per_pack` limits; None: the setting is refused."""
    counts_tail: bool | None = None
    """Whether the limit counts a document for an unused tail; None: where the tail policy appends one."""
    reads: tuple[str, ...] = ("tail_policy", "pad_seq_to_mult")
    """The settings that it reads, of those that some packers do not."""
    assumes: tuple[Assumed, ...] = ()
    """Its own defaults."""
    drop_last: tuple[bool, str] = (False, "the Trainer's default")
    """The default of `drop_last` under Hugging Face's Trainer, and whose it is."""
    overlong: Overlong = "cut"
    cuts_padded: bool = False
    """Whether an overlong document is cut where documents are padded, whatever `overlong` says."""
    pads_documents: bool = True
    """Whether `pad_seq_to_mult` pads each document; otherwise, if anything, micro-batches."""
    fills_rows: bool = False
    """Whether every row has all of its tokens whatever the tail policy is."""
    deals_rows: bool = False
    """Whether the Trainer's rows are dealt to the ranks one by one."""
    is_drawn: bool = False
    """Whether its order is drawn, since no setting tells the state of its generator."""
    more_rows: MoreRows | None = None
    """What more rows of a micro-batch do to a step; None: what its loader says (`samplers.MORE_ROWS`)."""
    refuse: Callable[[Mapping[str, Any]], None] = lambda values: None
    """Raises a UsageError for settings, by name, under which nobody packs so."""
    find_problems: Callable[[TrainingSettings], Iterator[Problem]] = lambda settings: iter(())
    order_note: str | None = None
    """A sentence on an order that was drawn with {seed}; None where the loader decides on the order."""
    padding_remedy: str | None = None
    """The way to give all micro-batches one token count; None: that of the kind of data."""
    advise_limit: Callable[[TrainingSettings, int], str] = lambda settings, fullest: ""
    """A clause on a limit that the packer does not keep to, for a fullest micro-batch of so many; empty without one."""

    @property
    def packs_steps(self) -> bool:
        """Whether it packs each global batch for itself while training."""
        return PACKERS[self.name].packs_steps

    @property
    def packs_in_training(self) -> bool:
        """Whether training itself packs the documents that it reads in their order."""
        return self.loader == "single"

    def treat_overlong(self, settings: TrainingSettings) -> Overlong:
        """What becomes of a document that is longer than a pack."""
        return "cut" if self.cuts_padded and settings.pad_seq_to_mult > 1 else self.overlong

    def pack(
        self,
        document_tokens: NDArray[np.int32],
        settings: TrainingSettings,
        trained_from: NDArray[np.int32] | None = None,
    ) -> Packing:
        """Pack documents into rows of `seq_length` tokens, before training starts or step by step.

        Args:
            document_tokens: tokens of every document in file order, int32, shape [documents].
            settings: the run.
            trained_from: fewest tokens of each document that train one, as in `UnpackedDocuments`; None: one.

        Raises:
            DataError: no document is left to pack.
            UsageError: the packer makes a schedule alone, or the cap leaves no place for a document.
        """
        if self.by_step is not None:
            return self.by_step(document_tokens, settings)
        if self.prepare is None:
            raise UsageError(f"--packer {self.name}: does not make rows before training starts")
        lengths, notes = document_tokens.astype(np.int64), list[str]()
        if self.row_is_document:
            kept = (lengths > 0) if trained_from is None else trained_from <= settings.seq_length
            if left_out := int((~kept).sum()):
                notes.append(f"{left_out} documents of which no token is trained were left out")
            lengths = lengths[kept]
        appends = settings.tail_policy == "append_dummy_seq" if self.counts_tail is None else self.counts_tail
        return self.prepare(lengths, settings, notes).pack(
            settings,
            rule=self.rule,
            counts_tail=appends,
            notes=notes,
            verb="train in" if self.row_is_document else "pack into",
        )


# --- exports ----------------------------------------------------------------------------------------------------------

Flag = tuple[str, ...]
"""A flag and its values; each string is one word of a shell command."""
Value = bool | int | str | list[str] | dict[str, "Value"]
"""A value of Bridge's overrides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan as flags or files of another system."""

    text: str
    """The export itself, ending in a newline."""
    extra_files: Mapping[str, str] = field(default_factory=dict)
    """Contents of further files by name: files that the text refers to, and other forms of the text."""


@dataclass(frozen=True, slots=True)
class Target:
    """A system that a plan can be exported to."""

    main_file: str
    """File name under which the export's text is written."""
    title: str
    """What the export is, in its first comment."""
    render: Callable[[Plan, int | None, list[str]], Exported]
    """Makes the export for a cap in documents, a dummy tail included, below comments; with a cap of None, training runs
    without graphs."""
    least_cap: Callable[[Plan], int] | None = None
    """Documents of the fullest micro-batch as this system forms it, where a micro-batch over the cap stops training or
    gives wrong results; None where it runs eagerly."""
    limits_packer: bool = False
    """Whether the cap is the limit of a packer at run time, so that no micro-batch exceeds it."""
    one_cap: bool = True
    """Whether the system takes one cap in place of a list of buckets."""
    caps_rows: bool = False
    """Whether the cap is of one row, and not of a micro-batch."""
    packers: tuple[str, ...] | None = None
    """The packers with which the system makes packs while training; None: it has none, or any pack serves it."""
    refuses_other_packs: bool = False
    """Whether a plan of other packers is refused; otherwise a comment says that its counts are of other packs."""

    def explain_packs(self, name: str, plan: Plan) -> str:
        """Why packs of the plan are none of this system's, which is called `name`; empty where they are."""
        if self.packers is None or plan.training.packer in self.packers:
            return ""
        return (
            f"the packs that the plan counts say nothing of those that {name} makes: analyse lengths with "
            f"--packer {' or '.join(self.packers)}, as its configuration has it"
        )


def count_fullest(plan: Plan) -> int:
    """Documents of the fullest micro-batch; of what was drawn, over all draws."""
    drawn = plan.microbatches.spread
    return plan.microbatches.n_seqs.max if drawn is None else drawn.most.n_seqs.max


def explain_no_graphs(plan: Plan) -> str:
    """Why training by the plan captures no graphs."""
    if plan.graphs.impl == "none" and plan.graphs.one_cap is not None:
        return "the plan asks for no graphs (graphs.impl: none)"
    return "no cap makes a step faster than running eagerly, by the plan's cost table"


def one_line(text: str) -> str:
    """`text` as one line of printable characters, which can stand behind a comment sign."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def write_comment(lines: Sequence[str]) -> str:
    """`lines` as comments that shells, Python and YAML take."""
    return "".join(f"{part}\n" for line in lines for part in wrap_text(f"# {one_line(line)}", "#   "))


def export_shell(flags: Sequence[Flag], comments: Sequence[str], file: str) -> Exported:
    """An export of `flags` as a bash array below `comments`; its extra file `file` has them on one line."""
    lines = [shlex.join(flag) for flag in flags]
    text = write_comment(comments) + "THDPROF_ARGS=(\n" + "".join(f"    {line}\n" for line in lines) + ")\n"
    return Exported(text=text, extra_files={file: " ".join(lines) + "\n"})


def export_yaml(comments: Sequence[str], keys: dict[str, Value], extra: Mapping[str, str] | None = None) -> Exported:
    """An export of `keys` as YAML below `comments`, with extra files."""
    import yaml

    text = write_comment(comments) + yaml.safe_dump(keys, sort_keys=False, width=10_000, allow_unicode=True)
    return Exported(text=text, extra_files=extra or {})


def _render_json(plan: Plan, cap: int | None, comments: list[str]) -> Exported:
    return Exported(text=json_text(plan.model_dump(mode="json", by_alias=True)) + "\n")


TARGET = Target("plan.json", "", _render_json, one_cap=False)
"""The plan itself."""
