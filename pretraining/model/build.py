"""Build an `AutoModelForCausalLM` from the recipe's `model` section; under ZeRO-3 it is sharded from the start.

The section `speed` follows: what a recomputed layer keeps, compiled blocks or models, products in fp8. The last two are
used only in training.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)
from transformers.initialization import no_init_weights
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_layers import GradientCheckpointingLayer

from pretraining.ds_config import NOT_SPLIT, Degrees
from pretraining.errors import UserError, require
from pretraining.extend import load_extensions, model_extension
from pretraining.model.attention import HOPPER, INSTALL, choose_attention, describe_attention, split_attention
from pretraining.model.given_weights import GivenWeights
from pretraining.model.initial_weights import initialise_weights, rules_of
from pretraining.model.loss import CORRECTION_BIASES
from pretraining.model.parallel import (
    PLAIN_KERNELS,
    ExpertDispatch,
    Kernels,
    expert_modules,
    split_experts,
    split_vocabulary,
)
from pretraining.planning.shapes import parameter_tensors
from pretraining.recipe import Recipe, model_with_defaults
from pretraining.recipe.model import has_experts, without_padding
from pretraining.recipe.optimizer import Mup, scales_by_name
from pretraining.recipe.refusals import why_not_compiled
from pretraining.recipe.sections import Speed, Weights
from pretraining.runtime.process_group import ALONE, RankGroups, fails_anywhere, own_group
from pretraining.upstream.attention_logits import is_watched, watch_attention
from pretraining.upstream.deepspeed import gather_as_one, groups_at_once, no_zero3_draw
from pretraining.upstream.torch import (
    DEAR_OPERATORS,
    compile_in_few_processes,
    compiled_both_ways,
    let_length_vary,
    missing_compiler,
)
from pretraining.upstream.transformers import (
    attention_of,
    call_recomputed,
    capture_routers,
    draw_module,
    forward_of_class,
    keep_buffers,
    mask_by_positions,
)
from pretraining.upstream.wide_weights import is_wide, keep_in_fp32

PLAIN = Speed(compile="none")
"""A `speed` section that asks for nothing."""
ALL_TRAINED = Weights()
"""Drawn weights, all of which are trained."""


def build_config(model: dict, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Build the transformers config of the recipe's `model` section, with the tokenizer's special tokens."""
    if own := model_extension(model["model_type"]):
        load_extensions([own])  # transformers knows the type from here on
    # a copy: a class may write into the objects that it gets (Olmo3Config adds to rope_parameters)
    keywords = {k: deepcopy(v) for k, v in model.items() if k != "model_type"}
    special: dict = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    special |= without_padding(model)
    if own is None and has_experts(model):
        special["output_router_logits"] = True  # of balance and load, unless the recipe says otherwise
    try:
        return AutoConfig.for_model(model["model_type"], **{"use_cache": False, **special, **keywords})
    except Exception as error:
        # Each class checks its keywords in its own way, and all of these come from the recipe.
        raise UserError(f"model: transformers refuses this {model['model_type']} config: {error}") from error


def build_from_recipe(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    draw_weights: bool,
    given: GivenWeights | None = None,
    groups: RankGroups = ALONE,
) -> PreTrainedModel:
    """Build the model (`build_model`) with all settings of the recipe."""
    masks_documents, speed, why_none = recipe.data.document_masking, recipe.speed, None
    on_gpu = torch.cuda.is_available()
    # Here and not in the recipe: what can be compiled depends on the ds_config and on this machine.
    if speed.compile == "auto":
        why_none = why_not_compiled(recipe, arguments.deepspeed, on_gpu=on_gpu)
        speed = replace(speed, compile="none") if why_none else speed
    # A processor compiles nothing unless it is asked to: that is no news.
    if arguments.process_index == 0 and (on_gpu or speed.compile != "none"):
        print(describe_compilation(speed, why_none), flush=True)
    if recipe.watched_keys:
        watch_attention()
    others = {"mup": recipe.mup, "weights": recipe.weights, "given": given, "groups": groups}
    return build_model(recipe.model, tokenizer, arguments, draw_weights, masks_documents, speed, **others)


