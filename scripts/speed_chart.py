"""Draw the README's chart of speeds from the results of `draftproof bench engines`.

    python scripts/speed_chart.py            writes docs/assets/speed.svg

Each other engine was measured in turns with ours, in a run of its own. So every bar is relative to plain decoding by
draftproof in the same run; bars of two runs cannot be compared to the last digit.
"""

from __future__ import annotations

import html
import json
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
CHART = ROOT / "docs" / "assets" / "speed.svg"
OTHERS = {"throughput": "transformers", "engines": "vLLM (CPU)", "engines_llama": "llama.cpp (4-bit weights)"}
PLAIN, DRAFTS = "draftproof, plain", "draftproof, with drafts"
WITH_DRAFTS = "throughput"  # the run whose bar with drafts is shown
LABELS, BAR, GAP, WIDTH = 210, 22, 10, 760
OWN, OTHER = "#00897b", "#90a4ae"


def ratios(name: str, temperature: float) -> dict[str, float]:
    """Speeds of a run's engines for one request, relative to ours without drafts: mean of the turns' ratios."""
    rows: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    speeds = {
        row["engine"]: row["tokens_per_second"]
        for row in rows
        if row["batch"] == 1 and row["temperature"] == temperature
    }
    plain = speeds[PLAIN]
    return {engine: fmean(a / b for a, b in zip(found, plain, strict=True)) for engine, found in speeds.items()}


def bars(temperature: float) -> list[tuple[str, float]]:
    """The label and length of each bar."""
    found = []
    for name, label in OTHERS.items():
        (other,) = (speed for engine, speed in ratios(name, temperature).items() if not engine.startswith("draftproof"))
        found.append((label, other))
    (drafts,) = (
        speed
        for engine, speed in ratios(WITH_DRAFTS, temperature).items()
        if engine.startswith("draftproof") and engine != PLAIN
    )
    return [*found, (PLAIN, 1.0), (DRAFTS, drafts)]


def chart() -> str:
    """The chart as SVG."""
    unit = "tokens a second; draftproof without drafts is 1"
    groups = [(f"Temperature 0: {unit}", bars(0.0)), (f"Temperature 1: {unit}", bars(1.0))]
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
