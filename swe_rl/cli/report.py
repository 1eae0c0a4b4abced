"""`swe-rl report RUN`: one self-contained HTML file for a run directory, also of a run that is still going on.

To add to the report, write a section (report_sections.py tells what one is) and add it to SECTIONS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from swe_rl.cli import report_sections as sections
from swe_rl.cli.arguments import ArgumentParser
from swe_rl.cli.report_data import RunData, read_run
from swe_rl.errors import ConfigError
from swe_rl.metric_table import metric_table

SECTIONS: list[tuple[str, Callable[[RunData], str]]] = [
    ("Held-out success", sections.final_table),
    ("Training", sections.curves),
    ("Other metrics", sections.other_curves),
    ("How episodes ended", sections.stop_reasons),
    ("Sample trajectories", sections.sample_trajectories),
    ("Configuration", sections.configuration),
]

STYLE = """\
:root{--ink:#1c2024;--soft:#6b7280;--line:#e2e5e9;--back:#fff;--card:#f7f8fa;
--k0:#2563eb;--k1:#d97706;--k2:#059669;--k3:#db2777;--k4:#7c3aed;--k5:#64748b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--soft:#9aa3af;--line:#333a43;--back:#14171a;--card:#1c2126;
--k0:#60a5fa;--k1:#fbbf24;--k2:#34d399;--k3:#f472b6;--k4:#a78bfa;--k5:#94a3b8}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--back);max-width:1340px;margin:2rem auto;
padding:0 1rem}
h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin:2rem 0 .5rem}h4{margin:.8rem 0 .2rem;
color:var(--soft);font-weight:500}p,small{color:var(--soft)}
table{border-collapse:collapse}th,td{padding:.3rem .8rem;border-bottom:1px solid var(--line);text-align:left;
font-variant-numeric:tabular-nums}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(380px,1fr));gap:1rem}
figure{margin:0;background:var(--card);border-radius:8px;padding:.6rem .8rem}figcaption{font-size:.85rem}
svg{width:100%;height:auto;display:block}svg text{font-size:10px;fill:var(--soft)}
line.grid{stroke:var(--line)}line.mark{stroke:var(--soft);stroke-dasharray:3 3}
polyline{fill:none;stroke-width:1.6}
.key{white-space:nowrap}
.key::before{content:"";display:inline-block;width:.7em;height:.7em;border-radius:2px;margin:0 .3em 0 .7em;
background:currentColor}
.c0{stroke:var(--k0);color:var(--k0)}.c1{stroke:var(--k1);color:var(--k1)}.c2{stroke:var(--k2);color:var(--k2)}
.c3{stroke:var(--k3);color:var(--k3)}.c4{stroke:var(--k4);color:var(--k4)}.c5{stroke:var(--k5);color:var(--k5)}
circle.c0{fill:var(--k0)}circle.c1{fill:var(--k1)}circle.c2{fill:var(--k2)}circle.c3{fill:var(--k3)}
circle.c4{fill:var(--k4)}circle.c5{fill:var(--k5)}
td.bar{width:480px}td.bar i{display:inline-block;height:1em}.b0{background:var(--k0)}.b1{background:var(--k1)}
.b2{background:var(--k2)}.b3{background:var(--k3)}.b4{background:var(--k4)}.b5{background:var(--k5)}
details{border:1px solid var(--line);border-radius:8px;padding:.4rem .8rem;margin:.5rem 0}summary{cursor:pointer}
pre{background:var(--card);padding:.6rem;border-radius:6px;overflow-x:auto;white-space:pre-wrap;
overflow-wrap:anywhere;font-size:.8rem}"""


def main(argv: Sequence[str]) -> int:
    """Entry point of `swe-rl report`."""
    parser = ArgumentParser(
        prog="swe-rl report",
        description="Renders a run directory as one HTML file that needs nothing beside it.",
        example="swe-rl report runs/RUN && xdg-open runs/RUN/report.html",
    )
    parser.add_argument("run", metavar="RUN", type=Path, nargs="?", help="the directory that `swe-rl train` wrote")
    parser.add_argument("--metrics", action="store_true", help="print what every metric means, as Markdown, and end")
    parser.add_argument("--out", type=Path, help="the file to write (default: RUN/report.html)")
    arguments = parser.parse_args(argv)
    if arguments.metrics:
        print(metric_table())
        return 0
    if arguments.run is None:
        raise ConfigError("swe-rl report needs RUN, the directory that `swe-rl train` wrote, or --metrics")
    page = render(read_run(arguments.run))
    target = arguments.out or arguments.run / "report.html"
    write_page(target, page)
    print(target)
    return 0


def render(run: RunData) -> str:
    """The whole page."""
    name = run.path.resolve().name
    parts = []
    for title, section in SECTIONS:
        body = section(run)
        parts.append(f"<h2>{escape(title)}</h2>{body or '<p>Nothing was recorded.</p>'}")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(name)}</title><style>{STYLE}</style></head><body><h1>{escape(name)}</h1>"
        f"{''.join(parts)}</body></html>\n"
    )


def write_page(target: Path, page: str) -> None:
    """Replaces the file in one step: a reader sees the old or the new page."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staged = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        staged.write_text(page, encoding="utf-8", errors="replace")
        os.replace(staged, target)
    finally:
        staged.unlink(missing_ok=True)
