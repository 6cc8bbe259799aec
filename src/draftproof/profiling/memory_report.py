"""The report of an engine's memory: tables of weights, caches and rounds, and the measured peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.peak import HOW
from draftproof.profiling.memory import Memory
from draftproof.results import Results, table


def memory_report(found: Memory, setup: Mapping[str, Any], facts: Mapping[str, Any]) -> Results:
    """The report as a page and as JSON, which also has the `setup`: names of the models and options."""
    lines = [*_weights(found), "", *_caches(found), "", *_round(found), "", *_measured(found)]
    return Results("Memory", lines, {**setup, **found.to_dict()}, facts)


def _weights(found: Memory) -> list[str]:
    rows = [(one.part, *map(format_bytes, (one.own, one.packed, one.shared))) for one in found.weights]
    return table(("weights", "own", "of these packed", "shared with the parts above"), rows)


def _caches(found: Memory) -> list[str]:
    rows: list[tuple[str, ...]] = []
    for one in found.caches:
        sizes = map(format_bytes, (one.token, one.sequence, one.used, one.taken))
        rows.append((one.part, *sizes, "what each wrote" if one.paged else "as much as the longest"))
    for name, size in (("states for the head", found.states), ("recurrent states", found.recurrent)):
        if size:
            rows.append((name, "", "", format_bytes(size), "", ""))
    heads = ("keys and values", "per token", "longest request", "whole batch", "taken", "by each request")
    return table(heads, rows)


def _round(found: Memory) -> list[str]:
    rows = []
    for phase, first in found.first.items():
        largest = found.rows.get(phase)
        shown = (
            ("", "") if largest is None else (format_bytes(largest.nbytes), f"{list(largest.shape)} {largest.dtype}")
        )
        rows.append((phase, format_bytes(first), format_bytes(found.later[phase]), *shown))
    return table(("peak in a round", "first", "later", "rows returned", "shape"), rows)


def _measured(found: Memory) -> list[str]:
    measured, load = found.resident, found.workload
    parts = ", ".join(f"{kind} {name}" for kind, name in found.parts.items() if name)
    each = f"{load.prompt_tokens} prompt tokens and {load.new_tokens} new ones each"
    lines = [f"Sum of the parts: {format_bytes(found.total)}, for a batch of {load.batch}, {each}; {parts}.", ""]
    if measured.before is not None and measured.loaded is not None:
        running, loaded, loading = (
            format_bytes(size - measured.before) for size in (measured.peak, measured.loaded, measured.loading)
        )
        lines.append(
            f"Measured: peak {running} while running, {loaded} when loaded, peak {loading} while loading, all beyond "
            f"the {format_bytes(measured.before)} before loading."
        )
    else:
        lines.append(f"Measured: peak {format_bytes(measured.peak)} while running.")
    return [*lines, f"Measured are {HOW[measured.how]}."]


def format_bytes(size: int) -> str:
    """Bytes in decimal units, to three digits."""
    if abs(size) < 1000:
        return f"{size} B"
    amount, unit = float(size), "B"
    for unit in ("kB", "MB", "GB", "TB"):  # noqa: B007 - the last one is needed
        amount /= 1000
        if abs(amount) < 999.5:
            break
    return f"{amount:.3g} {unit}" if abs(amount) < 99.95 else f"{amount:.0f} {unit}"
