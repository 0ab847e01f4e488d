"""Which parameters are hidden matrices, and which matrices lie in each of them."""

from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


@dataclass(frozen=True)
class Matrices:
    """The matrices that one parameter holds: GPT-2's queries, keys and values, or both halves of every expert."""

    shape: tuple[int, ...]
    """Of the whole parameter, whatever part of it is here."""
    split_dim: int = 0
    parts: int = 1
    """So many matrices side by side along `split_dim`."""
    transposed: bool = False
    """Whether it is [inputs, outputs], as GPT-2's Conv1D keeps it, rather than [outputs, inputs]."""

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)

    @property
    def cost(self) -> int:
        """Multiplications of one Newton-Schulz iteration, up to a constant."""
        rows, columns = self._one()
        return self.numel * min(rows, columns)

    @property
    def fan_out_in(self) -> tuple[int, int]:
        """Outputs and inputs of one of the matrices."""
        rows, columns = self._one()
        return (columns, rows) if self.transposed else (rows, columns)

    def _one(self) -> tuple[int, int]:
        sizes = list(self.shape)
        sizes[self.split_dim] //= self.parts
        return sizes[-2], sizes[-1]

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """[numel] to [matrices, rows, columns], a view where the layout allows one."""
        dim, sizes = self.split_dim, list(self.shape)
        sizes[dim : dim + 1] = [self.parts, sizes[dim] // self.parts]
        apart = flat.view(sizes).movedim(dim, 0)
        return apart.reshape(-1, *apart.shape[-2:])

    def put(self, matrices: torch.Tensor) -> torch.Tensor:
        """The way back: [matrices, rows, columns] to [numel]."""
        dim, sizes = self.split_dim, list(self.shape)
        sizes[dim] //= self.parts
        return matrices.view(self.parts, *sizes).movedim(0, dim).reshape(-1)


def hidden_matrices(model: PreTrainedModel) -> dict[str, Matrices]:
    """{name: its matrices} of every parameter that maps hidden states to hidden states.

    Embeddings, the head, routers, norms and biases are none: an embedding's rows are looked up one at a time, and
    a router's outputs are no features (Jordan 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025,
    section 2.2).
    """
    head = model.get_output_embeddings()
    found = {}
    for module_name, module in model.named_modules():
        if module is head or isinstance(module, nn.Embedding) or type(module).__name__.endswith("Router"):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if len(shape) >= 2:
                full_name = f"{module_name}.{name}" if module_name else name
                found[full_name] = _matrices(module, full_name, shape)
    return found


def _matrices(module: nn.Module, name: str, shape: tuple[int, ...]) -> Matrices:
    if isinstance(module, Conv1D):
        fused = name.endswith("c_attn.weight")
        return Matrices(shape, split_dim=1, parts=3 if fused else 1, transposed=True)
    if name.endswith("gate_up_proj"):  # experts: [experts, 2 x inner, hidden]
        return Matrices(shape, split_dim=1, parts=2)
    return Matrices(shape)
