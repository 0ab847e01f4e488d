"""Which matrices a model's parameters hold, seen from the modules of its class.

transformers 5.24.0: `Conv1D` keeps [inputs, outputs], and classes name fused projections and the parts of experts in
their own ways. Held by test_muon.py and test_model.py.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pretraining.errors import UserError
from pretraining.upstream.deepspeed import whole_shape


@dataclass(frozen=True)
class Matrices:
    """The matrices that one parameter holds: GPT-2's queries, keys and values, or both halves of every expert."""

    shape: tuple[int, ...]
    """Shape of the whole parameter, even if this rank has only a part of it."""
    split_dim: int = 0
    parts: int = 1
    """The number of matrices side by side along `split_dim`."""
    transposed: bool = False
    """True for [inputs, outputs], as in GPT-2's Conv1D and gpt_oss's experts; False for [outputs, inputs]."""
    interleaved: bool = False
    """True if the matrices take turns along `split_dim`, as the columns of gpt_oss's gate and up do."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def neurons(self) -> tuple[int, int]:
        """How many matrices there are, and how many outputs each has."""
        outputs, inputs = self.sides
        return self.numel // (outputs * inputs), outputs

    @property
    def cost(self) -> int:
        """The multiplications of one Newton-Schulz iteration, up to a constant factor."""
        # X X^T is formed on the shorter side, see `orthogonalize`
        return self.numel * min(self.sides)

    def scale(self, rule: str) -> float:
        """Return what the orthogonalised update is multiplied with (`optimizer.scale`).

        spectral: the effect on the outputs is then the same for every shape (Jordan 2024). match_adamw: updates are as
        large as AdamW's then, and its learning rates fit (Liu et al. 2025, eq. 4).
        """
        outputs, inputs = self.sides
        return max(1.0, outputs / inputs) ** 0.5 if rule == "spectral" else 0.2 * max(outputs, inputs) ** 0.5

    @property
    def sides(self) -> tuple[int, int]:
        """Return (outputs, inputs) of one matrix."""
        sizes = list(self.shape)
        sizes[self.split_dim] //= self.parts
        return (sizes[-1], sizes[-2]) if self.transposed else (sizes[-2], sizes[-1])

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Reshape [numel] to [matrices, rows, columns], as a view if the layout allows it."""
        dim, sizes = self.split_dim, list(self.shape)
        each = sizes[dim] // self.parts
        sizes[dim : dim + 1] = [each, self.parts] if self.interleaved else [self.parts, each]
        apart = flat.view(sizes).movedim(dim + self.interleaved, 0)
        return apart.reshape(-1, *apart.shape[-2:])

    def put(self, matrices: torch.Tensor) -> torch.Tensor:
        """Reverse `of`: [matrices, rows, columns] to [numel]."""
        dim, sizes = self.split_dim, list(self.shape)
        sizes[dim] //= self.parts
        return matrices.view(self.parts, *sizes).movedim(0, dim + self.interleaved).reshape(-1)


def hidden_matrices(model: PreTrainedModel, per_head: bool = False) -> dict[str, Matrices]:
    """Return {name: its matrices} of every parameter that maps hidden states to hidden states.

    Embeddings, the head, routers, norms and biases are left out: an embedding's rows are looked up one at a time, and
    a router's outputs are no features (Jordan 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025,
    section 2.2). per_head: queries, keys and values are a matrix for each head.
    """
    head, heads = model.get_output_embeddings(), _numbers_of_heads(model) if per_head else {}
    found = {}
    for module_name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding) or type(module).__name__.endswith("Router"):
            continue
        # a class of experts says how it keeps them
        transposed = getattr(module, "is_transposed", False)
        for name, parameter in module.named_parameters(recurse=False):
            # under ZeRO-3 the parameter itself is empty here
            shape = whole_shape(parameter)
            # the biases of all experts are in one tensor
            if len(shape) < 2 or name.endswith("bias"):
                continue
            full_name = f"{module_name}.{name}" if module_name else name
            in_heads = heads.get(module_name.rpartition(".")[2])
            if isinstance(module, Conv1D):
                # queries, keys and values side by side: each is a matrix of its own
                fused = 3 if full_name.endswith("c_attn.weight") else 1
                found[full_name] = Matrices(shape, split_dim=1, parts=in_heads or fused, transposed=True)
            elif name.endswith("gate_up_proj"):
                # [experts, 2 x inner, hidden]: gate and up are separate matrices
                dim = 2 if transposed else 1
                found[full_name] = Matrices(shape, dim, 2, transposed, not module.is_concatenated)
            else:
                found[full_name] = Matrices(shape, parts=in_heads or 1, transposed=transposed)
    return found


def _numbers_of_heads(model: PreTrainedModel) -> dict[str, int]:
    """Return {last part of a layer's name: how many heads its outputs are, side by side}."""
    config = model.config.get_text_config()
    queries = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or queries
    fused = dict.fromkeys(("c_attn", "qkv_proj", "query_key_value"), queries + 2 * keys)
    numbers = {"q_proj": queries, "k_proj": keys, "v_proj": keys, **fused}
    if not any(name.endswith(tuple(f".{each}" for each in numbers)) for name, _ in model.named_modules()):
        what = f"no layer of {config.model_type} is called {', '.join(numbers)}; set it to false"
        raise UserError(f"optimizer.per_head: {what}")
    return numbers
