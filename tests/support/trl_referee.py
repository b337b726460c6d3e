"""The micro-batches that TRL's SFTTrainer really forms: its own datasets, collator, sampler and data loader."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.state import AcceleratorState, PartialState

from support.trl_training import dataset_of, small_model, trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One micro-batch."""

    step: int
    dp_rank: int
    microbatch: int
    n_seqs: int
    max_seqlen: int
    n_tokens: int


def lengths_of(batch: dict) -> list[int]:
    """Documents of a collated batch: from its boundaries or, without padding-free rows, one a row."""
    if "cu_seq_lens_q" in batch:
        return batch["cu_seq_lens_q"].diff().tolist()
    return batch["attention_mask"].sum(dim=1).tolist()


def seen_by_ranks(monkeypatch, documents, directory, *, ranks: int, epochs: int, **arguments) -> list[Seen]:
    """Every micro-batch of `epochs` epochs, as each rank's own data loader gives it, sorted as a table is.

    Args:
        monkeypatch: lets accelerate believe that there are several processes.
        documents: tokens of every document.
        directory: a directory for the trainer.
        ranks: number of data-parallel ranks.
        epochs: number of epochs.
        arguments: fields of SFTConfig.
    """
    run = trainer(small_model(layers=1), dataset_of(documents), directory, num_train_epochs=epochs, **arguments)
    return seen_by(run, monkeypatch, ranks=ranks, epochs=epochs)


def seen_by(run, monkeypatch, *, ranks: int, epochs: int) -> list[Seen]:
    """Every micro-batch of `epochs` epochs of a trainer, as each rank's own data loader gives it."""
    accumulation = run.args.gradient_accumulation_steps
    seen, steps_before = [], 0
    for rank in range(ranks):
        with monkeypatch.context() as patch:
            for state in (PartialState, AcceleratorState):
                patch.setitem(state._shared_state, "num_processes", ranks)
                patch.setitem(state._shared_state, "process_index", rank)
            assert (run.accelerator.num_processes, run.accelerator.process_index) == (ranks, rank)
            loader = run.get_train_dataloader()
        steps_before = 0
        for epoch in range(epochs):
            loader.set_epoch(epoch)
            batches = [lengths_of(batch) for batch in loader]
            for number, lengths in enumerate(batches):
                step, place = divmod(number, accumulation)
                seen.append(
                    Seen(step=steps_before + step, dp_rank=rank, microbatch=place, n_seqs=len(lengths),
                         max_seqlen=max(lengths), n_tokens=sum(lengths))
                )  # fmt: skip
            steps_before += -(-len(batches) // accumulation)
    return sorted(seen, key=lambda one: (one.step, one.dp_rank, one.microbatch))
