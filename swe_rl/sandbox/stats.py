"""What sandboxes did, as plain counters: they add up over sandboxes, nodes and ranks, and turn into metrics at the end.

A latency is counted into buckets ("local_exec_ms/7" is the eighth bucket), so that percentiles are of all nodes
together. Names without a slash are counts or sums.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping

# Upper ends of the buckets in milliseconds; one more bucket is open above the last.
BUCKETS_MS = (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 100, 150, 250, 400, 700, 1e3, 2e3, 5e3, 1e4, 3e4, 6e4)
_QUANTILES = {"p50": 0.5, "p95": 0.95}


def observe(counts: Counter[str], name: str, seconds: float) -> None:
    """Counts one latency under "NAME_ms"."""
    counts[f"{name}_ms/{bisect.bisect_left(BUCKETS_MS, seconds * 1e3)}"] += 1


def quantile_ms(counts: Mapping[str, float], name: str, q: float) -> float:
    """Milliseconds below which the share `q` of the latencies lies, linear within a bucket; nan without any."""
    filled = [counts.get(f"{name}_ms/{index}", 0) for index in range(len(BUCKETS_MS) + 1)]
    wanted, below = q * sum(filled), 0.0
    if not wanted:
        return float("nan")
    for index, number in enumerate(filled):
        if number and below + number >= wanted:
            low = BUCKETS_MS[index - 1] if index else 0.0
            high = BUCKETS_MS[min(index, len(BUCKETS_MS) - 1)]
            return low + (high - low) * (wanted - below) / number
        below += number
    return BUCKETS_MS[-1]


def sandbox_metrics(counts: Mapping[str, float]) -> dict[str, float]:
    """Metrics "sandbox/..." of counters: p50 and p95 of each latency, counts as they are, the share of warm leases."""
    latencies = sorted({name.split("_ms/")[0] for name in counts if "_ms/" in name})
    found = {
        f"sandbox/{name}_ms_{label}": quantile_ms(counts, name, q)
        for name in latencies
        for label, q in _QUANTILES.items()
    }
    found |= {f"sandbox/{name}": float(value) for name, value in counts.items() if "/" not in name}
    if leases := counts.get("leases", 0):
        found["sandbox/warm_share"] = counts.get("warm_leases", 0) / leases
    return found
