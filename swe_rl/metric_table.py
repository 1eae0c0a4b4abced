"""Every metric of training by name, unit and reduction: the one place that says what a number means.

`reduction` is how it is made of raw values over all ranks; `over_steps` how the optimiser steps of one iteration are
put together. `swe-rl report --metrics` prints the table. Names with * stand for one metric each per member of a family.
Those of train/* are over the tokens of an optimiser step that were computed: not over rollouts without a gradient
(training.step_batches.with_gradient), whose advantages of 0 are in no mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

OverSteps = Literal["mean", "sum", "max"]
TOKENS = "mean over trained tokens"
SUM = "sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    unit: str
    reduction: str
    meaning: str
    over_steps: OverSteps = "mean"


def _m(name: str, unit: str, reduction: str, meaning: str, over_steps: OverSteps = "mean") -> Metric:
    return Metric(name=name, unit=unit, reduction=reduction, meaning=meaning, over_steps=over_steps)


METRICS: tuple[Metric, ...] = (
    _m("eval/success", "share", "over all ranks", "pass@1 beside training (eval.every), by split and mode"),
    _m("eval/stderr", "share", "clustered by task", "its standard error"),
    _m("train/loss", "loss", "sum of weighted tokens", "the loss that was differentiated"),
    _m("train/grad_norm", "norm", "of the global gradient", "before clipping; the model, without a value head"),
    _m("grad_norm/*", "norm", "of the global gradient", "of one kind of module, before clipping"),
    _m("train/skipped", "steps", "same on all ranks", "1: no trained token, or a gradient that is not finite", "sum"),
    _m("train/optimizer_steps", "steps", "same on all ranks", "optimiser steps of the iteration", "sum"),
    _m("train/entropy", "nats", TOKENS, "entropy of the policy"),
    _m("train/ratio_clip_frac", "share", TOKENS, "tokens whose gradient or weight the clip bounded"),
    _m("train/clip_frac_low", "share", TOKENS, "of them, with a ratio below 1"),
    _m("train/clip_frac_high", "share", TOKENS, "of them, with a ratio of 1 or more"),
    _m("train/ratio_mean", "ratio", TOKENS, "p / p_old as the rule uses it (GSPO: of the sequence)"),
    _m("train/ratio_max", "ratio", "max over trained tokens", "largest of them", "max"),
    _m("train/kl_rollout", "nats", TOKENS, "K1 = -log w, w = p_old / p_engine, raw; bypass: p_now / p_engine"),
    _m("train/mismatch_k2", "nats", TOKENS, "K2 = (log w)^2 / 2"),
    _m("train/mismatch_k3", "nats", TOKENS, "K3 = w - 1 - log w"),
    _m("train/mismatch_ess", "share", "(sum w)^2 / (n sum w^2)", "effective sample size of the mismatch weights"),
    _m("train/mismatch_rejected", "rollouts", SUM, "rollouts that a sequence correction rejected", "sum"),
    _m("train/logprob_abs_diff", "nats", TOKENS, "|trainer - engine| logprob, of the weights at hand"),
    _m("train/logprob_abs_diff_max", "nats", "max over trained tokens", "largest of them", "max"),
    _m("train/advantage_mean", "reward", TOKENS, "first moment of the advantages"),
    _m("train/advantage_std", "reward", "population, trained tokens", "second moment, centred"),
    _m("train/kl_ref", "nats", TOKENS, "K3 of policy and reference"),
    _m("train/value_error", "reward^2", "mean over turns", "squared error of the value head"),
    _m("train/value_explained_variance", "share", "mean over turns", "1 - error / variance of the targets"),
    _m("train/num_loss_tokens", "tokens", SUM, "trained tokens of rollouts with a gradient", "sum"),
    _m("train/num_tokens", "tokens", SUM, "all tokens of the packed rows", "sum"),
    _m("train/tree_token_ratio", "ratio", "sum / sum", "tokens of the samples one by one / computed (batching.layout)"),
    _m("train/context_split_frac", "share", "sum / sum", "tokens in rows that several ranks compute together"),
    _m("train/tokens_per_s", "tokens/s", "sum / time of a step", "speed of the trainer"),
    _m("train/peak_memory_bytes", "bytes", "of rank 0", "largest device allocation, or resident size on a CPU", "max"),
    _m("rollout/reward_mean", "reward", "mean over graded rollouts", "as graded, untested ones as 0"),
    _m("rollout/success", "share", "mean over tested rollouts", "hidden tests pass"),
    _m("rollout/num_turns_mean", "turns", "mean over rollouts", "length of episodes"),
    _m("rollout/num_turns_passed", "turns", "mean over passed rollouts", "length of episodes that succeeded"),
    _m("rollout/num_turns_failed", "turns", "mean over failed rollouts", "length of episodes that did not"),
    _m("rollout/num_tokens_mean", "tokens", "mean over rollouts", "context and sampled"),
    _m("rollout/sampled_tokens_passed", "tokens", "mean over passed rollouts", "sampled tokens of those"),
    _m("rollout/sampled_tokens_failed", "tokens", "mean over failed rollouts", "sampled tokens of those"),
    _m("rollout/format_error_rate", "share", "mean over turns", "turns that could not be parsed"),
    _m("rollout/solve_none", "groups", SUM, "groups nobody solved"),
    _m("rollout/solve_all", "groups", SUM, "groups everybody solved"),
    _m("rollout/solve_partial", "groups", SUM, "groups with both"),
    _m("rollout/uniform", "groups", SUM, "groups whose members are all worth the same: no signal"),
    _m("rollout/singleton", "groups", SUM, "groups with one member left"),
    _m("rollout/refilled", "groups", SUM, "groups sampled in place of uniform ones"),
    _m("rollout/refill_rounds", "rounds", "same on all ranks", "rounds of such sampling"),
    _m("rollout/masked", "rollouts", SUM, "kept in their group, without a trained token"),
    _m("rollout/dropped", "rollouts", SUM, "taken out of their group by the stop-reason map"),
    _m("rollout/unscored", "rollouts", SUM, "without a finite reward, taken out"),
    _m("rollout/untested", "rollouts", SUM, "reward 0 without a test run (run_tests_on_filtered=false)"),
    _m("rollout/tampered", "rollouts", SUM, "parts of the patch dropped with blame, or forged results"),
    _m("rollout/flaky", "rollouts", SUM, "graded twice with different answers: swe-rl tasks gate finds such tasks"),
    _m("rollout/filtered_*", "rollouts", SUM, "masked or dropped, by stop reason"),
    _m("rollout/lost", "rollouts", SUM, "lost to trouble of the machine, replaced"),
    _m("rollout/retried", "attempts", SUM, "attempts repeated for trouble of the machine"),
    _m("rollout/cut", "rollouts", SUM, "spare rollouts that were still running when their group was full"),
    _m("rollout/cut_share", "share", "cut / started", "how much of the sampling was thrown away"),
    _m("rollout/kept_s", "seconds", "mean over kept rollouts", "duration of the episodes that were kept"),
    _m("rollout/cut_s", "seconds", "mean over cut rollouts", "how long the cut ones had run: their duration is more"),
    _m("rollout/short_bias", "ratio", "mean kept / mean started", "below 1: spare rollouts favour short episodes"),
    _m("rollout/num_trajectories", "rollouts", SUM, "of rejection fine-tuning: attempts"),
    _m("rollout/num_passed", "rollouts", SUM, "of rejection fine-tuning: attempts that passed"),
    _m("verifier/score", "share", "mean over judged rollouts", "what the verifier of the reward thinks of them"),
    _m("verifier/gap", "share", "mean score - share solved", "that it grows is a sign of a hacked verifier"),
    _m("verifier/score_failed", "share", "mean over failed rollouts", "what the verifier thinks of those"),
    _m("verifier/gap_growth", "share", "last steps - first steps", "of the gap, means over five steps each"),
    _m("verifier/hacking", "alarm", "same on all ranks", "1: the gap and the score of failed rollouts have grown"),
    _m("verifier/num_*", "attempts", SUM, "what a verifier's data was built from"),
    _m("rft/num_masked_turns", "turns", SUM, "turns of kept attempts that could not be parsed: they do not train"),
    _m("rft/num_tasks_kept", "tasks", SUM, "tasks with an attempt that was kept"),
    _m("rft/num_*", "rollouts", SUM, "attempts left out, or kept, by the selection"),
    _m("sandbox/*_ms_p50", "ms", "of the counts of all ranks", "median latency of an operation"),
    _m("sandbox/*_ms_p95", "ms", "of the counts of all ranks", "95th percentile of it"),
    _m("sandbox/warm_share", "share", "warm / all leases", "leases that found their sandbox started"),
    _m("sandbox/*_bytes", "bytes", SUM, "what commands wrote"),
    _m("sandbox/egress_opened", "connections", SUM, "of sandboxes that ended: to a listed host, made"),
    _m("sandbox/egress_refused", "connections", SUM, "of them: to a host or address that is not listed"),
    _m("sandbox/egress_unreached", "connections", SUM, "of them: to a listed host that did not answer"),
    _m("sandbox/*", "count", SUM, "leases, starts, ends, outcomes of commands"),
    _m("stop_reason/*", "rollouts", SUM, "endings of episodes"),
    _m("sync/seconds", "seconds", "of rank 0", "bringing the engines to the new weights"),
    _m("sync/bytes", "bytes", SUM, "weights that were sent for the last update"),
    _m("sync/byte_share", "share", "sent / sent as a whole", "how much of a full update that is"),
    _m("sync/changed_share", "share", "changed / all", "values that differ from the version before, after rounding"),
    _m("sync/resync", "updates", "same on all ranks", "1: everything was sent because an engine had lost a version"),
    _m("engine/tokens_per_s", "tokens/s", SUM, "sampled tokens while the iteration was collected"),
    _m("engine/*", "count", SUM, "counters of the engine since the process started"),
)


def metric_of(name: str) -> Metric | None:
    """The entry of a metric, an exact name before a family; None for one that the table does not know."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if fnmatchcase(name, metric.name)), None)


def combine_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of the optimiser steps of one iteration as one: a maximum stays a maximum, a count is summed.

    A metric that only some steps have is combined over those. Raises KeyError for a name that is not in the table.
    """
    names = dict.fromkeys(name for values in steps for name in values)
    combined: dict[str, float] = {}
    for name in names:
        metric, found = metric_of(name), [values[name] for values in steps if name in values]
        if metric is None:
            raise KeyError(f"metric {name!r} is not in metric_table.py")
        total = math.fsum(found)
        combined[name] = {"mean": total / len(found), "sum": total, "max": max(found)}[metric.over_steps]
    return combined


def metric_table() -> str:
    """The table as Markdown."""
    head = ("metric", "unit", "reduction over ranks", "over the steps of an iteration", "meaning")
    rows = [(m.name, m.unit, m.reduction, m.over_steps, m.meaning) for m in METRICS]
    lines = ["| " + " | ".join(row) + " |" for row in (head, tuple("---" for _ in head), *rows)]
    return "\n".join(lines)
