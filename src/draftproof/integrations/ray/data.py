"""Generation in Ray Data's pipelines: a class for `map_batches` that loads its engine once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from draftproof.batch.answering import Answerer
from draftproof.batch.folder import table
from draftproof.batch.rows import RowOptions, columns
from draftproof.batch.source import LINE_KEYS, PROMPT_KEYS, Row
from draftproof.engine.engine import Engine
from draftproof.errors import UserError


class Generate:
    """Answers the rows of a data set: `data.map_batches(Generate, fn_constructor_kwargs={...}, batch_size=128)`.

    Rows have `prompt` (or `text`, or `messages`) and mostly `id`; what comes out has the columns of `draftproof batch`
    beside all others that went in. Rows with `custom_id`, `method`, `url` and `body` are lines of an OpenAI batch
    file. A row that cannot be answered has its error in the column `error`, or as its response. For `batch_format`
    "pyarrow" and "numpy" (Ray's default).

    Args:
        target: as in `Engine.load`.
        draft: as in `Engine.load`.
        engine: further arguments of `Engine.load`.
        options: how rows are asked and answered; with a seed in `sampling` the text of a row depends on the seed and
            its id only.
        keep: the columns that go through; by default all.

    Raises:
        UserError: see `Engine.load`.
    """

    def __init__(
        self,
        target: str,
        draft: str | None = None,
        *,
        engine: Mapping[str, Any] | None = None,
        options: RowOptions | None = None,
        keep: Sequence[str] | None = None,
    ) -> None:
        self._options = options or RowOptions()
        self._keep = keep
        self._answer = Answerer(Engine.load(target, draft, **(engine or {})), self._options)

    def __call__(self, batch: pa.Table | Mapping[str, Any]) -> pa.Table:
        """The answers to a batch of rows.

        Raises:
            UserError: no column with ids where a seed is given, or an id that occurs twice.
        """
        rows = batch if isinstance(batch, pa.Table) else pa.table({name: list(each) for name, each in batch.items()})
        key = "custom_id" if self._options.lines else "id"
        if key not in rows.column_names and (self._options.seed is not None or self._options.lines):
            raise UserError(f"the rows have no column {key!r}: a seed and lines of OpenAI batch files need it")
        ids = rows[key].to_pylist() if key in rows.column_names else list(range(rows.num_rows))
        place = {name: number for number, name in enumerate(ids)}
        if len(place) < len(ids) or None in place:
            raise UserError(
                f"the rows have ids in {key!r} that are missing or occur twice: give each row one of its own"
            )
        read = LINE_KEYS if self._options.lines else (*PROMPT_KEYS, "prediction")
        asked = rows.select([name for name in read if name in rows.column_names]).to_pylist()
        given = (Row(name, values) for name, values in zip(ids, asked, strict=True))
        # Answers come as requests end, which depends on their lengths; the dataset keeps its order.
        results = [result for some in self._answer(given) for result in some]
        results.sort(key=lambda result: place[result.id])
        made = table(
            [row for result in results for row in result.rows],
            columns(self._options),
            integers=key not in rows.column_names or pa.types.is_integer(rows[key].type),
        )
        if key not in rows.column_names:  # numbers that only paired answers with rows
            made = made.drop_columns([key])
        sources = pa.array([place[result.id] for result in results for _ in result.rows], pa.int64())
        for name in rows.column_names:
            if name not in made.column_names and (self._keep is None or name in self._keep):
                made = made.append_column(name, rows[name].take(sources))
        return made
