"""fp8 products in the blocks' linear layers, by torchao: of families that have such layers, on Hopper and later.

Weights, optimizer and everything between the products stay what they are. Each product's inputs are scaled to fp8
when they are multiplied; torchao's recipes differ in what shares a scale: `tensorwise` all of a tensor, `rowwise` a
row of it; `rowwise_with_gw_hp` is that with the weights' gradients in bf16. Only in the last does no scale depend on
which samples share a micro-batch.
"""

import dataclasses
from functools import cache

import torch
from torch import nn
from transformers import PreTrainedModel

from pretraining.data.packages import require
from pretraining.errors import UserError
from pretraining.model.compiling import blocks_of

HOPPER = (9, 0)
MULTIPLE = 16
"""Of what both sides of a matrix must be for the kernels."""


def check_fp8_hardware(speed: dict) -> None:
    """Raise `UserError` if this machine has no kernels for fp8, before a model is built."""
    if speed["fp8"] == "none":
        return
    key = f"speed.fp8: {speed['fp8']}"
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability is None or capability < HOPPER:
        has = "there is no GPU" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        raise UserError(
            f"{key} needs a GPU of compute capability 9.0 (Hopper) or later, and {has} here; --set speed.fp8=none"
        )


def convert_products(model: PreTrainedModel, recipe_name: str, emulate: bool = False) -> int:
    """Let the linear layers of the blocks multiply in fp8 while they are trained; return how many there are.

    Parameters and names stay. Validations and samples multiply as without, so that they are those of the exported
    weights. emulate: compute what the kernels would, slowly, where there are none.
    """
    float8 = require("torchao.float8", "speed.fp8")
    config = float8.Float8LinearConfig.from_recipe_name(recipe_name)
    config = dataclasses.replace(config, emulate=emulate)
    in_blocks = {id(layer) for block in blocks_of(model) for layer in block.modules() if _fits(layer)}
    chosen = [name for name, layer in model.named_modules() if id(layer) in in_blocks]
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    for layer in map(model.get_submodule, chosen):
        layer.__class__ = _in_training(type(layer))
    return len(chosen)


@cache
def _in_training(fp8_linear: type[nn.Linear]) -> type[nn.Linear]:
    """A class of layers that are torchao's while they are trained, and torch's otherwise."""

    class Fp8InTraining(fp8_linear):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return (
                super().forward(rows) if self.training else nn.functional.linear(rows, self.weight, self.bias)
            )

    return Fp8InTraining


def _fits(layer: nn.Module) -> bool:
    """A linear layer whose sides the kernels take; a gathered one has its own shape under ZeRO-3 too."""
    if type(layer) is not nn.Linear:
        return False
    return layer.in_features % MULTIPLE == 0 and layer.out_features % MULTIPLE == 0
