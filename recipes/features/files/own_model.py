"""A model of your own, as the hub's models with code of their own are written: nothing here imports this repository.

Each block computes attention and feed-forward layer side by side, from one norm (Wang and Komatsuzaki 2021, GPT-J).
"""

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput


class ParallelConfig(PreTrainedConfig):
    """Sizes, each with its default: the keys of the recipe's `model` section."""

    model_type = "parallel"

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    max_position_embeddings: int = 128
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False


class ParallelBlock(GradientCheckpointingLayer):
    """x + attention(norm(x)) + mlp(norm(x))"""

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.norm = nn.LayerNorm(width)
        self.attention_in = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in = nn.Linear(width, config.intermediate_size)
        self.mlp_out = nn.Linear(config.intermediate_size, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same."""
        normed = self.norm(x)
        heads = self.attention_in(normed).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.attention_out(mixed) + self.mlp_out(F.gelu(self.mlp_in(normed)))


class ParallelForCausalLM(PreTrainedModel, GenerationMixin):
    """Embeddings, blocks, norm, head."""

    config_class = ParallelConfig
    _no_split_modules = ("ParallelBlock",)
    supports_gradient_checkpointing = True

    def __init__(self, config: ParallelConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(ParallelBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the table of tokens."""
        return self.tokens

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head."""
        return self.lm_head

    def forward(self, input_ids: torch.Tensor, **ignored) -> CausalLMOutput:
        """[batch, length] -> logits [batch, length, vocabulary]. The loss is computed from them elsewhere."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(self.norm(x)))
