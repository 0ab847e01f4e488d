"""What transformers keeps private: a Trainer with the public methods that a run needs, and a model's classes.

`Trainer` has no public way to do what follows. Each private method is overridden here and calls a public one, which the
run's own Trainer fills in:

    private in transformers       public here               why
    _get_grad_norm                gradient_norm_known       monitors judge every step by the norm before clipping
    _get_num_items_in_batch       count_targets             masked documents: ranks hold different numbers of targets
    _prepare_for_training         prepared, checkpoints     checkpoints are ours, and are loaded into prepared objects
    _load_from_checkpoint         (nothing)                 without DeepSpeed it would load weights before that
    _load_rng_state               checkpoints               called once the loop's own counters are at their start;
                                                            the loop draws before its first batch, and forgets that
    _save_checkpoint              checkpoints               the Trainer's and DeepSpeed's are pickles of one layout
    _evaluate                     repeats_validation    a schedule that follows the loss sees a repeated validation too
    _run_epoch                    (skipped)                 a run that early stopping had left is not trained on
    _tr_loss                      running_loss              one NaN would stay in it for ever
    _globalstep_last_logged       last_logged_step          a resumed run logs the row that was due
    _initial_global_step          first_step                a validation at the resumed step has nothing to save

`name_logs_by` replaces `integration_utils.rewrite_logs`, which puts `train/` before every name that trackers get.

Held by test_upstream.py, which compares the signatures, and by every test that trains. A row may go once
transformers calls something public there.

What follows that Trainer reads a model's classes (transformers 5.24.0, torch 2.15.0, deepspeed 0.19.8). Each function
says why, which test holds it, and when it may go.
"""

import copy
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel, Trainer
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations import integration_utils
from transformers.integrations.moe import _grouped_linear


class OpenTrainer(Trainer):
    """A Trainer whose subclasses fill in public methods alone: those of the table above."""

    gradient_norm_known: Callable[[float | torch.Tensor | None], None]
    """Called in every step with the norm of all gradients before clipping; None if nobody knows it."""
    count_targets: Callable[[list, torch.Tensor | int | None], torch.Tensor | int | None]
    """(micro-batches, targets of this rank) -> what the losses of a step's micro-batches are divided by."""
    prepared: Callable[[], None]
    """Called once model, optimizer and schedule are wrapped, before anything is loaded into them."""
    checkpoints: Any
    """A `CheckpointManager`, whose `load_state`, `load_position` and `save` are called."""
    repeats_validation: Callable[[], bool]
    """Whether a validation before the first step is that of the step before, which was cut short."""

    _random_numbers: torch.Tensor | None = None
    """State of torch's generator as a resume has loaded it, until the first batch is there."""

    @property
    def running_loss(self) -> torch.Tensor:
        """The sum of losses since the last log, on the device."""
        return self._tr_loss

    @property
    def last_logged_step(self) -> int:
        """The step after which the running loss began at zero."""
        return self._globalstep_last_logged

    @last_logged_step.setter
    def last_logged_step(self, step: int) -> None:
        self._globalstep_last_logged = step

    @property
    def first_step(self) -> int:
        """Steps that were done before `train` began."""
        return self._initial_global_step

    def _get_grad_norm(self, model, grad_norm=None):
        norm = super()._get_grad_norm(model, grad_norm)
        self.gradient_norm_known(norm)
        return norm

    def _get_num_items_in_batch(self, batch_samples, device):
        return self.count_targets(batch_samples, super()._get_num_items_in_batch(batch_samples, device))

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        # None, as for a fresh start: afterwards every state is set in place.
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self.prepared()
        if resume_from_checkpoint is not None:
            self.checkpoints.load_state(self, Path(resume_from_checkpoint))
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        pass  # `checkpoints` loads the weights, once they are prepared

    def _load_rng_state(self, checkpoint):
        if checkpoint is not None:
            self.checkpoints.load_position(self, Path(checkpoint))
            self._random_numbers = torch.random.get_rng_state()

    def get_batch_samples(self, *args: Any) -> tuple[list, Any]:
        """Return the micro-batches of a step, after which torch's generator is as a resume has loaded it."""
        batches = super().get_batch_samples(*args)
        # The first batch begins the loader's iterator, which draws a number. An undisturbed run drew it at its start.
        if self._random_numbers is not None:
            torch.random.set_rng_state(self._random_numbers)
            self._random_numbers = None
        return batches

    def _save_checkpoint(self, model, trial):
        self.checkpoints.save(self)

    def _evaluate(self, trial, ignore_keys_for_eval, skip_scheduler=False):
        return super()._evaluate(
            trial, ignore_keys_for_eval, skip_scheduler and not self.repeats_validation()
        )

    def _run_epoch(self, *args, **kwargs):
        # A resumed `control` may already ask for the stop, which the loop checks only after a step.
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)


def name_logs_by(rename: Callable[[dict], dict]) -> None:
    # The trackers of transformers look the function up in its module at each call.
    integration_utils.rewrite_logs = rename


