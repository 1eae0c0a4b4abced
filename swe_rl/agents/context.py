"""The ids that the policy sees, turn after turn: all of them, or with old observations or old thoughts left out.

Leaving out breaks the rule that the context only grows. The turn at which that happens says so (`Turn.kept_context`);
batching begins a new sample there, in which all earlier tokens are context, so each sampled token trains exactly once,
under the context that it was sampled in. Sampled ids are copied, never rendered again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swe_rl.agents.rendering import Renderer
from swe_rl.config import AgentConfig
from swe_rl.errors import InvariantError
from swe_rl.types import Turn

_NOTE = "(this output was left out, because it is old: {lines} lines)"


@dataclass(frozen=True, slots=True)
class Delta:
    """What a turn adds to the context."""

    ids: list[int]
    kept: int | None = None  # None: it is appended to all; else to the first `kept` ids only


@dataclass(slots=True)
class _Observation:
    """Where the observation of a turn is in the context."""

    start: int
    end: int
    text: str
    closed: bool  # the completion before it ended with the stop token


@dataclass(slots=True)
class Context:
    """`observation` makes the delta of a turn, `append` puts it into `ids`."""

    renderer: Renderer
    limits: AgentConfig
    ids: list[int] = field(default_factory=list)  # all that the policy sees
    _observations: list[_Observation] = field(default_factory=list)
    _num_old: int = 0  # so many of them, from the first on, have left the context

    @classmethod
    def after(cls, renderer: Renderer, limits: AgentConfig, turns: list[Turn]) -> Context:
        """The context after `turns`, whose last observation is still to come.

        Raises InvariantError when other limits or another tokenizer made them.
        """
        context = cls(renderer, limits)
        for number, turn in enumerate(turns):
            delta = Delta(turn.context_ids, turn.kept_context)
            if number:
                before = turns[number - 1]
                if context.observation(before.observation, before.completion.token_ids) != delta:
                    raise InvariantError(f"turn {number} has another context than these limits and this renderer give")
            context.append(delta)
            context.ids += turn.completion.token_ids
        return context

    def observation(self, text: str, sampled: list[int]) -> Delta:
        """The delta that shows `text` after the completion `sampled`, which is the end of `ids`.

        What the renderer does not keep of the completion (thoughts, for some templates) leaves `ids` here.
        """
        remaining, before = self.renderer.history(sampled), len(self.ids) - len(sampled)
        self.ids[before:] = remaining
        closed = self.renderer.is_closed(remaining)
        delta = self.renderer.observation_ids(text, closed=closed)
        start = len(self.ids)
        self._observations.append(_Observation(start, start + len(delta), text, closed))
        keep = self.limits.keep_observations
        if keep and start + len(delta) > self.limits.drop_from_tokens:
            found = self._without_old(delta, keep)
        else:
            found = Delta(delta)
        if found.kept is None and remaining != sampled:
            return Delta([*remaining, *delta], before)
        return found

    def append(self, delta: Delta) -> None:
        """Makes a delta part of the context."""
        if delta.kept is not None:
            del self.ids[delta.kept :]
        self.ids += delta.ids

    def _without_old(self, delta: list[int], keep: int) -> Delta:
        """`delta` with a note in place of every observation but the last `keep`, where the note is shorter."""
        changed: list[tuple[_Observation, list[int]]] = []
        for seen in self._observations[self._num_old : -keep]:
            note = _NOTE.format(lines=seen.text.count("\n") + 1)
            ids = self.renderer.observation_ids(note, closed=seen.closed)
            if len(ids) < seen.end - seen.start:
                changed.append((seen, ids))
        self._num_old = max(self._num_old, len(self._observations) - keep)
        if not changed:
            return Delta(delta)
        whole, kept = [*self.ids, *delta], changed[0][0].start
        for seen, ids in reversed(changed):
            whole[seen.start : seen.end] = ids
        self._move(changed)
        return Delta(whole[kept:], kept)

    def _move(self, changed: list[tuple[_Observation, list[int]]]) -> None:
        """Corrects the places of all observations after some became shorter."""
        lengths = {id(seen): len(ids) for seen, ids in changed}
        shift = 0
        for seen in self._observations:
            length = lengths.get(id(seen), seen.end - seen.start)
            shrink = (seen.end - seen.start) - length
            seen.start -= shift
            seen.end = seen.start + length
            shift += shrink
