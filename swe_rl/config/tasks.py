"""The keys of the groups `task` and `reward`: what is trained on, and what counts as solved."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from swe_rl.config.agent import AgentConfig
from swe_rl.config.bounds import Bounds
from swe_rl.errors import ConfigError

GAMES = ("bandit", "text_game")  # of swe_rl/agents/environments: no repository, no sandbox, a score of their own


@dataclass(kw_only=True)
class TaskConfig:
    source: str = "minirepo"  # "minirepo", a directory written by `swe-rl tasks build` or `import`, or one of GAMES
    num_train: int = 400  # distinct training tasks; 0 takes all that the source has
    seed: int = 0  # of the training tasks
    heldout_seed: int = 7_000_003  # of the held-out tasks; nothing is ever tuned on them


@dataclass(kw_only=True)
class RewardConfig:
    grade_s: float = 60.0  # limit of one hidden-test run
    max_patch_bytes: int = 1 << 20
    grade_retries: int = 2  # after infrastructure trouble, each in a fresh sandbox
    # Tests of pytest: a process per test file, whose exit code, counts and times must agree with its results. The test
    # functions of minirepo are isolated one by one, whatever this says.
    strong: bool = True
    rerun: bool = True  # when nothing but PASS_TO_PASS fails, a second sandbox decides (it may be a flaky test)
    value: str = "binary"  # binary | fraction: of FAIL_TO_PASS that pass, times that of PASS_TO_PASS
    # Added to the value; all but the potential may change which policy is best. Success is measured without them.
    patch_line_cost: float = 0.0  # off per line that the patch adds or removes
    tamper_cost: float = 0.0  # off per part of the patch that was dropped with blame, and per forged result
    test_bonus: float = 0.0  # for an episode in which the agent ran tests
    verifier_weight: float = 0.0  # times what the verifier thinks of the episode, -1/2 to 1/2
    verifier: str = ""  # for verifier_weight: a directory that `swe-rl verify train` wrote, of other repositories
    potential_weight: float = 0.0  # credit per turn for visible tests that came to pass; needs credit per turn


TASK_BOUNDS = Bounds(not_negative=("num_train",))
REWARD_BOUNDS = Bounds(
    choices={"value": ("binary", "fraction")},
    positive=("grade_s", "max_patch_bytes"),
    not_negative=(
        "grade_retries",
        "patch_line_cost",
        "tamper_cost",
        "test_bonus",
        "verifier_weight",
        "potential_weight",
    ),
)


def validate_reward(cfg: RewardConfig, task: TaskConfig, *, advantage: str) -> None:
    """Keys that would do nothing; `advantage` is algo.advantage. ConfigError names the key and the cure."""
    if task.source == "minirepo" and not cfg.strong:
        raise ConfigError(
            "reward.strong=false does nothing for task.source=minirepo, whose tests are isolated one by one: remove it"
        )
    if cfg.potential_weight and advantage != "gae":
        raise ConfigError(
            f"reward.potential_weight={cfg.potential_weight} does nothing with algo.advantage={advantage}: a potential "
            "moves credit between turns; set algo.advantage=gae, or reward.potential_weight=0"
        )
    if bool(cfg.verifier) != bool(cfg.verifier_weight):
        raise ConfigError(
            f"reward.verifier={cfg.verifier!r} and reward.verifier_weight={cfg.verifier_weight:g}: set both, or none "
            "of them"
        )
    for key, default in asdict(RewardConfig()).items():
        if task.source in GAMES and getattr(cfg, key) != default:
            raise ConfigError(
                f"reward.{key} does nothing for task.source={task.source}, which has a score of its own: remove it"
            )


def validate_game(task: TaskConfig, agent: AgentConfig) -> None:
    """A game has its own prompt and tools. ConfigError names the key that would do nothing."""
    for key in ("toolset", "memory_tools", "ask_human", "question_cost", "abstain", "prompt"):
        default = getattr(AgentConfig(), key)
        if task.source in GAMES and getattr(agent, key) != default:
            raise ConfigError(
                f"agent.{key} does nothing for task.source={task.source}, which brings its own: leave it at {default!r}"
            )
    if task.source in GAMES and not task.num_train:
        raise ConfigError(f"task.num_train=0: task.source={task.source} has no end, ask for a number of tasks")
