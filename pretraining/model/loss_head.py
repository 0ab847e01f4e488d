"""The output projection of a fused loss: in training it multiplies where the labels are, inside the loss."""

import torch
from torch import nn
from transformers import PreTrainedModel

from pretraining.model.cross_entropy import fused_nats
from pretraining.recipe.model import EXACT


class LossHead(nn.Linear):
    """A head that hands the hidden states on while the model is trained, and gives logits otherwise.

    In training mode the model's `logits` are thus the head's input; called with labels, the head returns the
    summed nats. It is a module's own call because ZeRO-3 gathers a module's weight for just that long.
    """

    compute_dtype: torch.dtype

    def forward(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor | None = None,
        z_loss: float = 0.0,
        chunk_tokens: int | None = None,
        compile: bool | None = None,
        each: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[..., width] to [..., vocabulary]; in training to itself; with labels [...] to summed nats."""
        if labels is not None:
            rows, way = hidden.flatten(0, -2), (z_loss, chunk_tokens, compile)
            return fused_nats(rows, self.weight, labels.flatten(), *way, self.compute_dtype, each)
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(hidden)
        # accelerate hands autocast's outputs on in fp32: the loss multiplies in the dtype the logits would have had.
        device = hidden.device.type
        autocasts = torch.is_autocast_enabled(device)
        self.compute_dtype = torch.get_autocast_dtype(device) if autocasts else hidden.dtype
        return hidden


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether the model's logits are nothing but a linear layer without bias; other classes may scale or cap them."""
    head = model.get_output_embeddings()
    return model.config.model_type in EXACT and type(head) in (nn.Linear, LossHead) and head.bias is None


def install_loss_head(model: PreTrainedModel) -> LossHead:
    """Make the model's own output projection a LossHead: the same parameter, name and tie."""
    head = model.get_output_embeddings()
    head.__class__ = LossHead
    return head