def build_model(
    model: dict,
    tokenizer: PreTrainedTokenizerBase,
    arguments: TrainingArguments,
    draw_weights: bool = True,
    masks_documents: bool = False,
    speed: Speed = PLAIN,
    mup: Mup = Mup(),
    weights: Weights = ALL_TRAINED,
    given: GivenWeights | None = None,
    groups: RankGroups = ALONE,
) -> PreTrainedModel:
    """Build the model with its initial weights; the same weights at every ZeRO stage and world size.

    Args:
        arguments: name the ds_config; transformers finds ZeRO-3 through them while they are alive.
        draw_weights: False leaves the weights to a checkpoint.
        masks_documents: choose an attention that keeps documents apart.
        speed, mup, weights: the recipe's sections.
        given: take these weights in place of drawn ones.
        groups: which ranks work on the same samples, and how many split the experts.

    Raises `UserError`: transformers refuses the `model` section, or this machine has no such kernel or no compiler.
    """
    check_speed(speed)
    attention = choose_attention(model, arguments, masks_documents)
    if groups.degrees.sequence > 1:
        attention = split_attention(attention, groups)
    config = build_config({**model, "attn_implementation": attention}, tokenizer)
    # DeepSpeed makes its fp32 master weights from the bf16 ones at every stage: to build in bf16 changes no value and
    # halves host memory. Without DeepSpeed, autocast needs fp32 weights.
    dtype = torch.bfloat16 if arguments.deepspeed and arguments.bf16 else torch.float32
    built = _without_weights(config, attention, dtype)
    # On a processor there is one kernel, unless the recipe asks for more.
    chosen = torch.cuda.is_available() or masks_documents or "attn_implementation" in model
    if arguments.process_index == 0 and chosen:
        print(describe_attention(attention_of(built), masks_documents), flush=True)
    if masks_documents:
        mask_by_positions(built)
    built.tie_weights()
    # A step of 0.001 is lost in a bias of 16 bits. DeepSpeed keeps the buffers that the model names.
    keep_buffers(built, CORRECTION_BIASES)
    if weights.keep_in_fp32:
        keep_in_fp32(built, weights.wide_tables, weights.has_wide, dtype)
    if groups.degrees.expert > 1:
        with groups_at_once(own_group):
            split_experts(built, groups.degrees.expert)
    if given is not None or not draw_weights:
        compute_buffers(built)
    if given is not None:
        given.fill(built, arguments.device)
    elif draw_weights:
        names = [name for name, _ in built.named_parameters()]
        scales = scales_by_name(names, model_with_defaults(model), mup)
        factors, rules = {name: each.initial for name, each in scales.items()}, {}
        if weights.draw:
            kinds = {tensor.name: tensor.kind for tensor in parameter_tensors(model)}
            rules = rules_of(built, weights.draw, kinds)
        initialise_weights(built, arguments.seed, factors, rules)
    if groups.degrees.tensor > 1:
        split_vocabulary(built, groups.degrees.tensor)
    for name, parameter in built.named_parameters():
        parameter.requires_grad_(not weights.freezes(name))
    # The dataset's labels are already the next tokens: the Trainer must not count them as unshifted ones.
    built.loss_type = None
    if speed.fp8 != "none":
        # Before the model is compiled, so that the graphs contain the fp8 products.
        convert_products(built, speed)
    if speed.recompute == "operators":
        keep_products(built)
    compile_model(built, speed, groups.degrees)
    return built


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds, as drawing does: a constructor may have done so in 16 bit.

    A rule may draw a child's parameters too: whoever calls this gives the model its weights afterwards.
    """
    saved = model.state_dict().keys()
    for path, module in model.named_modules():
        buffers = {name for name, _ in module.named_buffers(path, recurse=False)}
        if buffers - saved and next(module.parameters(recurse=False), None) is None:
            draw_module(model, module)


def _without_weights(config: PreTrainedConfig, attention: str | None, dtype: torch.dtype) -> PreTrainedModel:
    """Build the model, and draw nothing. attention: the name that was chosen."""
    try:
        # drawn later, the same at every stage; ZeRO-3 makes the groups of nodes here (hpZ)
        with no_init_weights(), no_zero3_draw(), groups_at_once(own_group):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except KeyError as error:  # how transformers reports an unknown rope_type
        raise UserError(f"model.rope_parameters: transformers has no rope_type {error}") from error
    except (ImportError, ValueError) as error:
        if isinstance(error, ValueError) and "attn_implementation" not in str(error):
            raise UserError(f"model: {error}") from error
        # What remains is the attention: a package that is missing, or a name that transformers does not know.
        what = f"{attention} cannot be used here ({INSTALL.get(attention, 'see its package')})"
        reason = " ".join(str(error).split())[:200]
        remedy = "or leave it out to use torch's own kernels"
        raise UserError(f"model.attn_implementation: {what}, {remedy}: {reason}") from error


BORDERS = {"cu_seq_lens_q", "cu_seq_lens_k"}
"""Keywords of a block that hold the documents' borders (`data.document_masking`)."""
MULTIPLE = 16
"""Both sides of a matrix must be a multiple of this for fp8 kernels."""


