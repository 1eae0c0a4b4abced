"""The published recipes: their values are those of the papers, their smoke twins run, what cannot run yet says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from swe_rl.cli.dispatch import main
from swe_rl.cli.hydra_entry import compose_config, groups
from swe_rl.config import TrainConfig, validate
from swe_rl.metrics import read_metrics

# Of the script that trained DeepSWE (rllm, 2025-07-01, 64 GPUs) and of verl's defaults that it leaves alone.
DEEPSWE = {
    "model.name": "Qwen/Qwen3-32B",
    "model.yarn_factor": 1.0,  # none, in training and in evaluation
    "cluster.num_nodes": 8,
    "cluster.gpus_per_node": 8,
    "algo.advantage": "leave_one_out",  # adv_estimator=loop
    "algo.singleton": "reward",  # a group of one has baseline 0 there
    "algo.ratio_rule": "ppo",
    "algo.clip_low": 0.2,
    "algo.clip_high": 0.28,
    "algo.dual_clip": 0.0,  # in the fork, but switched off
    "algo.aggregation": "seq_sum_const",  # the fork's seq-mean-token-sum, divided by B and the response length
    "algo.normalizer_tokens": 32768,  # data.max_response_length
    "algo.kl_coeff": 0.0,
    "algo.entropy_coeff": 0.0,
    "algo.drop_uniform_groups": False,  # rejection_sample=False
    "algo.stop_preset": "deepswe_v01",  # overlong_filter=True
    "algo.run_tests_on_filtered": False,
    "phases.0.tasks_per_step": 64,  # train_batch_size
    "phases.0.minibatch_size": 0,  # ppo_mini_batch_size 64 prompts, one epoch: one optimiser step
    "phases.0.steps": 200,  # "about 200" in the blog
    "rollout.group_size": 8,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,  # -1 there
    "trainer.learning_rate": 1e-6,
    "trainer.warmup_steps": 0,
    "trainer.schedule": "constant",
    "trainer.weight_decay": 0.01,
    "trainer.max_grad_norm": 1.0,
    "trainer.tensor_parallel": 4,  # ours
    "trainer.context_parallel": 8,  # Ulysses
    "trainer.offload": True,
    "trainer.activation_checkpointing": True,
    "engine.backend": "vllm",
    "engine.tensor_parallel": 8,
    "engine.gpu_memory": 0.6,
    "engine.attention": "FLASH_ATTN",
    "engine.cuda_graphs": True,
    "agent.toolset": "r2e",
    "agent.max_turns": 50,
    "agent.max_context_tokens": 4096 + 32768,
    "agent.remind_tokens": 28000,
    "agent.episode_s": 5400.0,  # trajectory_timeout; the blog says 20 minutes
    "sandbox.backend": "kubernetes",
    "sandbox.command_s": 90.0,  # env.step
    "sandbox.concurrency": 512,  # containers of one iteration
    "reward.grade_s": 300.0,
    "eval.samples_per_task": 1,
    "eval.greedy_tasks": 512,  # validation at temperature 0, batch 512
    "checkpoint_every": 10,
}
# arXiv:2511.16108 (SA-SWE-32B), where it differs.
SKYRL = {
    "cluster.num_nodes": 2,
    "trainer.tensor_parallel": 8,  # ours: one copy of the model on 8 GPUs
    "trainer.context_parallel": 1,
    "algo.dual_clip": 3.0,  # SkyRL's default for its dual clip
    "algo.clip_high": 0.28,
    "algo.stop_preset": "skyrl",
    "algo.run_tests_on_filtered": True,  # tokens are masked, the reward is real
    "algo.aggregation": "seq_sum_const",  # seq_mean_token_sum_norm
    "phases.0.steps": 125,
    "phases.0.tasks_per_step": 64,
    "rollout.group_size": 8,
    "trainer.learning_rate": 1e-6,
    "agent.max_turns": 50,
    "agent.max_context_tokens": 36864,
}
# arXiv:2508.03501, Table 3 and sections on rejection fine-tuning and reinforcement learning.
NEBIUS = {
    "model.name": "Qwen/Qwen2.5-72B-Instruct",
    "model.yarn_factor": 4.0,
    "model.yarn_original_context": 32768,
    "cluster.num_nodes": 16,
    "cluster.gpus_per_node": 8,
    "rollout.group_size": 10,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.min_p": 0.0,
    "algo.advantage": "group_std",
    "algo.aggregation": "token_mean",  # Equation 8
    "algo.drop_uniform_groups": True,  # samples without advantage leave the batch
    "algo.refill_rounds": 0,  # and nothing takes their place
    "algo.kl_coeff": 0.0,
    "algo.stop_preset": "nebius",  # over-long rollouts train, and are penalised
    "algo.length_penalty": "turns",
    "algo.length_penalty_on": "reward",  # before standardising
    "algo.length_penalty_scale": 1.0,  # -1 at T_max
    "algo.epochs": 1,
    "trainer.learning_rate": 1e-6,
    "trainer.betas": [0.9, 0.999],
    "trainer.eps": 1e-8,
    "trainer.weight_decay": 0.1,
    "trainer.max_grad_norm": 1.0,
    "agent.toolset": "nebius",
    "agent.action_format": "fence",
    "agent.max_turns": 80,
    "agent.max_context_tokens": 131072,
    "sandbox.memory_mib": 2048,  # 2 GiB per pod
    # rejection fine-tuning
    "phases.0.data": "passed_rollouts",
    "phases.0.num_tasks": 7249,
    "phases.0.samples_per_task": 10,
    "phases.0.epochs": 1,
    "phases.0.batch_size": 64,
    "phases.0.overrides.trainer.learning_rate": 5e-6,
    "phases.0.overrides.trainer.warmup_steps": 10,
    "phases.0.overrides.trainer.schedule": "cosine",
    "phases.0.overrides.trainer.min_lr_ratio": 0.0,
    "phases.0.overrides.agent.max_context_tokens": 65536,
    "phases.0.overrides.agent.prompt": "nebius_demo",
    # first stage
    "phases.1.tasks_per_step": 300,
    "phases.1.minibatch_size": 128,
    "phases.1.overrides.algo.clip_low": 0.2,
    "phases.1.overrides.algo.clip_high": 0.3,
    "phases.1.overrides.algo.length_penalty_start": 10,  # L_thr
    "phases.1.overrides.algo.length_penalty_end": 40,  # T_max
    "phases.1.overrides.agent.max_turns": 40,
    "phases.1.overrides.agent.max_context_tokens": 65536,
    # second stage
    "phases.2.tasks_per_step": 100,
    "phases.2.minibatch_size": 256,
    "phases.2.pool_from": "rl_65k",
    "phases.2.max_success": 2 / 3,
    "phases.2.overrides.algo.clip_low": 0.2,
    "phases.2.overrides.algo.clip_high": 0.26,
    "phases.2.overrides.algo.length_penalty_start": 10,
    "phases.2.overrides.algo.length_penalty_end": 80,
}
# Model card of DeepSWE-Verifier and R2E-Gym's training scripts.
R2E_VERIFIER = {
    "model.name": "Qwen/Qwen3-14B",
    "model.lora_rank": 64,
    "model.lora_alpha": 128.0,
    "seed": 42,
    "trainer.learning_rate": 1e-5,
    "trainer.schedule": "cosine",
    "trainer.warmup_ratio": 0.05,
    "trainer.optimizer": "adamw",
    "phases.0.epochs": 2,
    "phases.0.batch_size": 8,
    "agent.max_context_tokens": 76800,
}
# R2E-Gym's reproduction guide of DeepSWE; arXiv:2508.03501, Tables 2 and 3 and Appendix B.
PROTOCOLS: dict[str, dict[str, Any]] = {
    "deepswe_verified_16x": {
        "eval.samples_per_task": 16,
        "eval.splits.test": 500,
        "agent.max_context_tokens": 65536,
        "agent.max_turns": 100,
        "agent.soft_turns": 40,
        "agent.episode_s": 50000.0,
        "sandbox.command_s": 90.0,
        "sandbox.concurrency": 48,
        "reward.grade_s": 1200.0,
        "rollout.temperature": 1.0,
    },
    "nebius_10x": {
        "eval.samples_per_task": 10,
        "eval.splits.test": 500,
        "agent.max_context_tokens": 131072,
        "agent.max_turns": 80,
    },
    "verified50": {
        "eval.samples_per_task": 10,
        "eval.splits.verified50": 50,
        "agent.max_context_tokens": 65536,
        "agent.max_turns": 80,
    },
}
RECIPES = {"deepswe": DEEPSWE, "deepswe_skyrl": SKYRL, "nebius": NEBIUS, "r2e_verifier": R2E_VERIFIER}
SMOKES = ("quickstart", "deepswe", "deepswe_skyrl", "nebius", "smollm2_pypi", "recipe_comparison")
# Runs every smoke twin in one process, which loads torch once; prints one exit code per line.
RUN_ALL = """
import sys
from swe_rl.cli.dispatch import main
for name in sys.argv[2:]:
    print(name, main(["train", f"experiment={name}_smoke", f"run_dir={sys.argv[1]}/{name}"]), flush=True)
