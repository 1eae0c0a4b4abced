"""`-m --trials N`: optuna proposes the next job from the results so far (its ask-and-tell interface).

a,b and choice(a,b) are categories; range(start,stop,step) are numbers on a grid; interval(low,high) are numbers
between, tag(log,interval(low,high)) on a logarithmic scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from swe_rl.cli.sweep_jobs import Job, Jobs
from swe_rl.cli.sweep_table import metric_of, row_of
from swe_rl.errors import ConfigError


class Search:
    """A source of jobs. What ended before is told to a new study, what was running is run again."""

    def __init__(
        self,
        fixed: Sequence[str],
        swept: Sequence[Any],
        *,
        trials: int,
        metric: str,
        check: Callable[[Sequence[str]], Any],
    ) -> None:
        """swept: Hydra's parsed overrides. Raises ConfigError without optuna or without anything to choose."""
        try:
            import optuna
        except ImportError as err:
            raise ConfigError("--trials needs optuna: pip install 'swe-rl[sweep]'") from err
        if not swept:
            raise ConfigError("--trials has nothing to choose: give values such as seed=1,2 or x=interval(0,1)")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._fixed, self._trials, self._metric, self._check = optuna, list(fixed), trials, metric, check
        self._space = {item.get_key_element(): _distribution(item, optuna.distributions) for item in swept}
        self._study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
        self._asked: dict[int, Any] = {}  # job number -> trial
        self._again: list[Job] = []

    def attach(self, jobs: Jobs) -> Search:
        """Begins with what an earlier process of the same sweep did."""
        self._jobs, self._next = jobs, len(jobs.known)
        for job in jobs.known:
            if job.exit_code == 0:
                self._tell_study(job, None)
            else:
                self._again.append(job)
        return self

    def ask(self) -> Job | None:
        if self._again:
            return self._again.pop(0)
        if self._next >= self._trials:
            return None
        trial = self._study.ask(self._space)
        swept = {key: _word(value) for key, value in trial.params.items()}
        job = self._jobs.make(self._next, [*self._fixed, *(f"{key}={value}" for key, value in swept.items())], swept)
        self._check(job.overrides)
        self._asked[job.number] = trial
        self._next += 1
        return job

    def tell(self, job: Job) -> None:
        self._tell_study(job, self._asked.pop(job.number, None))

    def _tell_study(self, job: Job, trial: Any) -> None:
        """A job that failed, or has no such result, counts as a failed trial: it says nothing about its neighbours."""
        value = metric_of(row_of(job), self._metric) if job.exit_code == 0 else None
        state = self._optuna.trial.TrialState
        if trial is not None:
            self._study.tell(trial, value, state=state.COMPLETE if value is not None else state.FAIL)
        elif value is not None:
            params = {key: _value(job.swept[key], self._space[key]) for key in self._space}
            made = self._optuna.trial.create_trial(params=params, distributions=self._space, value=value)
            self._study.add_trial(made)


def _distribution(override: Any, distributions: Any) -> Any:
    """The optuna distribution of one of Hydra's sweeps."""
    value = override.value()
    log = "log" in getattr(value, "tags", ())
    if override.is_interval_sweep():
        whole = isinstance(value.start, int) and isinstance(value.end, int)
        kind = distributions.IntDistribution if whole else distributions.FloatDistribution
        return kind(value.start, value.end, log=log)
    if override.is_range_sweep():
        points = list(value.range())
        whole = all(isinstance(point, int) for point in points)
        kind = distributions.IntDistribution if whole else distributions.FloatDistribution
        return kind(points[0], points[-1], step=value.step)
    return distributions.CategoricalDistribution(list(override.sweep_string_iterator()))


def _word(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _value(word: str, distribution: Any) -> Any:
    """The parameter behind a word of an earlier process."""
    if hasattr(distribution, "choices"):
        return word
    return int(word) if type(distribution).__name__.startswith("Int") else float(word)
