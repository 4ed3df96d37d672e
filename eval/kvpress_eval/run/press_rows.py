# SPDX-License-Identifier: Apache-2.0
"""Rows of a measurement, one for each press and batch of contexts.

A row is stored as soon as it is measured, so a measurement that was stopped continues with the rows that are there. A press
that has used more than its time is not measured on further batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvpress
from kvpress.core.spec import own_digest
from kvpress.counts import parse_seconds
from kvpress_eval.common.errors import BusyError, ConfigError, OutputError
from kvpress_eval.common.files import differences, read_object
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import SCHEMA, CellStore, Row
from kvpress_eval.results.summary import BASELINE
from kvpress_eval.run.models import Engine
from kvpress_eval.run.progress import JobProgress


@dataclass(frozen=True)
class ContextBatch:
    """Contexts on which each press has one row."""

    id: str
    """Identifier, the first part of the names of its rows."""
    contexts: int
    """Number of contexts."""
    tokens: int
    """Tokens of all contexts; the time of a press is taken to be proportional to them."""


@dataclass(frozen=True)
class StoppedPress:
    """Press that used more than its time before it was measured on all contexts."""

    press: str
    """Spec of the press."""
    seconds: float
    """Time that it has used."""
    measured: int
    """Contexts with figures."""
    contexts: int
    """All contexts."""
    limit: float
    """Seconds that it may use."""
    estimate: float
    """Seconds that it needs for all contexts at the same speed."""

    @property
    def sentence(self) -> str:
        """The reason why the press has no figures, without a full stop."""
        return (
            f"{self.press}: stopped after {_seconds(self.seconds)}, {self.measured} of {self.contexts} contexts; "
            f"{self.limit:g} s are the limit (--press-seconds); at this speed it needs about {_duration(self.estimate)}"
        )

    def row(self) -> dict[str, Any]:
        """Return the fields and the sentence as plain data."""
        return {**asdict(self), "sentence": self.sentence}


class PressRows:
    """Rows by batch and press, those of an earlier measurement included.

    `seconds` of a row is the time of the press. The full cache has no limit, because all presses are compared with it.
    """

    def __init__(
        self,
        batches: Sequence[ContextBatch],
        presses: Sequence[str],
        press_seconds: float | None = None,
        store: CellStore | None = None,
    ) -> None:
        self.batches, self.presses, self.press_seconds = batches, presses, press_seconds
        self._store = store
        self._rows: dict[str, Row] = {}
        # A press with code or files of the user is named with their digest.
        self._labels = {
            press: " ".join(filter(None, (press, own_digest(kvpress.get_press(press))))) for press in presses
        }

    @property
    def names(self) -> list[str]:
        """Names of all rows, measured or not, batch by batch."""
        return [self._name(batch, press) for batch in self.batches for press in self.presses]

    @property
    def measured(self) -> list[Row]:
        """Rows that are measured, batch by batch."""
        return [self._rows[name] for name in self.names if name in self._rows]

    @property
    def stopped(self) -> list[StoppedPress]:
        """Presses that were stopped by the limit on their time."""
        return [self._stop(press) for press in self.presses if self._is_over(press) and self._missing(press)]

    def restore(self, rows: Mapping[str, Row]) -> None:
        """Take rows of an earlier measurement, by name."""
        self._rows |= {name: {key: row[key] for key in row if key != "sha256"} for name, row in rows.items()}

    def add(self, batch: ContextBatch, press: str, figures: Row) -> None:
        """Add a row and store it."""
        row = {"sample": self._name(batch, press), "press": press, **figures}
        self._rows[row["sample"]] = row
        if self._store:
            self._store.append(row)

    def unmeasured(self, progress: JobProgress) -> Iterator[tuple[int, list[str]]]:
        """Yield the number of each batch that lacks rows, with the presses to measure on it; stopped ones are left out."""
        for number, batch in enumerate(self.batches):
            presses = [
                press
                for press in self.presses
                if self._name(batch, press) not in self._rows and not self._is_over(press)
            ]
            progress.skip(len(self.presses) - len(presses))
            if presses:
                yield number, presses

    def row(self, batch: ContextBatch, press: str) -> Row:
        """Return the row of a press on a batch."""
        return self._rows[self._name(batch, press)]

    def complete(self, batches: Sequence[ContextBatch]) -> dict[str, list[Row]]:
        """Return the rows on these batches of every press that has all of them, by press."""
        return {
            press: [self.row(batch, press) for batch in batches]
            for press in self.presses
            if all(self._name(batch, press) in self._rows for batch in batches)
        }

    def _name(self, batch: ContextBatch, press: str) -> str:
        return f"{batch.id} {self._labels[press]}"

    def _missing(self, press: str) -> list[ContextBatch]:
        return [batch for batch in self.batches if self._name(batch, press) not in self._rows]

    def _used(self, press: str) -> float:
        """Return the seconds of a press; rows of earlier versions have none."""
        names = (self._name(batch, press) for batch in self.batches)
        return sum(self._rows[name].get("seconds", 0.0) for name in names if name in self._rows)

    def _is_over(self, press: str) -> bool:
        return self.press_seconds is not None and press != BASELINE and self._used(press) > self.press_seconds

    def _stop(self, press: str) -> StoppedPress:
        missing, used = self._missing(press), self._used(press)
        tokens, contexts = (sum(getattr(batch, name) for batch in self.batches) for name in ("tokens", "contexts"))
        return StoppedPress(
            press=press,
            seconds=round(used, 3),
            measured=contexts - sum(batch.contexts for batch in missing),
            contexts=contexts,
            limit=self.press_seconds or 0.0,
            estimate=round(used * tokens / (tokens - sum(batch.tokens for batch in missing)), 3),
        )


@contextmanager
def open_rows(
    folder: Path | None,
    identity: Mapping[str, Any],
    batches: Sequence[ContextBatch],
    presses: Sequence[str],
    press_seconds: float | None = None,
) -> Iterator[PressRows]:
    """Lock a folder and yield its rows; rows that are added are stored there. Without a folder nothing is stored.

    Raises:
        ConfigError: `press_seconds` is no time.
        OutputError: the folder belongs to another measurement.
        BusyError: another process measures into the folder.
    """
    try:
        limit = None if press_seconds is None else parse_seconds(press_seconds, "press_seconds")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if folder is None:
        yield PressRows(batches, presses, limit)
        return
    store = CellStore(folder)
    with store.claim() as claimed:
        if not claimed:
            raise BusyError(f"another process measures into {folder}; use another --out")
        earlier = read_object(folder / "cell.json")
        if earlier is None and store.rows_path.exists():
            raise OutputError(
                f"{folder} holds rows, and its cell.json, with their settings, cannot be read: use another --out, or remove "
                "that folder"
            )
        if listed := differences(earlier or identity, identity):
            raise OutputError(
                f"{folder} holds rows of another measurement ({listed}): use another --out, or remove that folder"
            )
        rows = PressRows(batches, presses, limit, store)
        rows.restore(store.open(identity, rows.names))
        yield rows
        if not rows.stopped:
            store.finish(len(rows.measured))


def identity_of(config: RunConfig, engine: Engine) -> dict[str, Any]:
    """Return the settings of the model and the contexts that the rows of any measurement depend on."""
    return {
        "schema": SCHEMA,
        "kvpress": kvpress.__version__,
        "model": config.model,
        "weights": engine.fingerprint,
        "device": engine.device,
        "dtype": engine.dtype,
        "seed": config.seed,
        "language": config.wording,
        **({"model_kwargs": config.model_kwargs} if config.model_kwargs else {}),
    }


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _duration(seconds: float) -> str:
    """Return a time in the unit that a reader would use."""
    if seconds < 120:
        return _seconds(seconds)
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.0f} hours"
