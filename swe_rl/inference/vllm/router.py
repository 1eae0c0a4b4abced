"""Which replica serves a session: the one that has its prefix, unless that is much busier than another one."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Router:
    """Counts requests under way per replica. A session stays at its home, where the blocks of its prefix are cached;
    it moves (an escape) when home has `max_skew` requests more than the least busy replica, or is gone."""

    num_replicas: int
    max_skew: int
    escapes: int = 0
    running: list[int] = field(default_factory=list)  # requests per replica
    usable: list[bool] = field(default_factory=list)
    _homes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.running = [0] * self.num_replicas
        self.usable = [False] * self.num_replicas

    def take(self, session: str) -> int | None:
        """The replica for the session's next request, counted as running there until `give_back`; None when none is
        usable."""
        usable = [index for index in range(self.num_replicas) if self.usable[index]]
        if not usable:
            return None
        # Of equally busy ones that with the fewest homes: the sessions of a step begin before any request is counted.
        homes = list(self._homes.values())
        least = min(usable, key=lambda index: (self.running[index], homes.count(index), index))
        home = self._homes.get(session)
        if home is None:
            home = self._homes[session] = least
        elif not self.usable[home] or self.running[home] - self.running[least] >= self.max_skew:
            self.escapes += home != least
            home = self._homes[session] = least
        self.running[home] += 1
        return home

    def give_back(self, replica: int) -> None:
        """A request taken there is over."""
        self.running[replica] -= 1

    def forget(self, session: str) -> None:
        """The session is over. Idempotent."""
        self._homes.pop(session, None)
