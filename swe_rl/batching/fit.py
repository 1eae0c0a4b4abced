"""Which samples of a forest stand in one packed row: trees are cut where little is repeated, and rows are filled.

Samples are named by their place k in the forest; lengths[k] is their number of tokens, shared[k] those they have in
common with the sample before (ops.trie). In a row a sample needs no more room than what it does not share with its
neighbours there; a tree on several rows repeats the paths to its parts.
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from swe_rl.ops import trie

FINE = 8  # finer pieces have at most this part of a row
GOOD_FILL = 0.95  # of the rows: no finer pieces are tried
MAX_REPEATED = 1.02  # finer pieces may cost so many times the tokens, if they save a row


@dataclass(frozen=True, slots=True)
class Piece:
    """Samples [start, stop) of one tree."""

    start: int
    stop: int
    tokens: int  # alone in a row


@dataclass(slots=True)
class _Row:
    room: int
    pieces: list[Piece] = field(default_factory=list)  # by start


def fit(lengths: Sequence[int], shared: Sequence[int], *, max_tokens: int, impl: str = "auto") -> list[list[int]]:
    """The samples of each row, rising; at most `max_tokens` per row, unless one sample is longer.

    First-fit-decreasing of the largest pieces that fit into a row. Where that leaves rows badly filled, of finer
    pieces as well, those of a tree one after the other and preferably to where their path is already: taken if it saves
    a row for few repeated tokens.
    """
    pieces = cut(lengths, shared, max_tokens=max_tokens)
    chosen = trie.first_fit([piece.tokens for piece in pieces], max_tokens, impl=impl)
    whole = [_places(pieces[i] for i in row) for row in chosen]
    tokens = sum(piece.tokens for piece in pieces)
    if tokens >= GOOD_FILL * len(whole) * max_tokens or len(whole) == -(-tokens // max_tokens):
        return whole
    fine = _beside_their_path(cut(lengths, shared, max_tokens=-(-max_tokens // FINE)), shared, max_tokens=max_tokens)
    repeated = sum(lengths[k] - low for row in fine for k, low in zip(row, shared_in_row(row, shared), strict=True))
    return fine if len(fine) < len(whole) and repeated <= MAX_REPEATED * tokens else whole


def shared_in_row(row: Sequence[int], shared: Sequence[int]) -> list[int]:
    """What each sample of a row (places, rising) shares with the one before it there."""
    return [0, *(min(shared[before + 1 : place + 1]) for before, place in pairwise(row))] if row else []


def _places(pieces: Iterator[Piece]) -> list[int]:
    ordered = sorted(pieces, key=lambda piece: piece.start)
    return [place for piece in ordered for place in range(piece.start, piece.stop)]


def _beside_their_path(pieces: Sequence[Piece], shared: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Trees with the most tokens first, the largest pieces of each first: to the row where a piece needs the least, the
    first of several."""
    roots = list(accumulate(low == 0 for low in shared))  # number of the tree of each sample
    sizes: Counter[int] = Counter()
    for piece in pieces:
        sizes[roots[piece.start]] += piece.tokens
    rows: list[_Row] = []
    having: dict[int, list[int]] = {}  # tree -> rows with a piece of it
    for piece in sorted(pieces, key=lambda p: (-sizes[roots[p.start]], roots[p.start], -p.tokens)):
        tree = roots[piece.start]
        needs = [(_needed(rows[r].pieces, piece, shared), r) for r in having.get(tree, ())]
        options = [(need, r) for need, r in needs if need <= rows[r].room]
        free = next((r for r, row in enumerate(rows) if piece.tokens <= row.room), len(rows))
        need, place = min(options, default=(piece.tokens, free))
        if place == len(rows):
            rows.append(_Row(max(max_tokens, piece.tokens)))
        rows[place].room -= need
        bisect.insort(rows[place].pieces, piece, key=lambda p: p.start)
        if place not in having.setdefault(tree, []):
            having[tree].append(place)
    return [_places(iter(row.pieces)) for row in rows]


def _needed(pieces: Sequence[Piece], piece: Piece, shared: Sequence[int]) -> int:
    """Tokens that `piece` adds to a row that has `pieces`."""
    place = bisect.bisect([p.start for p in pieces], piece.start)
    before = pieces[place - 1].stop if place else None
    after = pieces[place].start if place < len(pieces) else None
    shares = [min(shared[before : piece.start + 1])] if before is not None else []
    shares += [min(shared[piece.stop : after + 1])] if after is not None else []
    both = min(shared[before : after + 1]) if before is not None and after is not None else 0
    return piece.tokens - sum(shares) + both  # what its neighbours share with one another was counted before


def cut(lengths: Sequence[int], shared: Sequence[int], *, max_tokens: int) -> list[Piece]:
    """Pieces of at most `max_tokens` (or one sample), so that what later pieces repeat is least, and then the fewest.

    lengths and shared of the samples of a forest, in its order. A cut before sample k repeats shared[k] tokens, so the
    best sum over cuts follows from the best sums before; the samples that fit together with the last are a window that
    only moves on.
    """
    new = [0, *accumulate(length - kept for length, kept in zip(lengths, shared, strict=True))]
    best: list[tuple[int, int, int]] = [(0, 0, 0)]  # of the first k samples: repeated tokens, pieces, last one's start
    window: deque[int] = deque()  # starts of the last piece that may be best, by their sums
    for k in range(len(lengths)):
        if not shared[k]:
            window.clear()  # a tree begins, and a piece with it: joining trees is the packer's work
        candidate = (best[k][0] + shared[k], best[k][1] + 1)
        while window and _begun(best, shared, window[-1]) > candidate:
            window.pop()
        window.append(k)
        while window[0] < k and new[k + 1] - new[window[0]] + shared[window[0]] > max_tokens:
            window.popleft()
        best.append((*_begun(best, shared, window[0]), window[0]))
    pieces: list[Piece] = []
    stop = len(lengths)
    while stop:
        start = best[stop][2]
        pieces.append(Piece(start, stop, new[stop] - new[start] + shared[start]))
        stop = start
    return pieces[::-1]


def _begun(best: Sequence[tuple[int, int, int]], shared: Sequence[int], start: int) -> tuple[int, int]:
    return best[start][0] + shared[start], best[start][1] + 1
