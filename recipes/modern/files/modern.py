"""A small decoder of today: what public speed runs of 2024 to 2026 found to lower the loss for the same work.

Queries and keys are normed before they are turned, branches and head begin at zero, norms have no gains, and logits
may stay within a cap, as in modded-nanogpt and nanochat. Tables cost memory and no multiplications: every second
layer adds an embedding of the token to its values (modded-nanogpt, after Zhou et al. 2024), and beside the token's
embedding the first layer gets those of the last two and three tokens, found by a hash (modded-nanogpt since January
2026; Cheng et al. 2026, Engram).
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.initialization import normal_, zeros_
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

HASH_FACTORS = (1_000_003, 2_654_435_761)
HASH_BITS = 0x7FFF_FFFF_FFFF


class ModernConfig(PreTrainedConfig):
    """Sizes, each with its default: the keys of the recipe's `model` section."""

    model_type = "modern"

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    max_position_embeddings: int = 256
    rotary_base: float = 1000.0
    hidden_act: str = "gelu"
    longest_ngram: int = 3
    """There is a table of pairs, one of triples, and so on up to this many tokens."""
    rows_per_token: int = 16
    """Rows of each table, for each token of the vocabulary."""
    ngram_width: int = 64
    """Of those embeddings. A matrix maps them together to the width of the model: tables travel between ranks."""
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = False


class NgramTable(nn.Embedding):
    """Embeddings of the last n tokens; several may share a row."""

    def __init__(self, n: int, config: ModernConfig) -> None:
        super().__init__(config.rows_per_token * config.vocab_size, config.ngram_width)
        self.n = n

    def forward(self, tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """[batch, length] tokens and their places in their documents -> [batch, length, width]."""
        key = tokens
        for back in range(1, self.n):
            before = F.pad(tokens, (back, 0))[:, : tokens.shape[1]]
            # a document's first tokens have nothing before them
            key = (key * HASH_FACTORS[0] + (before + 1) * (places >= back)) & HASH_BITS
        key = ((key ^ (key >> 17)) * HASH_FACTORS[1]) & HASH_BITS
        return super().forward((key >> 7) % self.num_embeddings)


class Output(nn.Linear):
    """A matrix that begins at zero: the last of a branch, and the head."""


def normed(x: torch.Tensor) -> torch.Tensor:
    """Return x with mean 0 and deviation 1 along its last dimension: one kernel on a CPU, where RMSNorm has five."""
    return F.layer_norm(x, x.shape[-1:])


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn [batch, heads, length, size] by angles [batch or 1, 1, length, size / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


class ModernBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)), and the same with the MLP."""

    def __init__(self, config: ModernConfig, layer: int) -> None:
        super().__init__()
        width, self.config = config.hidden_size, config
        self.num_heads, self.is_causal = config.num_attention_heads, True
        self.num_key_value_groups = 1  # for the eager attention of transformers
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.o_proj = Output(width, width, bias=False)
        self.up_proj = nn.Linear(width, config.intermediate_size, bias=False)
        self.down_proj = Output(config.intermediate_size, width, bias=False)
        self.activation = ACT2FN[config.hidden_act]
        # the last layer has one, and every second before it
        has_values = (config.num_hidden_layers - layer) % 2 == 1
        self.values = nn.Embedding(config.vocab_size, width) if has_values else None

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, turns: tuple, mask, **borders) -> torch.Tensor:
        """[batch, length, width] -> the same."""
        h = normed(x)
        value = self.v_proj(h) if self.values is None else self.v_proj(h) + self.values(tokens)
        queries, keys, values = (
            each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.q_proj(h), self.k_proj(h), value)
        )
        queries, keys = (turned(normed(each), *turns) for each in (queries, keys))
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        scale = (self.config.hidden_size // self.num_heads) ** -0.5
        mixed, _ = attend(self, queries, keys, values, mask, scaling=scale, **borders)
        x = x + self.o_proj(mixed.flatten(2))
        return x + self.down_proj(self.activation(self.up_proj(normed(x))))


class ModernForCausalLM(PreTrainedModel, GenerationMixin):
    """Embeddings, blocks, head."""

    config_class = ModernConfig
    _no_split_modules = ("ModernBlock",)
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True
    supports_gradient_checkpointing = True

    def __init__(self, config: ModernConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.ngrams = nn.ModuleList(NgramTable(n, config) for n in range(2, config.longest_ngram + 1))
        inputs = len(self.ngrams) * config.ngram_width
        self.ngram_proj = nn.Linear(inputs, width, bias=False) if inputs else None
        self.layers = nn.ModuleList(ModernBlock(config, n) for n in range(config.num_hidden_layers))
        self.lm_head = Output(width, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Output | NgramTable):
            zeros_(module.weight)
        elif isinstance(module, nn.Embedding):
            # values join those of attention, which are near 0.6 at the beginning
            normal_(module.weight, std=1.0 if module is self.embed_tokens else 0.5)
        elif isinstance(module, nn.Linear):
            normal_(module.weight, std=(0.33 / module.in_features) ** 0.5)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the table of tokens."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head."""
        return self.lm_head

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, attention_mask=None, **cached) -> dict:
        """Return all tokens at each step: an n-gram needs those before it, so there is no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **borders,
    ) -> CausalLMOutput:
        """[batch, length] -> logits [batch, length, vocabulary]. The loss is computed from them elsewhere.

        Args:
            position_ids: [batch or 1, length], from 0 in each document if they are kept apart.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.embed_tokens(input_ids)
        if self.ngram_proj is not None:
            x = x + self.ngram_proj(
                torch.cat([table(input_ids, position_ids) for table in self.ngrams], dim=-1)
            )
        x = normed(x)
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        steps = torch.arange(half, dtype=torch.float32, device=x.device) / half
        angles = position_ids[:, None, :, None] * self.config.rotary_base**-steps
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            cache=None,
            position_ids=position_ids,
        )
        for layer in self.layers:
            x = layer(x, input_ids, turns, mask, **borders)
        logits, cap = self.lm_head(normed(x)), self.config.final_logit_softcapping
        return CausalLMOutput(logits=cap * torch.tanh(logits / cap) if cap else logits)