"""


def value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree[int(part)] if part.isdigit() and isinstance(tree, list) else tree[part]
    return tree


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_has_the_published_values(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", f"experiment={name}", "--cfg", "job"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    found = {key: value_at(recipe, key) for key in RECIPES[name]}
    assert found == RECIPES[name]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_an_evaluation_protocol_has_the_published_values(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "experiment=dataset_rl", f"+eval={name}", "--cfg", "job"]) == 0
    protocol = yaml.safe_load(capsys.readouterr().out)
    assert {key: value_at(protocol, key) for key in PROTOCOLS[name]} == PROTOCOLS[name]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["experiment=deepswe"], "sandbox.backend=kubernetes cannot run yet: choose sandbox=local"),
        (["experiment=nebius"], "sandbox.backend=kubernetes cannot run yet"),
        (["experiment=r2e_verifier"], "data=judged_rollouts"),
        (["experiment=smoke", "sandbox=kubernetes"], "sandbox.backend=kubernetes cannot run yet"),
        (["experiment=smoke", "cluster=h100_2x8"], "are for 16 training processes, 1 were started"),
    ],
)
def test_what_cannot_run_yet_is_one_line_and_exit_code_2(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["train", *overrides, f"run_dir={tmp_path}/run"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert not (tmp_path / "run").exists()


def test_a_smoke_twin_exists_for_all_that_can_be_run() -> None:
    names = groups()["experiment"]
    assert {f"{name}_smoke" for name in SMOKES} <= set(names)


def differing_keys(first: Any, second: Any, prefix: str = "") -> set[str]:
    if isinstance(first, dict) and isinstance(second, dict):
        return {
            key
            for name in first | second
            for key in differing_keys(first.get(name), second.get(name), f"{prefix}{name}.")
        }
    return set() if first == second else {prefix.rstrip(".")}


@pytest.mark.parametrize("name", ["deepswe", "deepswe_skyrl", "nebius"])
def test_a_smoke_twin_changes_sizes_and_back_ends_only(name: str) -> None:
    """What decides how the policy learns is the recipe's own: advantages, loss, filters, optimiser, tools, prompt."""
    trees = []
    for experiment in (name, f"{name}_smoke"):
        config = compose_config(TrainConfig, "train", [f"experiment={experiment}"])
        validate(config)
        trees.append(json.loads(json.dumps(config, default=lambda item: item.__dict__)))
    changed = {key for key in differing_keys(*trees) if key.split(".")[0] in ("algo", "trainer", "agent", "rollout")}
    sizes = {"max_turns", "max_context_tokens", "max_turn_tokens", "max_observation_tokens", "max_format_errors"}
    sizes |= {"remind_turns", "remind_tokens", "episode_s", "group_size", "backend", "tensor_parallel"}
    sizes |= {"context_parallel", "offload", "activation_checkpointing"}
    assert {key.split(".")[1] for key in changed} <= sizes


@pytest.fixture(scope="module")
def smoke_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """(directory with a run per recipe, exit codes by recipe)."""
    out = tmp_path_factory.mktemp("recipes")
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(out), *SMOKES], capture_output=True, text=True, timeout=560
    )
    codes = dict(line.split() for line in done.stdout.splitlines() if len(line.split()) == 2)
    assert set(codes) == set(SMOKES), done.stderr[-3000:]
    return out, codes


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKES)
def test_a_smoke_twin_runs_its_steps(name: str, smoke_runs: tuple[Path, dict[str, str]]) -> None:
    out, codes = smoke_runs
    assert codes[name] == "0"
    records = read_metrics(out / name / "metrics.jsonl")
    steps = sum(r.values["train/optimizer_steps"] for r in records if "rollout/success" in r.values)
    wanted = {"nebius": 2, "recipe_comparison": 8}.get(name, 2)
    assert steps >= wanted
    bound = 0.1 if name == "smollm2_pypi" else 1e-4  # bf16 there
    assert all(r.values["train/logprob_abs_diff"] <= bound for r in records if "rollout/success" in r.values)
