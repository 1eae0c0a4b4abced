"""Draws the rows of a head CSV file: time against memory, one panel per case. Needs matplotlib."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path


def plot(path: Path) -> Path:
    """Writes PATH with .png in place of .csv, from rows that have both time and memory; later rows win."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["p50_s"] and row["peak_mib_over_base"]]
    cases = _cases(rows)
    figure, panels = pyplot.subplots(1, len(cases), figsize=(4.6 * len(cases), 3.8), squeeze=False)
    for panel, (title, providers) in zip(panels[0], cases.items(), strict=True):
        for name, row in providers.items():
            spot = (float(row["p50_s"]), float(row["peak_mib_over_base"]))
            panel.scatter(*spot, color="tab:red" if name == "ours" else "tab:gray")
            panel.annotate(name, spot, textcoords="offset points", xytext=(4, 4), fontsize=7)
        panel.axvline(statistics.median(float(row["roofline_s"]) for row in providers.values()), ls=":", lw=0.8)
        panel.set(
            xscale="log", yscale="log", xlabel="seconds, p50 (dotted: the products alone)", ylabel="peak MiB over base"
        )
        panel.set_title(title, fontsize=8)
        panel.margins(0.25)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=90)
    return target


def _cases(rows: list[dict[str, str]]) -> dict[str, dict[str, dict[str, str]]]:
    """Title of a case -> provider -> its last row."""
    cases: dict[str, dict[str, dict[str, str]]] = {}
    for row in rows:
        sizes = f"T={row['T']} H={row['H']} V={row['V']} f={float(row['trained_fraction']):g}"
        title = f"{sizes}\n{row['mode']}, {row['dtype']}, {row['threads']} threads"
        cases.setdefault(title, {})[row["provider"]] = row
    return cases