def draw_module(owner: PreTrainedModel, module: nn.Module) -> None:
    """Draw `module`'s own parameters, and with some classes its children's, by the rule of `owner`.

    transformers calls the rule once for a whole model, from one generator, and under ZeRO-3 in another order: initial
    weights would depend on the stage. Held by test_model.py; may go once transformers draws alike at every stage, and
    with it the next three.
    """
    owner._init_weights(module)


def forget_drawn(parameter: nn.Parameter) -> None:
    """Let the rule draw a parameter that transformers has marked as drawn; under ZeRO-3 all are, before we draw."""
    # transformers asks for the value, so that False does the same as no mark.
    parameter._is_hf_initialized = False


class StandIn(nn.Parameter):
    """A parameter that does not say if it is on the meta device: there, some of torch's rules would do nothing."""

    is_meta = False


class RuleTrace(TorchDispatchMode):
    """Note what a rule of drawing does to tensors of the meta device while the block lasts.

    The schema of each operator says what it writes. Held by test_other_models.py and test_model.py.

    tensors: each under a key, by which the trace names it.
    """

    def __init__(self, tensors: Mapping[Any, torch.Tensor]) -> None:
        super().__init__()
        # a view, and what `data` returns, have the storage of their tensor
        self._keys = {tensor.untyped_storage()._cdata: key for key, tensor in tensors.items()}
        self._numel = {key: tensor.numel() for key, tensor in tensors.items()}
        self.written: set = set()
        self.filled: set = set()
        """Those whose values from before the rule have no effect: it has replaced all of them first."""
        self.read: set = set()
        """Those with any other use, if only of a part."""
        self.random: set = set()
        """Those filled with random numbers; None among them: some random numbers went elsewhere."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, written = kwargs or {}, []
        arguments = {argument.name: argument for argument in func._schema.arguments}
        for name, value in [*zip(arguments, args, strict=False), *kwargs.items()]:
            alias = arguments[name].alias_info
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            if alias is not None and alias.is_write:
                written += tensors
            elif not func.is_view:
                self.read |= {self._key_of(tensor) for tensor in tensors} - {None}
        for tensor in written:
            if (key := self._key_of(tensor)) is None:
                continue
            self.written.add(key)
            if func._schema.name not in _FILLING or tensor.numel() != self._numel[key]:
                self.read.add(key)
            elif key not in self.read:
                self.filled.add(key)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random |= {self._key_of(tensor) for tensor in written} or {None}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return 0  # there are no numbers; torch's `trunc_normal_` asks if it has to draw some again
        return func(*args, **kwargs)

    def _key_of(self, tensor: torch.Tensor) -> Any:
        return self._keys.get(tensor.untyped_storage()._cdata)


_FILLING = {f"aten::{name}_" for name in ("normal", "uniform", "fill", "zero", "copy")}
"""Operators after which nothing of their tensor's values is left. For others weights are gathered, which is slower."""


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer of the module itself belongs to its state; `state_dict` would gather parameters too."""
    return buffer not in module._non_persistent_buffers_set


def is_partitioned(parameter: nn.Parameter) -> bool:
    # DeepSpeed has no function that says it; held by test_model.py
    return hasattr(parameter, "ds_id")


def is_experts(module: nn.Module) -> bool:
    """Return whether this module has all experts of a layer; it is called with (tokens, choices, weights).

    `use_experts_implementation` sets this, and nothing else does. Held by test_balance.py.
    """
    return hasattr(module, "_is_expert_parallel")


def forward_of_class(block: Any) -> Callable:
    """Return the block's forward pass without the checkpointing and the old names that transformers wraps around it.

    A graph that ends inside would end in each wrapper again. Held by test_compiling.py.
    """
    return inspect.unwrap(type(block).forward).__get__(block)


def call_recomputed(block: Any, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function in the place of that forward pass; if layers are recomputed, it is called again."""
    if not block.gradient_checkpointing:
        return function(*args, **kwargs)
    # as in that wrapper: a cache would be written twice
    kwargs |= {name: None for name in ("cache", "layer_past") if name in kwargs}
    kwargs |= {"use_cache": False} if "use_cache" in kwargs else {}
    return block._gradient_checkpointing_func(partial(function, **kwargs), *args)


def capture_routers(block: nn.Module) -> Callable:
    """Let a graph of the block note its routers' logits; return what hands them to transformers, to be called after it.

    Its own hooks ask what was captured before: traced, each layer would have a graph, and the ninth none. Held by
    test_compiling.py; may go once they can be traced for all layers at once.
    """
    routers: list[tuple[Any, Callable]] = []
    for module in block.modules():
        for number, hook in module._forward_hooks.items():
            if getattr(hook, "__name__", "") == "output_capturing_hook":  # of install_output_capuring_hook
                captured = inspect.getclosurevars(hook).nonlocals
                module._forward_hooks[number] = _noting(hook, captured["key"], captured["index"])
                if captured["key"] == "router_logits":
                    routers.append((module, hook))
                    routers[-1][0].noted = None

    def hand_on(is_kept: bool = True) -> None:
        for router, capture in routers:
            if router.noted is not None:
                if is_kept:
                    capture(router, (), router.noted)
                router.noted = None  # its graph holds activations

    return hand_on


