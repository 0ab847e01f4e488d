"""What libraries keep private of a model; transformers 5.23.0, torch 2.13.0, deepspeed 0.19.8.

- A class's rule for drawing weights (`draw_module`): `PreTrainedModel._init_weights`, which every class overrides.
  transformers calls it once for a whole model, from one generator, and under ZeRO-3 in another order: initial weights
  would depend on the stage. Held by tests/test_model.py. May go once transformers draws alike at every stage.
- Its mark on a parameter (`forget_drawn`): `_is_hf_initialized`. The rule skips what is marked, and under ZeRO-3
  everything is marked before we draw. Held by tests/test_model.py. Goes with the rule.
- How often a parameter was written to (`times_written`): torch's `Tensor._version`, which autograd counts, also on the
  meta device. It shows which parameters a rule reaches. Held by tests/test_other_models.py. Goes with the rule.
- Which buffers are not saved (`is_persistent`): torch's `Module._non_persistent_buffers_set`; `state_dict` would gather
  parameters too. Held by tests/test_upstream.py.
- Whether ZeRO-3 has a parameter in shards (`is_partitioned`): DeepSpeed sets `ds_id`, and has no function that says it.
  Held by tests/test_model.py.
- Which attention a model has (`attention_of`): `config._attn_implementation`, which transformers fills in if the recipe
  leaves the choice to it. Held by tests/test_attention.py. May go once the config says it in public.
"""

import torch
from torch import nn
from transformers import PreTrainedModel


def draw_module(owner: PreTrainedModel, module: nn.Module) -> None:
    """Draw `module`'s own parameters, and with some classes its children's, by the rule of `owner`."""
    owner._init_weights(module)


def forget_drawn(parameter: nn.Parameter) -> None:
    """Let the rule draw a parameter that transformers has marked as drawn."""
    # transformers asks for the value, so that False does the same as no mark.
    parameter._is_hf_initialized = False


def times_written(parameter: torch.Tensor) -> int:
    """Count the writes to a parameter so far; only differences have a meaning."""
    return parameter._version


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Say if a buffer of the module itself belongs to its state."""
    return buffer not in module._non_persistent_buffers_set


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Say if ZeRO-3 has this parameter in shards."""
    return hasattr(parameter, "ds_id")


def attention_of(model: PreTrainedModel) -> str:
    """Name the attention that the model's layers call."""
    return model.config._attn_implementation
