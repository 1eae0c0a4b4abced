"""Function templates of the procedural family, in the normal form of ast.unparse.

F is the function, A and B its parameters, X, Y, Z, I locals, K and L constants. Every name and constant is drawn anew
for each task; the docstring states the whole behaviour, constants included, so that the right body can be derived
from it. Loops are bounded by their input, hence every mutant ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ArgumentKind = Literal["numbers", "number", "index", "word"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    name: str
    source: str
    arguments: tuple[ArgumentKind, ...]
    k_range: tuple[int, int] = (3, 8)  # of constant K, both ends inclusive
    l_range: tuple[int, int] = (10, 14)  # of constant L


STANDARD: tuple[Template, ...] = (
    Template(
        name="count",
        arguments=("numbers",),
        source='''def F(A):
    """Count items of A above K, without the first."""
    X = 0
    for Y in A[1:]:
        if Y > K:
            X += 1
    return X''',
    ),
    Template(
        name="total",
        arguments=("numbers", "index"),
        source='''def F(A, B):
    """Sum items of A from index B that are at most K."""
    X = 0
    for Y in A[B:]:
        if Y <= K:
            X += Y
    return X''',
    ),
    Template(
        name="price",
        arguments=("number", "number"),
        source='''def F(A, B):
    """A times B, minus K if A is at least L."""
    X = A * B
    if A >= L:
        X = X - K
    return X''',
        l_range=(4, 7),
    ),
    Template(
        name="largest",
        arguments=("numbers",),
        source='''def F(A):
    """Largest item of A after the first, at least 0, plus K."""
    X = 0
    for Y in A[1:]:
        if Y > X:
            X = Y
    return X + K''',
    ),
    Template(
        name="rises",
        arguments=("numbers",),
        source='''def F(A):
    """Count steps in A that rise by at least K."""
    X = 0
    for I in range(1, len(A)):
        if A[I] - A[I - 1] >= K:
            X += 1
    return X''',
        k_range=(2, 5),
    ),
    Template(
        name="windows",
        arguments=("numbers", "number"),
        source='''def F(A, B):
    """Sums of K neighbours in A below B, each plus L."""
    X = []
    for I in range(len(A) - K + 1):
        Y = sum(A[I:I + K])
        if Y < B:
            X.append(Y + L)
    return X''',
        k_range=(2, 3),
        l_range=(3, 9),
    ),
    Template(
        name="wrap",
        arguments=("number", "number"),
        source='''def F(A, B):
    """Remainder of A by K, plus B if it is below L."""
    X = A % K
    if X < L:
        X += B
    return X''',
        k_range=(6, 9),
        l_range=(2, 5),
    ),
    Template(
        name="find",
        arguments=("numbers", "index"),
        source='''def F(A, B):
    """Index plus K of the first item above L in A from index B, else 0."""
    for I in range(B, len(A)):
        if A[I] > L:
            return I + K
    return 0''',
        k_range=(2, 6),
        l_range=(3, 8),
    ),
    Template(
        name="shorten",
        arguments=("word",),
        source='''def F(A):
    """First K letters of A and a dot if A is longer, else A."""
    if len(A) > K:
        return A[:K] + '.'
    return A''',
        k_range=(2, 5),
    ),
    Template(
        name="stride",
        arguments=("numbers", "index"),
        source='''def F(A, B):
    """Sum items above L at index B of A and every K on."""
    X = 0
    for I in range(B, len(A), K):
        if A[I] > L:
            X += A[I]
    return X''',
        k_range=(2, 3),
        l_range=(2, 6),
    ),
    Template(
        name="weigh",
        arguments=("numbers",),
        source='''def F(A):
    """Sum of item times index over items of A at least K."""
    X = 0
    for I in range(len(A)):
        if A[I] >= K:
            X += A[I] * I
    return X''',
    ),
    Template(
        name="tally",
        arguments=("numbers",),
        source='''def F(A):
    """Map items of A above K, without the first, to their count."""
    X = {}
    for Y in A[1:]:
        if Y > K:
            X[Y] = X.get(Y, 0) + 1
    return X''',
    ),
    Template(
        name="levels",
        arguments=("number", "number"),
        source='''def F(A, B):
    """B if A is below K, A minus B if A is below L, else A."""
    if A < K:
        return B
    if A < L:
        return A - B
    return A''',
        k_range=(2, 5),
        l_range=(7, 11),
    ),
    Template(
        name="running",
        arguments=("numbers",),
        source='''def F(A):
    """Running sums of A, without the first; after K or more the next is 0."""
    X = 0
    Z = []
    for Y in A[1:]:
        X = X + Y if X < K else 0
        Z.append(X)
    return Z''',
        k_range=(5, 14),
    ),
    Template(
        name="longest",
        arguments=("numbers",),
        source='''def F(A):
    """Longest run of items above K in A, without the last."""
    X = 0
    Z = 0
    for Y in A[:-1]:
        Z = Z + 1 if Y > K else 0
        X = max(X, Z)
    return X''',
    ),
    Template(
        name="dot",
        arguments=("numbers", "numbers"),
        source='''def F(A, B):
    """Sum of products of A and B, without the first, at least K each."""
    X = 0
    for Y, Z in zip(A[1:], B[1:]):
        if Y * Z >= K:
            X += Y * Z
    return X''',
        k_range=(4, 16),
    ),
)

HARD: tuple[Template, ...] = (
    Template(
        name="mean",
        arguments=("numbers",),
        source='''def F(A):
    """Mean of A rounded down, plus L; K if A has under 2 items."""
    if len(A) < 2:
        return K
    return sum(A) // len(A) + L''',
        l_range=(2, 6),
    ),
    Template(
        name="rotate",
        arguments=("numbers",),
        source='''def F(A):
    """Move the first K items of A to the end if A has over L items."""
    if len(A) > L:
        return A[K:] + A[:K]
    return A''',
        k_range=(1, 3),
        l_range=(3, 4),
    ),
    Template(
        name="mirror",
        arguments=("numbers",),
        source='''def F(A):
    """Count items of A over K away from their mirror item."""
    X = 0
    for I in range(len(A)):
        if abs(A[I] - A[-1 - I]) > K:
            X += 1
    return X''',
        k_range=(2, 5),
    ),
    Template(
        name="pairs",
        arguments=("numbers",),
        source='''def F(A):
    """Count pairs of items in A with a sum of at most K."""
    X = 0
    for I in range(len(A)):
        for Y in A[I + 1:]:
            if A[I] + Y <= K:
                X += 1
    return X''',
        k_range=(6, 12),
    ),
    Template(
        name="squeeze",
        arguments=("numbers",),
        source='''def F(A):
    """Keep the first item of A, then those over K above the last kept."""
    X = A[:1]
    for Y in A[1:]:
        if Y > X[-1] + K:
            X.append(Y)
    return X''',
        k_range=(1, 3),
    ),
    Template(
        name="inside",
        arguments=("numbers", "number"),
        source='''def F(A, B):
    """Count items of A from B up to B plus K, or equal to L."""
    X = 0
    for Y in A:
        if Y >= B and Y <= B + K or Y == L:
            X += 1
    return X''',
        k_range=(2, 4),
    ),
    Template(
        name="zigzag",
        arguments=("numbers", "number"),
        source='''def F(A, B):
    """Sum items of A, those at odd index or above B minus K."""
    X = 0
    for I in range(len(A)):
        if I % 2 == 1 or A[I] > B:
            X -= K
        X += A[I]
    return X''',
    ),
    Template(
        name="boxes",
        arguments=("number", "number"),
        source='''def F(A, B):
    """Boxes of K for A and B units, plus 1 if A is above L and B is not 0."""
    X = (A + B + K - 1) // K
    if A > L and B != 0:
        X += 1
    return X''',
        k_range=(2, 5),
        l_range=(3, 8),
    ),
)
