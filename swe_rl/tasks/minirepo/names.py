"""Identifier pools of the procedural family: short lower-case words, each fit to be one token of a small vocabulary.

The pools are disjoint from each other, from Python's keywords and builtins, and from the words of docstrings.
"""

from __future__ import annotations

FUNCTIONS = tuple(
    "bake bend blend brew carve chop clip coil crush drain draw drift dump feed fetch fill flip fold forge graft grind "
    "hoist join knit lift melt mend merge mix pack peel plot pour pull rinse roast scan sew sift slide spin split "
    "stack stir swap tidy trim weave weld".split()
)
VARIABLES = tuple(
    "band base bond cell coin cost disk edge form fuse gate grid lamp lead link load mark mesh node page path rank "
    "road root row seed shop slot span tick tile tone unit wand wing zone".split()
)
MODULES = tuple("bench board cabin depot dock field forest garage harbor house kiln mill port shed shelf yard".split())
PACKAGES = tuple("amber birch cedar coral ember flint ivory jade lotus maple onyx pearl".split())
