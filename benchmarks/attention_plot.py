"""Draws the rows of an attention CSV file: TFLOP/s against tokens, one panel per mask. Needs matplotlib."""

from __future__ import annotations

import csv
from pathlib import Path


def plot(path: Path) -> Path:
    """Writes PATH with .png in place of .csv, from rows that have a time; later rows win."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["tflops"]]
    titles = sorted({_title(row) for row in rows})
    figure, panels = pyplot.subplots(1, len(titles), figsize=(4.6 * len(titles), 3.8), squeeze=False)
    for panel, title in zip(panels[0], titles, strict=True):
        curves: dict[str, dict[int, dict[str, str]]] = {}
        for row in rows:
            if _title(row) == title:
                curves.setdefault(row["provider"], {})[int(row["T"])] = row
        for name, points in curves.items():
            sizes = sorted(points)
            color = "tab:red" if name == "ours" else None
            panel.plot(sizes, [float(points[size]["tflops"]) for size in sizes], marker="o", label=name, color=color)
        ours = curves.get("ours", {})
        peaks = [float(row["tflops"]) / float(row["roofline_fraction"]) for row in ours.values()]
        if peaks:
            panel.axhline(max(peaks), ls=":", lw=0.8)
        panel.set(xscale="log", xlabel="tokens", ylabel="TFLOP/s (dotted: a large matrix product)", ylim=(0, None))
        panel.set_title(title, fontsize=8)
        panel.legend(fontsize=7)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=90)
    return target


def _title(row: dict[str, str]) -> str:
    sizes = f"heads={row['Hq']}/{row['Hkv']} D={row['D']}"
    return f"{row['mask']}, {row['mode']}\n{sizes}, {row['dtype']}, {row['threads']} threads"
