"""Scores by other weights than those of the moment: of the reference policy, and of a batch's own sampling policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from swe_rl.errors import InvariantError
from swe_rl.types import PackedBatch


class ReferenceScores(ABC):
    """The part of a trainer backend that swaps weights. `masters` has snapshot() and restore(); `reference` is a
    snapshot, or None in phases without a KL term."""

    masters: Any
    reference: Any

    @abstractmethod
    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """[T] fp32 per batch, by the present weights."""

    def ref_logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """As `logprobs`, by the reference policy: the weights that the phase began with."""
        with self._reference_weights():
            return self.logprobs(batches)

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        if self.reference is None:
            raise InvariantError("this phase has no reference policy: algo.kl_coeff is 0")
        now = self.masters.snapshot()
        self.masters.restore(self.reference)
        try:
            yield
        finally:
            self.masters.restore(now)

    def score_old(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """The batches with old_logprobs from the current weights: needed when a batch sees several optimiser steps."""
        return [replace(b, old_logprobs=s) for b, s in zip(batches, self.logprobs(batches), strict=True)]
