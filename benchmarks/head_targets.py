"""What the head is meant to reach on a CPU beside the others, and whether rows of bench_head.py show it."""

from __future__ import annotations

from head_cases import HeadCase
from head_providers import PROVIDERS
from recording import Row

FAST = HeadCase(4096, 576, 49152, 0.2)
WHOLE = HeadCase(4096, 576, 49152, 1.0)
LARGE = HeadCase(4096, 1024, 151936, 0.2)
TARGETS = {  # who is measured there
    FAST: tuple(PROVIDERS),
    WHOLE: ("ours", "eager", "rows_selected"),
    LARGE: ("ours", "ours_main_grad", "rows_selected"),
}


def verdicts(rows: list[Row]) -> list[str]:
    """What the targets of the CPU say about these rows, one line each; only those that the rows can decide."""
    lines = []

    def judge(case: HeadCase, what: str, column: str, provider: str, limit: float, *, at_least: bool = False) -> None:
        own, its = _find(rows, case, "ours", column), _find(rows, case, provider, column)
        if own is None or its is None:
            return
        value = own / its if column == "peak_mib_over_base" and provider != "ours" else its
        met = value >= limit if at_least else value <= limit
        sign = ">=" if at_least else "<="
        lines.append(f"{'met   ' if met else 'MISSED'} {value:8.3f} {sign} {limit:<7g} {what} ({case})")

    memory, ratio = "peak_mib_over_base", "ratio_to_ours"
    judge(FAST, "time of trl_selective / ours", ratio, "trl_selective", 10, at_least=True)
    judge(FAST, "time of liger_grpo / ours", ratio, "liger_grpo", 8, at_least=True)
    judge(FAST, "time of rows_selected / ours", ratio, "rows_selected", 1.15, at_least=True)
    judge(FAST, "memory of ours / rows_selected", memory, "rows_selected", 0.60)
    judge(FAST, "memory of ours / eager", memory, "eager", 0.15)
    judge(WHOLE, "time of eager / ours", ratio, "eager", 1.0, at_least=True)
    judge(WHOLE, "memory of ours / eager", memory, "eager", 0.25)
    judge(LARGE, "MiB of ours, gradient of the weight included", memory, "ours", 1e9 / (1 << 20))
    return lines


def _find(rows: list[Row], case: HeadCase, provider: str, column: str) -> float | None:
    """The last such value, None where it was not measured."""
    wanted = {**case.columns, "provider": provider}
    values = [row.get(column) for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    found = [value for value in values if value not in (None, "")]
    return float(str(found[-1])) if found else None
