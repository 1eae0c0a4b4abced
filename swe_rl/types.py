"""The vocabulary of the system: one frozen record per stage of the data flow. Standard library only.

Letters: G group size, N tokens of a sample, T packed tokens of a row, S segments (documents) of a row.
Logprobs are natural logarithms, fp32, at the sampling temperature. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

TaskKind = Literal["bugfix", "feature", "refactor", "debug", "docs"]
# How test results decide, see tasks/pass_rules.py
PassRule = Literal[
    "strict", "f2p_p2p", "f2p_p2p_fail_only", "f2p_p2p_absent_ok", "all_passed", "exact_map", "reward_file"
]
Outcome = Literal["ok", "nonzero", "timeout", "oom", "pids_limit", "disk_full", "output_limit", "lost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One repository state, one issue text, and the hidden tests that decide whether a patch resolves it."""

    task_id: str  # unique over all sources
    source: str  # "minirepo", "pypi", ...
    split: str  # "train", "heldout", "hard", ...
    repo: str
    base_commit: str
    problem_statement: str  # states behaviour, never the fix
    fail_to_pass: tuple[str, ...]  # test ids "path/test_x.py::test_name"
    pass_to_pass: tuple[str, ...]
    gold_patch: bytes  # unified diff against `tree`; never shown to the agent
    tree: Mapping[str, bytes] = field(
        default_factory=dict, repr=False
    )  # base files by POSIX path; empty if `image` has them
    hidden_files: Mapping[str, bytes] = field(
        default_factory=dict, repr=False
    )  # written only when grading; by path relative to `workdir`, or absolute
    test_patch: bytes = field(default=b"", repr=False)  # the hidden tests as a diff, where they are not `hidden_files`
    test_files: tuple[str, ...] = ()  # files of the hidden tests, relative to `workdir`
    hidden_paths: tuple[str, ...] = ()  # tests that lie in the image: removed before the first action
    image: str = ""  # container image, empty for the local base root
    workdir: str = "/testbed"
    setup_cmd: str = ""  # run in the image before the first action, and before grading
    kind: TaskKind = "bugfix"
    test_runner: Literal["functions", "pytest", "script"] = "functions"  # see tasks/test_runner.py
    test_cmd: str = ""  # of "script": shell commands whose output `log_parser` reads
    log_parser: str = ""  # see tasks/test_logs.py
    pass_rule: PassRule = "strict"
    expected_status: Mapping[str, str] = field(default_factory=dict, repr=False)  # of "exact_map": test -> status
    timeout_s: float = 60.0  # limit of the hidden tests
    language: str = "python"
    created_at: str = ""  # ISO 8601, of the issue or its fix; "" when not known
    meta: Mapping[str, Any] = field(
        default_factory=dict, repr=False
    )  # source-specific extras (operator, difficulty, ...)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one sandbox; each is enforced inside it and has its own outcome."""

    command_s: float = 30.0
    cpus: float = 0.0  # processors' worth of time; 0: what the scheduler gives
    memory_bytes: int = 512 << 20
    pids: int = 64
    disk_bytes: int = 64 << 20  # bytes the sandbox may write (overlay upper and /tmp)
    output_bytes: int = 16 << 10  # head + tail kept per stream; the totals are reported
    output_kill_bytes: int = 64 << 20  # beyond this the command is killed: outcome "output_limit"
    lease_s: float = 3600.0  # after this the sandbox ends by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    backend: Literal["local", "docker", "kubernetes"] = "local"
    image: str = ""
    workdir: str = "/testbed"
    layers: tuple[str, ...] = ()  # host directories stacked read-only under `workdir`, uppermost first
    readonly_mounts: tuple[tuple[str, str], ...] = ()  # (host path, path inside)
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    network: Literal["none"] = "none"
    egress: tuple[str, ...] = ()  # "host:port" that may be reached all the same, through a proxy of the owner
    isolation: Literal["namespaces", "none"] = "namespaces"
    runtime: str = ""  # of containers: "runsc" for gVisor, whatever the engine knows; "" for its own choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    exit_code: int  # 128 + signal when killed
    stdout: bytes  # head and tail when longer than Limits.output_bytes
    stderr: bytes
    outcome: Outcome
    duration_s: float
    stdout_bytes: int  # produced in total
    stderr_bytes: int