def check_speed(speed: Speed) -> None:
    """Raise `UserError` if this machine has no compiler for what the recipe names, or no kernels for fp8."""
    if speed.compile == "deepcompile" and not torch.cuda.is_available():
        what = "speed.compile: deepcompile needs a GPU, whose toolkit builds it"
        raise UserError(f"{what}, and there is none here; --set speed.compile=auto")
    if speed.compile in ("blocks", "whole") and (missing := _missing(speed)):
        raise UserError(f"speed.compile: inductor needs {missing}; install it, or --set speed.compile=none")
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if speed.fp8 != "none" and (capability is None or capability < HOPPER):
        has = "there is no GPU" if capability is None else f"this one has {capability[0]}.{capability[1]}"
        needs = f"speed.fp8: {speed.fp8} needs a GPU of compute capability 9.0 (Hopper) or later"
        raise UserError(f"{needs}, and {has} here; --set speed.fp8=none")


def _missing(speed: Speed) -> str | None:
    return missing_compiler() if speed.compile_backend == "inductor" else None


def compile_model(model: PreTrainedModel, speed: Speed, degrees: Degrees = NOT_SPLIT) -> None:
    """Let training passes run compiled code; parameters, names and modules stay as they are.

    Blocks of one class share their graph: only their weights differ, and these are inputs of the graph. Validation and
    samples are not compiled: they come in other shapes, and each shape would be compiled again. Hooks of a block stay
    outside of its graph.

    `auto` compiles blocks too, and goes on uncompiled if that fails (`FirstPass`).

    degrees: those of the layout. Ranks that split a layer, a sequence or experts exchange inside a block.
    """
    if speed.compile in ("none", "deepcompile"):  # DeepSpeed compiles the model once its engine is there
        return
    options = {"backend": speed.compile_backend}
    if speed.compile_mode:
        options["mode"] = speed.compile_mode
    compile_in_few_processes()
    modules = [model] if speed.compile == "whole" else list(blocks_of(model))
    if is_deepspeed_zero3_enabled():
        # ZeRO-3's hooks then gather a block's weights together, because a graph would end at each hook inside it.
        gather_as_one(modules)
        if not model.get_input_embeddings().weight.requires_grad:
            # its hooks for the backward pass hang on the block's input, and would come too early if that needs none
            model.enable_input_require_grads()
    # All modules share it: if one of them fails, none stays compiled.
    trial = None
    if degrees != NOT_SPLIT:
        trial = torch.compile(lambda numbers: (numbers.sin() * 2).sum(), **options)
    first_pass = FirstPass(_missing(speed), trial) if speed.compile == "auto" else None
    kernels = PLAIN_KERNELS.compiled(**options)
    for module in modules:
        if speed.compile != "whole" and (expert_modules(module) or is_watched()):
            compiled = _recomputed_outside(module, kernels, options, first_pass)
        else:
            compiled = torch.compile(module.forward, **options)
        if first_pass:
            compiled = first_pass.trying(compiled, module.forward)
        module.forward = _in_training(module, compiled)


