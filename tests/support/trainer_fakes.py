"""What a trainer's loop meets when a plan is followed in it, without a GPU: each says in `seen` when it was called."""

from __future__ import annotations


class FakeInstallation:
    """Stands for what `install` returns."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def close(self) -> None:
        self.seen.append("closed")

    def recapture(self) -> None:
        self.seen.append("recaptured")


class FakeObserver:
    """Stands for the observer: says when it was asked."""

    def __init__(self, installation, plan, *, stats, say, path) -> None:
        self.seen = installation.seen

    def log_text(self) -> str:
        return " thdprof replayed: 8 |"

    def scalars(self) -> dict[str, float]:
        return {"thdprof/replayed": 8.0}

    def after_step(self, iteration: int) -> None:
        self.seen.append(f"after step {iteration}")

    def finish(self, *, together: bool) -> None:
        self.seen.append(f"finished together={together}")


class Writer:
    """Stands for any of a trainer's loggers."""

    def __init__(self) -> None:
        self.written: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.written.append((name, value, step))

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.written += [(name, value, step) for name, value in scalars.items()]

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.log(metrics, step)
