"""Draw the README's chart of speeds from the results of `draftproof bench engines`.

    python scripts/speed_chart.py            writes docs/assets/speed.svg

Each other engine was measured in turns with ours, in a run of its own, on the same weights: those of 16 bits, or a
4-bit file. So every bar is relative to plain decoding by draftproof in the same run; bars of two runs cannot be
compared to the last digit, and those of two kinds of weights not at all.
"""

from __future__ import annotations

import gzip
import html
import json
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
CHART = ROOT / "docs" / "assets" / "speed.svg"
KINDS = {  # runs with their other engine, by what weights they have
    "16-bit weights": {"throughput": "transformers", "engines": "vLLM (CPU)"},
    "a 4-bit file": {"engines_llama": "llama.cpp"},
}
PLAIN, DRAFTS = "draftproof, plain", "draftproof, with drafts"
LABELS, BAR, GAP, WIDTH = 210, 22, 10, 760
OWN, OTHER = "#00897b", "#90a4ae"


def ratios(name: str, temperature: float) -> dict[str, float]:
    """Speeds of a run's engines for one request, relative to ours without drafts: mean of the turns' ratios."""
    packed, plain = (RESULTS / f"{name}{ending}" for ending in (".json.gz", ".json"))
    figures = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    rows: list[dict[str, Any]] = json.loads(figures)["rows"]
    speeds = {
        row["engine"]: row["tokens_per_second"]
        for row in rows
        if row["batch"] == 1 and row["temperature"] == temperature
    }
    ours = speeds[PLAIN]
    return {engine: fmean(a / b for a, b in zip(found, ours, strict=True)) for engine, found in speeds.items()}


def bars(runs: dict[str, str], temperature: float) -> list[tuple[str, float]]:
    """The label and length of each bar; drafts are those of the first run."""
    found, drafts = [], []
    for name, label in runs.items():
        speeds = ratios(name, temperature)
        (other,) = (speed for engine, speed in speeds.items() if not engine.startswith("draftproof"))
        found.append((label, other))
        drafts += [speed for engine, speed in speeds.items() if engine.startswith("draftproof") and engine != PLAIN]
    return [*found, (PLAIN, 1.0), (DRAFTS, drafts[0])]


def chart() -> str:
    """The chart as SVG."""
    unit = "tokens a second; draftproof, plain is 1"
    groups = [
        (f"{kind[0].upper()}{kind[1:]}, temperature {temperature:g}: {unit}", bars(runs, temperature))
        for kind, runs in KINDS.items()
        for temperature in (0.0, 1.0)
    ]
    scale = (WIDTH - LABELS - 60) / max(length for _, group in groups for _, length in group)
    lines, y = [], 8
    for title, group in groups:
        lines.append(f'<text x="{LABELS}" y="{y + 14}" class="title">{html.escape(title)}</text>')
        y += 24
        for label, length in group:
            middle, width = y + BAR / 2 + 5, length * scale
            colour = OWN if label.startswith("draftproof") else OTHER
            lines += [
                f'<text x="{LABELS - 8}" y="{middle:.0f}" text-anchor="end">{html.escape(label)}</text>',
                f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
                f'<text x="{LABELS + width + 6:.1f}" y="{middle:.0f}">{length:.2f}</text>',
            ]
            y += BAR + GAP
        y += GAP
    style = "text{font:14px sans-serif;fill:#78909c}.title{font-weight:bold}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img" aria-label="Speeds">'
    return "\n".join([head, f"<style>{style}</style>", *lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    CHART.write_text(chart(), encoding="utf-8")
    print(f"wrote {CHART.relative_to(ROOT)}")
