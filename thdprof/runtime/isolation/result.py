"""What `verify_isolation` found: typed, true where documents stay apart, and readable as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from thdprof.dispatch import Bucket
from thdprof.words import write_count

Mode = Literal["eager", "padded", "replayed"]
"""How a micro-batch ran: eagerly; eagerly with its boundaries padded to a bucket; or through captured graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Neighbouring tokens of a micro-batch that belong to one document, or to none."""

    kind: Literal["document", "padding", "tail"]
    """Whether these are a document's tokens, the padding after a document, or the tail after the last one."""
    number: int
    """The document, counted from 0; of padding, the document that it follows; of a tail, the number of documents."""
    begin: int
    """The first token, counted from the micro-batch's first."""
    end: int
    """One more than the last token."""

    def __str__(self) -> str:
        names = {"document": f"document {self.number}", "padding": f"the padding after document {self.number}"}
        return names.get(self.kind, "the tail after the last document")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """One document that moved although only others were perturbed."""

    mode: Mode
    """The mode in which it moved."""
    what: Literal["output", "gradient"]
    """Whether an output moved, or an input's gradient."""
    name: str
    """The tensor that moved, such as `outputs[0]` or `tensors[0].grad`."""
    sources: tuple[Region, ...]
    """What was perturbed: a document, padding, the tail; several where none of them alone moves the document."""
    document: int
    """The document that moved, counted from 0."""
    token: int
    """The first token that moved, counted from the micro-batch's first."""
    token_in_document: int
    """The same token, counted from its document's first."""
    tokens_moved: int
    """Number of tokens of that document that moved."""
    moved: float
    """Largest absolute difference at the first token that moved; infinite where the value is no number any more."""
    limit: float
    """Largest absolute difference that would have counted as none; 0 where values must be equal."""

    def __str__(self) -> str:
        names = ", ".join(map(str, self.sources[:4])) + (", ..." if len(self.sources) > 4 else "")
        together = " together" if len(self.sources) > 1 else ""
        allowed = f", more than {self.limit:.3g}" if self.limit else ""
        return (
            f"{self.mode}: {names}{together} moved {self.name} of document {self.document} at its token "
            f"{self.token_in_document} (token {self.token} of the micro-batch) by {self.moved:.3g}{allowed}; "
            f"{self.tokens_moved} of the document's tokens moved"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeCheck:
    """What was compared in one mode."""

    mode: Mode
    """How the micro-batch ran."""
    bucket: Bucket | None
    """The bucket to which boundaries were padded; None for `eager`."""
    outputs: int
    """Number of output tensors that were compared: those that run over tokens."""
    gradients: int
    """Number of input gradients that were compared; 0 where no input takes a gradient."""
    deterministic: bool
    """Whether unperturbed passes repeated each other value for value, so that no value of another document may move."""
    spread: float
    """Largest absolute difference between unperturbed passes, over all compared tensors; 0 if deterministic."""
    passes: int
    """Number of forward passes, with their backward passes where gradients are compared."""
    unseen: tuple[int, ...]
    """Documents whose own outputs or gradients did not move when perturbed: nothing is proved of them."""

    def __str__(self) -> str:
        to = "" if self.bucket is None else f", {self.bucket.max_seqs} documents"
        how = "value for value" if self.deterministic else f"within their own spread, {self.spread:.3g}"
        grads = write_count(self.gradients, "gradient") if self.gradients else "no gradient"
        return f"{self.mode}{to}: {write_count(self.outputs, 'output')} and {grads}, {how}, {self.passes} passes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Whether the documents of a micro-batch stay apart in a module; true where they do in every wanted mode."""

    documents: int
    """Number of documents with tokens."""
    checks: tuple[ModeCheck, ...]
    """The modes that ran, in their order; none after the one with the leak."""
    leak: Leak | None
    """The first leak; None where there is none."""
    skipped: Mapping[Mode, str]
    """The modes that did not run, and why."""
    missing: tuple[Mode, ...]
    """The modes of `skipped` that the caller named."""
    notes: tuple[str, ...]
    """Parts of the module that mix documents on purpose, each with what to change for a proof."""

    @property
    def unseen(self) -> tuple[int, ...]:
        """Documents of which nothing is proved, because their own values did not move in some mode."""
        return tuple(sorted({number for check in self.checks for number in check.unseen}))

    def __bool__(self) -> bool:
        return bool(self.checks) and self.leak is None and not self.missing and not self.unseen

    def __str__(self) -> str:
        """The verdict in one line, then a line for each mode and note."""
        lines = [self._verdict()]
        lines += [f"  {check}" for check in self.checks]
        lines += [f"  {mode}: did not run: {reason}" for mode, reason in self.skipped.items()]
        if self.leak is not None:
            lines += [f"  the module mixes documents on purpose: {note}" for note in self.notes]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.leak is not None:
            return f"documents do not stay apart: {self.leak}"
        if self.missing or not self.checks:
            return f"not proved: {' and '.join(self.missing) or 'every mode'} did not run"
        if self.unseen:
            return (
                f"not proved: document {self.unseen[0]} itself did not move when it was perturbed "
                f"({len(self.unseen)} of {self.documents} documents)"
            )
        return f"{self.documents} documents stay apart"
