"""The model of modded-nanogpt's third track, whose architecture is fixed: only how it is optimized may change.

A decoder with biases everywhere, norms with gains in front of attention and MLP, behind the embedding and in front of
the head, squared ReLU, queries and keys normed before they are turned, and logits that stay within 15.
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.initialization import constant_, normal_, uniform_, zeros_
from transformers.modeling_outputs import CausalLMOutput

ATTENTION_SCALE = 0.12
LARGEST_LOGIT = 15.0
LOWEST_FREQUENCY = 1 / 1024


class TrackConfig(PreTrainedConfig):
    """Sizes, and how matrices begin: uniform as torch draws them (April 2026), or normal with zero biases."""

    model_type = "modded_nanogpt"

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    max_position_embeddings: int = 1024
    initial_values: str = "normal"
    tie_word_embeddings: bool = False


class Output(nn.Linear):
    """A matrix that begins at zero, its bias too: the last of a branch, and the head."""


def turned(x: torch.Tensor) -> torch.Tensor:
    """Turn [batch, heads, length, size] by places; of the frequencies the second half stands still."""
    quarter = x.shape[-1] // 4
    frequencies = LOWEST_FREQUENCY ** torch.linspace(0, 1, quarter, dtype=torch.float32, device=x.device)
    places = torch.arange(x.shape[-2], dtype=torch.float32, device=x.device)
    angles = F.pad(torch.outer(places, frequencies), (0, quarter))
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1).type_as(x)


class TrackBlock(nn.Module):
    """x + attention(norm(x)), and the same with the MLP."""

    def __init__(self, config: TrackConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))
        self.o_proj = Output(width, width)
        self.up_proj = nn.Linear(width, 4 * width)
        self.down_proj = Output(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same."""
        normed = self.attention_norm(x)
        of_heads = (
            each(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys, values = of_heads
        queries, keys = (turned(F.rms_norm(each, each.shape[-1:])) for each in (queries, keys))
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=ATTENTION_SCALE)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down_proj(F.relu(self.up_proj(self.mlp_norm(x))).square())


class TrackForCausalLM(PreTrainedModel, GenerationMixin):
    """Embedding and its norm, blocks, norm, head."""

    config_class = TrackConfig
    _no_split_modules = ("TrackBlock",)

    def __init__(self, config: TrackConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens, self.embedding_norm = nn.Embedding(config.vocab_size, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(TrackBlock(config) for _ in range(config.num_hidden_layers))
        self.norm, self.lm_head = nn.RMSNorm(width), Output(width, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            normal_(module.weight)
        elif isinstance(module, nn.RMSNorm):
            constant_(module.weight, 1.0)
        elif isinstance(module, Output):
            zeros_(module.weight)
            zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            if self.config.initial_values == "normal":
                normal_(module.weight, std=0.33**0.5 * bound)
                zeros_(module.bias)
            else:
                uniform_(module.weight, -bound, bound)
                uniform_(module.bias, -bound, bound)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the table of tokens."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head."""
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, **ignored) -> CausalLMOutput:
        """[batch, length] -> logits [batch, length, vocabulary]. The loss is computed from them elsewhere."""
        x = self.embedding_norm(self.embed_tokens(input_ids))
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x)).float()
        return CausalLMOutput(logits=LARGEST_LOGIT * logits * (logits.square() + LARGEST_LOGIT**2).rsqrt())
