"""FLOPs per token in every way the field counts them, so that two numbers can be compared."""

from dataclasses import asdict, dataclass

from pretraining.planning.sizes import ModelSize

BACKWARD = 2
"""The backward pass costs twice the forward pass: one product for the inputs' gradients, one for the weights'."""


@dataclass(frozen=True)
class FlopsPerToken:
    """FLOPs of one token; a multiply-add is two."""

    parameters: int
    """6 N over the entries of the matrices a token meets, head included, attention's scores left out."""
    six_n_total: int
    """6 N over all active parameters, embeddings included: Hoffmann et al. 2022's C = 6 N D."""
    forward: int
    """Forward pass, every product, causal mask not credited."""
    training: int
    """Forward and backward, causal mask not credited: 6 N + 12 L H Q T (PaLM, appendix B)."""
    training_causal: int
    """The same with the masked half of the scores left out: 6 N + 6 L H Q T."""
    recomputed: int
    """What activation checkpointing of every layer adds: each layer's forward pass once more, the head's not."""

    @property
    def hardware(self) -> int:
        """Training with every layer recomputed: what hardware FLOPs utilization (HFU) counts."""
        return self.training + self.recomputed

    def to_dict(self) -> dict:
        """The counts and their sum."""
        return {**asdict(self), "hardware": self.hardware}


def flops_per_token(size: ModelSize, sequence_length: int) -> FlopsPerToken:
    """Count the FLOPs of a token in a sequence of `sequence_length` tokens.

    A product with a matrix of n entries is 2 n (Kaplan et al. 2020, table 1). The scores and their product
    with the values are 2 x 2 L H Q T without the mask: PaLM (Chowdhery et al. 2022), appendix B. With every
    layer recomputed the sum is equation 3 of Narayanan et al. 2021: 96 l h^2 (1 + s / 6h + V / 16lh) a token
    for GPT. Softmax, norms, biases and activations are not counted, nor is the look-up of the embedding.
    """
    scores = 4 * size.num_layers * size.attention_width * sequence_length
    forward = 2 * size.matmul + scores
    return FlopsPerToken(
        parameters=6 * size.matmul,
        six_n_total=6 * size.active,
        forward=forward,
        training=(1 + BACKWARD) * forward,
        training_causal=(1 + BACKWARD) * (forward - scores // 2),
        recomputed=forward - 2 * size.head,
    )
