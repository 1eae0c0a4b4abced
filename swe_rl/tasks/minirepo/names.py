"""Identifier pools of the procedural family: short lower-case words, each fit to be one token of a small vocabulary.

The pools are disjoint from each other, from Python's keywords and builtins, and from the words of docstrings.
"""

from __future__ import annotations

FUNCTIONS = tuple(
    "bake bend blend brew carve chop clip coil crush drain draw drift dump feed fetch fill flip fold forge graft grind "
    "hoist join knit lift melt mend merge mix pack peel plot pour pull rinse roast scan sew sift slide spin split "
    "stack stir swap tidy trim weave weld".split()
)
# By placeholder of a template: parameters A and B, locals X, Y, Z, I. Each role has words of its own, so that a policy
# of a million parameters can learn within minutes which name in its context plays which role.
VARIABLES = {
    "A": tuple("band base bond cell core cost disk edge".split()),
    "B": tuple("form fuse gate grid lamp lead link load".split()),
    "X": tuple("mark mesh node page".split()),
    "Y": tuple("path rank road root".split()),
    "Z": tuple("seed shop slot span".split()),
    "I": tuple("tick tile tone unit".split()),
}
MODULES = tuple("bench board cabin depot dock field forest garage harbor house kiln mill port shed shelf yard".split())
PACKAGES = tuple("amber birch cedar coral ember flint ivory jade lotus maple onyx pearl".split())
