"""Every configuration key of the system, its default and unit, and its checks: one file per group, run.py the whole.

conf/*.yaml hold differences from these defaults only. A component receives its own dataclass, never the whole tree.
"""

from swe_rl.config.agent import AgentConfig
from swe_rl.config.algo import AlgoConfig
from swe_rl.config.cluster import ClusterConfig
from swe_rl.config.model import ModelConfig
from swe_rl.config.phase import PhaseConfig, expand_rounds
from swe_rl.config.rollout import EngineConfig, RolloutConfig
from swe_rl.config.run import EvalConfig, TrainConfig, phase_config, validate
from swe_rl.config.sandbox import SandboxConfig
from swe_rl.config.tasks import RewardConfig, TaskConfig
from swe_rl.config.trainer import BatchingConfig, TrainerConfig, check_context
from swe_rl.config.verifier import VerifierConfig

__all__ = [
    "AgentConfig",
    "AlgoConfig",
    "BatchingConfig",
    "ClusterConfig",
    "EngineConfig",
    "EvalConfig",
    "ModelConfig",
    "PhaseConfig",
    "RewardConfig",
    "RolloutConfig",
    "SandboxConfig",
    "TaskConfig",
    "TrainConfig",
    "TrainerConfig",
    "VerifierConfig",
    "check_context",
    "expand_rounds",
    "phase_config",
    "validate",
]