def _noting(capture: Callable, key: str, index: int) -> Callable:
    """Return the hook to take instead: in a graph, where nothing else is ever asked for, it notes routers' logits."""

    def note(module: Any, inputs: tuple, output: Any) -> None:
        if not torch.compiler.is_compiling():
            capture(module, inputs, output)
        elif key == "router_logits":
            module.noted = output[index] if isinstance(output, tuple) else output

    return note


def multiplies_in_groups(experts: Any) -> bool:
    """Return whether experts are two grouped products with an activation between them, without biases and norms.

    `grouped_product` and `activate` are the two halves. Held by test_layouts.py.
    """
    is_grouped = experts.config._experts_implementation == "grouped_mm"
    return is_grouped and not experts.has_bias and not getattr(experts, "has_post_expert_norm", False)


def grouped_product(
    experts: Any, rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Multiply rows [rows, width] by the matrix of each one's expert; ends: of each expert's rows, int32 [experts]."""
    return _grouped_linear(rows, weight, ends, is_transposed=experts.is_transposed)


def activate(experts: Any, inner: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Apply the activation of experts to [rows, inner], and each row's weight [rows, 1]."""
    activated = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    return (activated * weights).to(inner.dtype)


def keep_buffers(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Let DeepSpeed keep buffers in fp32 whose names hold one of `names`, beside those that the class keeps.

    DeepSpeed reads transformers' own note. Held by test_balance.py.
    """
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), *names}


_MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
_positions: list[torch.Tensor | None] = [None]
"""Those of the forward pass that runs."""
_MADE: set[Callable] = set()
"""Masks that begin anew already; `__wrapped__` does not tell them, since transformers wraps its own functions too."""


def mask_by_positions(model: PreTrainedModel) -> None:
    """Let every mask of the model begin anew where its `position_ids` do, as the masks of most classes do anyway.

    Some classes, as gpt_oss, do not hand their positions on to the functions of `masking_utils`, which are replaced by
    the names under which the class's module has imported them. Held by test_model_types.py; may go once all do.
    """

    def remember(module: nn.Module, inputs: tuple, keywords: dict) -> None:
        _positions[0] = keywords.get("position_ids")

    def forget(module: nn.Module, inputs: tuple, output: Any) -> None:
        _positions[0] = None

    code = sys.modules[type(model.base_model).__module__]
    for name in _MASKS:
        create = getattr(code, name, None)
        if create is not None and create not in _MADE:
            setattr(code, name, _with_positions(create))
    model.register_forward_pre_hook(remember, with_kwargs=True)
    model.register_forward_hook(forget, always_call=True)


def _with_positions(create: Callable) -> Callable:
    @wraps(create)
    def with_positions(*args: Any, **keywords: Any) -> Any:
        if _positions[0] is not None and keywords.get("position_ids") is None:
            keywords["position_ids"] = _positions[0]
        return create(*args, **keywords)

    _MADE.add(with_positions)
    return with_positions


def attention_of(model: PreTrainedModel) -> str:
    # the recipe may leave the choice to transformers, which fills this in; held by test_attention.py
    return model.config._attn_implementation


class LoadedUnder(NamedTuple):
    """The name under which a saved tensor is loaded."""

    name: str
    pattern: str | None
    """The pattern of the converter that makes the parameter of several tensors, or several of one; None: a plain
    tensor."""


class Conversion:
    """Names and layouts in which a model's weights are saved, as transformers translates them.

    `from_pretrained`, which alone does it, would read every file whole on every rank. Held by test_given_weights.py;
    may go once a model can be loaded slice by slice, and `is_not_loaded` with it.

    model: on any device, the meta device too.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self.model = model
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._state = model.state_dict()

    def loaded_under(self, saved_name: str) -> LoadedUnder:
        """Translate the name of a saved tensor."""
        prefix, state = self.model.base_model_prefix, self._state
        found = LoadedUnder(*rename_source_key(saved_name, self._renamings, self._converters, prefix, state))
        # As transformers does: a name that fits already is no older one.
        is_own = found.name not in state and saved_name in state
        return LoadedUnder(*rename_source_key(saved_name, [], [], prefix, state)) if is_own else found

    def convert(self, name: str, saved: Iterable[tuple[str, str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Make {parameter: tensor} of the tensors (saved name, pattern, tensor) that are loaded under `name`."""
        saved = list(saved)
        pattern = saved[0][1]
        own = next(each for each in self._converters if pattern in each.source_patterns)
        converter = copy.deepcopy(own)
        for saved_name, its_pattern, tensor in sorted(saved, key=lambda each: dot_natural_key(each[0])):
            converter.add_tensor(name, saved_name, its_pattern, lambda tensor=tensor: tensor)
        converted = converter.convert(name, model=self.model, config=self.model.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}


def is_not_loaded(model: PreTrainedModel, saved_name: str) -> bool:
    """Return whether the class ignores a saved tensor of this name: a mask or a table that older versions saved."""
    patterns = model._keys_to_ignore_on_load_unexpected or ()
    return any(re.search(pattern, saved_name) for pattern in patterns)
