"""trainer.virtual_pipeline: where it does nothing or cannot run, the configuration says so."""

from __future__ import annotations

import pytest

from swe_rl.config import TrainerConfig
from swe_rl.config.trainer import BOUNDS, validate_trainer
from swe_rl.errors import ConfigError
from swe_rl.training.megatron.grid import grid_sizes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"backend": "torch", "virtual_pipeline": 2}, r"trainer\.virtual_pipeline does nothing for trainer\.backend"),
        (
            {"virtual_pipeline": 2},
            r"trainer\.virtual_pipeline=2 needs trainer\.pipeline_parallel of at least 3, it is 1",
        ),
        ({"virtual_pipeline": 4, "pipeline_parallel": 2}, r"at least 3, it is 2: raise it, or set"),
    ],
)
def test_what_cannot_run(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate_trainer(TrainerConfig(**{"backend": "megatron", **keys}))  # type: ignore[arg-type]


def test_the_smallest_that_can() -> None:
    cfg = TrainerConfig(backend="megatron", pipeline_parallel=3, virtual_pipeline=2)
    validate_trainer(cfg)
    assert "virtual_pipeline" in BOUNDS.positive
    layout = grid_sizes(cfg, world_size=6)
    assert (layout.pipeline_parallel, layout.virtual_pipeline, layout.num_stages) == (3, 2, 6)