class StopReason(StrEnum):
    """Why an episode ended. What each means for training is configuration (algo.stop_reasons)."""

    SUBMITTED = "submitted"
    ABSTAINED = "abstained"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # response budget of the episode used up
    CONTEXT_LIMIT = "context_limit"  # no room left in the model's context
    PROMPT_TOO_LONG = "prompt_too_long"
    TIMEOUT = "timeout"  # wall clock of the episode
    ENV_TIMEOUT = "env_timeout"
    OOM = "oom"
    ENV_KILLED = "env_killed"  # the agent's own command ended the sandbox
    FORMAT_ERROR = "format_error"  # too many unparsable actions in a row
    NO_TOOL_CALL = "no_tool_call"
    INFRA_ERROR = "infra_error"
    CANCELLED = "cancelled"

    @property
    def is_infra(self) -> bool:
        return self in (StopReason.INFRA_ERROR, StopReason.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    token_ids: list[int]  # [n] sampled ids, the stop token included when it was sampled
    rollout_logprobs: list[float]  # [n] of the sampled ids, by the engine that sampled them
    finish_reason: Literal["stop", "length", "cancelled"]
    policy_version: int  # weights that sampled the first token
    policy_version_max: int  # weights that sampled the last token
    routing: str = ""  # mixture of experts: who computed the tokens since the turn before; models.routing encodes it


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    name: str
    arguments: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    context_ids: list[int]  # tokens ADDED to the context since the last turn (the prompt, then observations)
    completion: Completion
    tool_call: ToolCall | None  # None after a format error
    observation: str  # text shown to the policy for this turn; "" after the last
    format_error: bool = False
    repaired: str = ""  # what the parser read although it was not quite right; "" when nothing
    # None: the context only grew. Else this turn left out something of it: the policy saw the first `kept_context` ids
    # of the turn before (prompt and sampled ids together), then `context_ids`. A new sample begins here.
    kept_context: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    value: float
    terms: Mapping[str, float] = field(default_factory=dict)  # summands and diagnostics by name
    tests_passed: int = 0
    tests_total: int = 0
    test_status: Mapping[str, str] = field(default_factory=dict)  # id -> passed | failed | error | missing

    @property
    def solved(self) -> bool:
        """Whether the hidden tests pass, whatever was added to the value or taken off it."""
        return self.terms.get("resolved", self.value) >= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    trajectory_id: str
    task_id: str
    group_id: str
    rollout_index: int  # place in the group, part of every seed
    turns: list[Turn]
    stop_reason: StopReason
    temperature: float
    detail: str = ""  # human-readable reason behind stop_reason
    patch: bytes | None = None
    reward: Reward | None = None  # None: not scored; never 0 for an outage
    timings_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        """All ids in the order in which they came up: context and sampled, [N]. One sequence unless a turn has
        `kept_context`."""
        return [i for turn in self.turns for i in (*turn.context_ids, *turn.completion.token_ids)]

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryGroup:
    group_id: str
    task_id: str
    trajectories: list[Trajectory]  # [G], may be smaller than configured after infrastructure losses
    dropped: str | None = None  # why the group carries no signal, else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSample:
    """One token sequence. Arrays are aligned to `input_ids`; the label shift happens in batching.pack."""

    trajectory_id: str
    input_ids: list[int]  # [N]
    loss_mask: list[bool]  # [N] True exactly on trained sampled tokens
    rollout_logprobs: list[float]  # [N], 0.0 where masked
    advantages: list[float]  # [N], 0.0 where masked
    turn_ids: list[int]  # [N] sampling event, -1 for context
    policy_version: int
    temperature: float
    token_weights: list[float] = field(default_factory=list)  # [N] filled by algorithms.token_weights
    # Each [N], or empty where the algorithm needs none:
    old_logprobs: list[float] = field(default_factory=list)  # by the trainer, before the first step on the batch
    ref_logprobs: list[float] = field(default_factory=list)  # by the reference policy
    sequence_coeff: list[float] = field(default_factory=list)  # factor of the policy term, from algorithms.sequences
    value_targets: list[float] = field(default_factory=list)  # on the first sampled token of a turn, NaN elsewhere
    value_weight: float = 0.0  # of each squared value error: 1 / their number over all ranks
    routing: list[str] = field(default_factory=list)  # of its turns: the experts that the engine chose, if it says so


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """One row of packed documents. Index t is label t everywhere: labels[t] is the token after input_ids[t].

    In a batch of trees (`target_rows` is given) that holds for E targets instead: everything but input_ids,
    position_ids, kv_end and cu_seqlens is [E], target e is the token after row target_rows[e], and a row may have
    several. Segments are then trees, and the targets of sample s are those within `target_bounds`.
    """

    input_ids: Tensor  # [T] i64
    labels: Tensor  # [T] i64
    position_ids: Tensor  # [T] i64, restart at 0 in each segment; depth in a tree
    cu_seqlens: Tensor  # [S+1] i32
    cu_seqlens_host: tuple[int, ...]  # the same on the host, so that nothing synchronises to read it
    kv_end: Tensor  # [T] i32, key k is visible to queries k <= q < kv_end[k]
    loss_mask: Tensor  # [T] bool
    rollout_logprobs: Tensor  # [T] f32
    old_logprobs: Tensor | None  # [T] f32
    ref_logprobs: Tensor | None  # [T] f32
    advantages: Tensor  # [T] f32
    token_weights: Tensor  # [T] f32
    temperature: Tensor | None  # [T] f32
    policy_version: Tensor  # [T] i32
    trajectory_ids: tuple[str, ...]  # [S]
    sequence_coeff: Tensor | None = None  # [T] f32
    ratio_old_logprobs: Tensor | None = None  # [T] f32, in place of old_logprobs in the ratio (GSPO)
    value_targets: Tensor | None = None  # [T] f32, NaN where no turn begins after this token
    value_weight: Tensor | None = None  # [T] f32
    target_rows: Tensor | None = None  # [E] i64, rows of input_ids; None: target t belongs to row t
    target_bounds: tuple[int, ...] = ()  # with target_rows, on the host: targets of each sample, S + 1 borders
    num_sample_tokens: int | None = None  # tokens of the samples one by one; more than T where trees share them
    # Under context parallelism: the rows [R, n] i64 of each rank. input_ids and position_ids are then those of this
    # rank, as are the targets; kv_end is of all R n, of which the last may be padding.
    context_rows: Tensor | None = None
    num_padding: int = 0  # of this rank's n
    routed_experts: Tensor | None = None  # [T, layers, experts per token] i16 to be chosen again, see models.routing
    alone: bool = False  # under context parallelism one rank computes this row, without the others of its group

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed here, padding left out; 0 of a row that only takes part in collectives."""
        return len(self.input_ids) - self.num_padding if any(self.trajectory_ids) else 0

    @property
    def sample_bounds(self) -> tuple[int, ...]:
        """Borders of the samples among the targets: as trajectory_ids names them, on the host."""
        return self.cu_seqlens_host if self.target_rows is None else self.target_bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    step: int
    policy_version: int
    loss: float
    grad_norm: float
    skipped: bool  # non-finite gradient: the optimiser did not move
    num_loss_tokens: int  # global over ranks and micro-batches
    num_tokens: int
    entropy: float
    ratio_clip_frac: float
    kl_rollout: float  # mean(old - rollout) style drift between trainer and engine, nats per trained token
    logprob_abs_diff: float  # mean |trainer - engine| on the trained tokens
    tokens_per_s: float
    peak_memory_bytes: int
    details: Mapping[str, float] = field(default_factory=dict)  # further metrics by name, see metric_table.py