def blocks_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model's layers, in order."""
    return (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def describe_compilation(speed: Speed, why_none: str | None = None) -> str:
    """Write what the log says at the start. why_none: the reason if `auto` became none."""
    if speed.compile == "none":
        return "compiled: nothing" + (f" ({why_none})" if why_none else "")
    if speed.compile == "deepcompile":
        return (
            "compiled: the whole model, by DeepSpeed's DeepCompile, which was never tried with these recipes"
        )
    what = "the whole model" if speed.compile == "whole" else "every block"
    return f"compiled: {what}, by {speed.compile_backend}, in the first training pass"


def _in_training(module: nn.Module, compiled: Callable) -> Callable:
    """Wrap the module's forward: compiled in passes that a backward pass follows, plain in all others."""
    plain = module.forward

    @wraps(plain)  # transformers reads the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (module.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        for borders in kwargs.keys() & BORDERS:  # one graph for every number of documents
            let_length_vary(kwargs[borders])
        return compiled(*args, **kwargs)

    return forward


def _recomputed_outside(
    module: nn.Module, kernels: Kernels, options: dict, first_pass: "FirstPass | None"
) -> Callable:
    """Compile a block with experts, or whose logits are seen, so that activation checkpointing calls the compiled code.

    Other blocks are recomputed within their graph. Here routers' logits leave the block, and graphs end inside of it,
    at an attention that is seen and at exchanges: torch can do neither inside of what is recomputed in a graph.
    """
    compiled = torch.compile(forward_of_class(module), **options)
    dispatches = [each.forward for each in expert_modules(module) if isinstance(each.forward, ExpertDispatch)]
    hand_on = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal hand_on
        # transformers' hooks are there since the first pass began
        hand_on = hand_on or capture_routers(module)
        for each in dispatches:
            each.kernels = kernels
        try:
            try:
                output = compiled(*args, **kwargs)
            except Exception:
                hand_on(is_kept=False)  # of the part of the block that ran before it failed
                raise
            if first_pass is not None and first_pass.is_trying:
                first_pass.hand_on = hand_on  # once no rank has failed: a plain pass would hand them on again
            else:
                hand_on()
            return output
        finally:  # a block that is not compiled, or a validation, takes plain ones
            for each in dispatches:
                each.kernels = PLAIN_KERNELS

    return partial(call_recomputed, module, run)


class FirstPass:
    """The first training pass of every compiled block: if it fails on any rank, all ranks go on uncompiled.

    Args:
        missing: what the compiler lacks on this machine; None if nothing.
        trial: a compiled function of one tensor, which is called before any block if ranks exchange inside blocks:
            a rank that cannot compile would leave the others waiting in an exchange.
    """

    def __init__(self, missing: str | None, trial: Callable | None = None) -> None:
        self.missing, self.trial, self.has_failed = missing, trial, False
        self.is_trying = False
        self.hand_on: Callable | None = None
        """Hands on what a first call has noted (`capture_routers`), or drops it."""

    def trying(self, compiled: Callable, plain: Callable) -> Callable:
        """Call `compiled`, or `plain` after a first call has failed on any rank. Ranks make first calls together."""
        is_known = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_known
            if is_known and not self.has_failed:
                return compiled(*args, **kwargs)
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            device = next((tensor.device for tensor in tensors), torch.device("cpu"))
            if self.trial is not None:
                numbers = torch.ones(2, device=device, requires_grad=True)
                self._together(self.trial, device, numbers)
                self.trial = None
            if not self.has_failed:
                self.is_trying, self.hand_on = True, None
                try:
                    result = self._together(compiled, device, *args, **kwargs)
                finally:
                    self.is_trying = False
                is_known = not self.has_failed
                if self.hand_on is not None:
                    self.hand_on(is_kept=is_known)
                if is_known:
                    return result
                del result  # before the block runs again: its graph holds activations
            return plain(*args, **kwargs)

        return call

    def _together(self, compiled: Callable, device: torch.device, *args: Any, **kwargs: Any) -> Any:
        """Return what the first call returns; has_failed if it fails on any rank."""
        first, result, failure = compiled_both_ways(compiled), None, None
        if self.missing:
            failure = f"inductor needs {self.missing}"
        else:
            try:
                result = first(*args, **kwargs)
            except torch.OutOfMemoryError:
                raise  # another compiler's code would need as much
            except Exception as error:
                # Backends, Triton and the machine's C compiler may raise any exception. Its first lines say what
                # failed, the later ones how to debug torch.
                said = " ".join(str(error).strip().partition("\n\n")[0].split())
                failure = f"{type(error).__name__}: {said[:300]}"
        # All ranks or none: gradients leave a compiled block in another order, and ZeRO-1 and 2 put them into buckets
        # as they come. If only some ranks compiled, gradients of different weights would be added up.
        what = "blocks run uncompiled on all ranks, as rank {rank} cannot compile them ({failure})"
        if fails_anywhere(failure, device, f"{what}; mend that, or --set speed.compile=none"):
            self.has_failed = True
        return result


def convert_products(model: PreTrainedModel, speed: Speed) -> int:
    """Let the linear layers of the blocks multiply in fp8 while they are trained; return how many there are.

    Weights, optimizer and everything between the products stay as they are. Validations and samples do not use fp8,
    so that they measure the exported weights. The inputs of each product are scaled to fp8 when they are multiplied.
    torchao's recipes differ in which numbers share a scale. `tensorwise`: all of a tensor. `rowwise`: each row of it.
    `rowwise_with_gw_hp`: each row, with the weights' gradients in bf16. Only in the last one no scale depends on which
    samples share a micro-batch.
    """
    float8 = require("torchao.float8", "speed.fp8")
    from pretraining.upstream.fp8 import Fp8InTraining

    config = float8.Float8LinearConfig.from_recipe_name(speed.fp8)
    blocks = list(blocks_of(model))
    block_of = {id(layer): number for number, block in enumerate(blocks) for layer in block.modules()}
    chosen = [
        name
        for name, layer in model.named_modules()
        # Not isinstance: a subclass may compute something else. The kernels take sides of such multiples.
        if type(layer) is nn.Linear
        and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE)
        and id(layer) in block_of
        and not is_wide(layer.weight)
        and speed.is_in_fp8(name, block_of[id(layer)], len(blocks))
    ]
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in chosen, config=config)
    for layer in map(model.get_submodule, chosen):
        layer.__class__ = Fp8InTraining  # a wrapper would change the parameters' names
    return len(chosen)


def keep_products(model: PreTrainedModel) -> None:
    """Let activation checkpointing keep the results of products and attention, and compute all else again.

    The Trainer switches activation checkpointing on, when training begins.
    """
    enable = model.activation_checkpointing_enable

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in DEAR_OPERATORS else CheckpointPolicy.PREFER_RECOMPUTE

    def enable_selectively(activation_checkpointing_kwargs: dict | None = None, **keywords: Any) -> None:
        contexts = partial(create_selective_checkpoint_contexts, policy)
        enable(
            {"use_reentrant": False, **(activation_checkpointing_kwargs or {}), "context_fn": contexts},
            **keywords,
        )

    model.activation_checkpointing_enable = enable_selectively
