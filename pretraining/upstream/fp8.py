"""Linear layers that multiply in fp8 while they are trained, at every ZeRO stage; torchao 0.18.0.

torchao's product keeps a transposed view of the weight for the backward pass. Under ZeRO-3 such a view holds the
gathered weight after ZeRO-3 has let go of it, and the memory of all layers with it. `_Product` keeps the parameter
itself, whose data ZeRO-3 gathers again before the backward pass. Compiled graphs save parameters and need no such care.

Held by test_fp8.py. It may go once torchao keeps the weight that its layer has.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args


class Fp8InTraining(Float8Linear):
    """A linear layer that multiplies in fp8 in training. In validations, or if `in_fp8` is false, it is torch's."""

    in_fp8 = True
    """Set by `Bf16InDecay`. A compiled block has a graph for either value."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if not (self.training and self.in_fp8):
            return nn.functional.linear(rows, self.weight, self.bias)
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        result = _Product.apply(rows, self.weight, self.linear_mm_config, self.config)
        return result if self.bias is None else result + self.bias.to(result.dtype)


@torch.compiler.allow_in_graph
class _Product(torch.autograd.Function):
    """torchao's product of rows [..., in] with the transpose of a weight [out, in]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, products: Any, config: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.linear_mm_config, ctx.config = products, config
        saves_nothing = SimpleNamespace(save_for_backward=lambda *tensors: None)
        return matmul_with_hp_or_float8_args.forward(saves_nothing, rows, weight.t(), products, config)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        rows, weight = ctx.saved_tensors
        saved = SimpleNamespace(
            saved_tensors=(rows, weight.t()), linear_mm_config=ctx.linear_mm_config, config=ctx.config
        )
        of_rows, of_weight, *_ = matmul_with_hp_or_float8_args.backward(saved, gradient)
        return of_rows, of_weight.t(), None, None
