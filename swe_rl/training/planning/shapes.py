"""The dimensions of a decoder model, and those of published models, which have to be known where no hub is reachable.

Families: Qwen2.5 (qwen2), Qwen3 (qwen3, qwen3_moe), Llama 3 and SmolLM2 (llama). All have grouped-query attention, a
gated MLP of three matrices and RMSNorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from swe_rl.errors import ConfigError

if TYPE_CHECKING:
    from swe_rl.config import ModelConfig

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one model; `family` is the model_type of its Hugging Face config."""

    family: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int  # of the MLP of dense layers
    vocab: int  # rows of the embedding
    tied: bool = False  # the head is the embedding
    num_experts: int = 0  # 0: every layer is dense
    experts_per_token: int = 0
    expert_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()  # of a mixture of experts: layers without experts

    @property
    def qkv_bias(self) -> bool:
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Of keys, and as much of values."""
        return self.num_kv_heads * self.head_dim

    def has_experts(self, layer: int) -> bool:
        return bool(self.num_experts) and layer not in self.dense_layers

    @property
    def num_expert_layers(self) -> int:
        return sum(self.has_experts(layer) for layer in range(self.num_layers))

    @property
    def attention_matrices(self) -> int:
        """Elements of the query, key, value and output projections of one layer."""
        return self.hidden * (2 * self.q_size + 2 * self.kv_size)

    @property
    def layer_vectors(self) -> int:
        """Elements of norms and biases of one layer."""
        bias = self.q_size + 2 * self.kv_size if self.qkv_bias else 0
        return 2 * self.hidden + bias + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def dense_mlp(self) -> int:
        return 3 * self.hidden * self.intermediate

    @property
    def expert_mlp(self) -> int:
        """Elements of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def embedding(self) -> int:
        """Elements of the embedding; of the head too, where it has its own."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """Elements of all parameters, a tied one counted once."""
        return self._with_experts(self.num_experts) + self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def layer_matrices(self) -> int:
        """Elements of the matrices of all layers that one token is multiplied with: of the experts, those it visits."""
        vectors = self.num_layers * self.layer_vectors
        return self._with_experts(self.experts_per_token) - vectors

    def _with_experts(self, count: int) -> int:
        """Elements of all layers with so many experts in each layer that has some; the router is whole."""
        router = self.hidden * self.num_experts
        dense = self.num_layers - self.num_expert_layers
        return (
            self.num_layers * (self.attention_matrices + self.layer_vectors)
            + dense * self.dense_mlp
            + self.num_expert_layers * (router + count * self.expert_mlp)
        )


def _qwen2(layers: int, hidden: int, heads: int, kv: int, mlp: int, *, vocab: int = 152064, tied: bool = False) -> Any:
    return ModelShape(
        family="qwen2",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=hidden // heads,
        intermediate=mlp,
        vocab=vocab,
        tied=tied,
    )


def _qwen3(layers: int, hidden: int, heads: int, kv: int, mlp: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        family="qwen3",
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=128,
        intermediate=mlp,
        vocab=151936,
        tied=tied,
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, kv: int, mlp: int, expert_mlp: int) -> ModelShape:
    return replace(
        _qwen3(layers, hidden, heads, kv, mlp),
        family="qwen3_moe",
        num_experts=128,
        experts_per_token=8,
        expert_intermediate=expert_mlp,
    )


def _llama(layers: int, hidden: int, heads: int, kv: int, mlp: int, *, vocab: int = 128256, tied: bool = False) -> Any:
    return replace(_qwen2(layers, hidden, heads, kv, mlp, vocab=vocab, tied=tied), family="llama")


# From the config.json of each release. A suffix such as -Instruct or -Base does not change dimensions.
PUBLISHED: Mapping[str, ModelShape] = {
    "Qwen/Qwen2.5-0.5B": _qwen2(24, 896, 14, 2, 4864, vocab=151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen2(28, 1536, 12, 2, 8960, vocab=151936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen2(36, 2048, 16, 2, 11008, vocab=151936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen2(28, 3584, 28, 4, 18944),
    "Qwen/Qwen2.5-14B": _qwen2(48, 5120, 40, 8, 13824),
    "Qwen/Qwen2.5-32B": _qwen2(64, 5120, 40, 8, 27648),
    "Qwen/Qwen2.5-72B": _qwen2(80, 8192, 64, 8, 29568),
    "Qwen/Qwen3-0.6B": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(36, 4096, 32, 8, 12288),
    "Qwen/Qwen3-14B": _qwen3(40, 5120, 40, 8, 17408),
    "Qwen/Qwen3-32B": _qwen3(64, 5120, 64, 8, 25600),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(48, 2048, 32, 4, 6144, 768),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(94, 4096, 64, 4, 12288, 1536),
    "meta-llama/Llama-3.2-1B": _llama(16, 2048, 32, 8, 8192, tied=True),
    "meta-llama/Llama-3.2-3B": _llama(28, 3072, 24, 8, 8192, tied=True),
    "meta-llama/Llama-3.1-8B": _llama(32, 4096, 32, 8, 14336),
    "meta-llama/Llama-3.1-70B": _llama(80, 8192, 64, 8, 28672),
    "HuggingFaceTB/SmolLM2-135M": _llama(30, 576, 9, 3, 1536, vocab=49152, tied=True),
    "HuggingFaceTB/SmolLM2-360M": _llama(32, 960, 15, 5, 2560, vocab=49152, tied=True),
    "HuggingFaceTB/SmolLM2-1.7B": _llama(24, 2048, 32, 32, 8192, vocab=49152, tied=True),
}
SUFFIXES = ("-Instruct-2507", "-Thinking-2507", "-Instruct", "-Base")
ALIASES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M", "meta-llama/Meta-Llama-3-8B": "meta-llama/Llama-3.1-8B"}


def model_shape(cfg: ModelConfig) -> ModelShape:
    """The shape behind model.name: nano, a directory with config.json, or a published model.

    Raises ConfigError for a model of another family, and for a name that is not in the table.
    """
    if cfg.name == "nano":
        return ModelShape(
            family="qwen3",
            num_layers=cfg.num_layers,
            hidden=cfg.hidden_size,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.hidden_size // cfg.num_heads,
            intermediate=cfg.intermediate_size,
            vocab=cfg.vocab_size,
            tied=True,
        )
    directory = Path(cfg.name).expanduser()
    if (directory / "config.json").is_file():
        return shape_from_directory(directory)
    name = ALIASES.get(cfg.name, cfg.name)
    for suffix in SUFFIXES:
        if name not in PUBLISHED:
            name = name.removesuffix(suffix)
    if name not in PUBLISHED:
        raise ConfigError(
            f"model.name={cfg.name!r} has no entry in the table of dimensions: give a directory with its config.json, "
            f"or one of {', '.join(PUBLISHED)}"
        )
    return PUBLISHED[name]


def shape_from_directory(directory: Path) -> ModelShape:
    """Of a Hugging Face directory; keys that its config.json leaves out have the defaults of transformers' class."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory)
    except (OSError, ValueError) as err:
        raise ConfigError(f"{directory} holds no config.json of a model: {' '.join(str(err).split())[:200]}") from err
    return shape_from_config(config, name=str(directory))


def shape_from_config(config: Any, *, name: str) -> ModelShape:
    """Of a transformers config. Raises ConfigError for another family, and for biases that its family does not have."""
    family = config.model_type
    if family not in FAMILIES:
        raise ConfigError(f"{name} is of the family {family!r}: only {', '.join(FAMILIES)} are known")
    for key in ("attention_bias", "mlp_bias"):
        if getattr(config, key, False):
            raise ConfigError(f"{name} sets {key}, which no published model of the family {family!r} does")
    moe = _experts(config) if family == "qwen3_moe" else SimpleNamespace(count=0, chosen=0, size=0, dense=())
    return ModelShape(
        family=family,
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
        num_experts=moe.count,
        experts_per_token=moe.chosen,
        expert_intermediate=moe.size,
        dense_layers=moe.dense,
    )


def _experts(config: Any) -> SimpleNamespace:
    """As transformers decides which layers have experts: not in mlp_only_layers, and every decoder_sparse_step-th."""
    step, only = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    layers = range(config.num_hidden_layers)
    dense = tuple(layer for layer in layers if layer in only or (layer + 1) % step)
    return SimpleNamespace(
        count=config.num_experts, chosen=config.num_experts_per_tok, size=config.moe_intermediate_size, dense=dense
    )
