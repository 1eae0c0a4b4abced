"""The one model and tokenizer contract: load_model, and the trainer's packed forward."""

from swe_rl.models.forward import head_weight, packed_forward
from swe_rl.models.loading import load_model
from swe_rl.models.nano import build_tokenizer

__all__ = ["build_tokenizer", "head_weight", "load_model", "packed_forward"]
