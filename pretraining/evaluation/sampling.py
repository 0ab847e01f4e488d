"""Text from a model: one sample, and the samples of a run after each validation or some steps."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    TrainerCallback,
    TrainerState,
)
from transformers import PreTrainedTokenizerBase as Tokenizer

from pretraining.data.tokenizer import DOCUMENT_PREFIX
from pretraining.recipe import Recipe
from pretraining.recipe.sections import Sampling
from pretraining.runtime.durable_files import append_row
from pretraining.runtime.heartbeat import long_work, work_done
from pretraining.runtime.process_group import rank_and_world_size
from pretraining.runtime.run_folder import RunFolder, keep_past_rows

DEFAULT = Sampling()
NOT_FINITE = "the model's logits are not finite"


class SamplingCallback(TrainerCallback):
    """Continue the recipe's prompts after each validation, or every `evaluation.sample_steps` steps.

    Writes rows of samples.jsonl: {"step", "prompt", "text"}, the text with its prompt. Every rank draws all samples,
    the same tokens, because a forward pass may be a collective. The curve is not affected: random generators
    and training mode are as before.
    """

    def __init__(self, run: RunFolder, recipe: Recipe, tokenizer: Tokenizer) -> None:
        self.run, self.tokenizer = run, tokenizer
        self.prompts, self.settings = prompts_of(recipe), recipe.evaluation

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            # A resumed run repeats the steps after its checkpoint and writes their samples again.
            history = [] if self.settings.sample_steps else state.log_history
            keep_past_rows(self.run.samples, state.global_step, history, lambda row: True)

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        if not self.settings.sample_steps:
            self._draw(state, model)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        # the step before is saved by now, if it is saved at all: a sample that dies costs nothing of it
        every = self.settings.sample_steps
        if every and state.global_step and state.global_step % every == 0:
            self._draw(state, model)

    on_train_end = on_step_begin

    def _draw(self, state: TrainerState, model: PreTrainedModel) -> None:
        num_tokens, num_left_out = self.settings.sample_tokens, 0
        for prompt in self.prompts if num_tokens else ():
            text = sample_text(model, self.tokenizer, prompt, num_tokens, self.settings.sampling)
            if text is None:
                num_left_out += 1
            elif state.is_world_process_zero:
                append_row(self.run.samples, {"step": state.global_step, "prompt": prompt, "text": text})
        if num_left_out and state.is_world_process_zero:
            what = f"{num_left_out} of {len(self.prompts)} samples left out"
            print(f"step {state.global_step}: {what}: {NOT_FINITE}", file=sys.stderr, flush=True)


class NonFiniteLogits(LogitsProcessor):
    """Notice logits from which no token can be drawn, and replace them: ranks generate to the same end all the same."""

    found: torch.Tensor | bool = False

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        # the largest is NaN if one is; minus infinity is what a model gives a token that it never writes
        finite = logits.amax(-1, keepdim=True).isfinite()
        self.found = ~finite.all() | self.found  # no `or`, which would wait for the device at each token
        return torch.where(finite, logits, 0.0)


def prompts_of(recipe: Recipe) -> list[str]:
    prompt = recipe.evaluation.prompt
    return [prompt] if isinstance(prompt, str) else prompt


def sample_text(
    model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, num_tokens: int, sampling: Sampling = DEFAULT
) -> str | None:
    """Continue `prompt` by at most `num_tokens` tokens, fewer if the model's positions end; None: no finite logits.

    It is taken for the beginning of a document (`encode_start`). Random generators and the model's mode are the same
    afterwards. Under ZeRO-3 every rank must call it with the same arguments.
    """
    ids = encode_start(tokenizer, prompt)
    # Positions beyond those of training would be noise, or an error of learned ones.
    num_tokens = min(num_tokens, model.config.max_position_embeddings - len(ids))
    settings: dict[str, Any] = {"do_sample": False}  # `generate` does not take temperature 0
    if sampling.temperature:
        # for `generate`, top_k 0 means all tokens
        among = {"top_k": sampling.top_k or 0, "top_p": sampling.top_p}
        settings = {"do_sample": True, "temperature": float(sampling.temperature), **among}
    if num_tokens > 0:
        with seeded(sampling.seed, model.device):
            found = continued(model, tokenizer, ids, num_tokens, **settings)
        if found is None:
            return None
        ids += found
    return tokenizer.decode(ids, skip_special_tokens=True)


@torch.no_grad()
def continued(
    model: PreTrainedModel, tokenizer: Tokenizer, ids: list[int], num_tokens: int, **settings: Any
) -> list[int] | None:
    """Return at most `num_tokens` tokens that follow `ids`, or None if a token's logits are not finite.

    settings: of `generate`. Every rank must call it.
    """
    prompt = torch.tensor([ids], device=next(model.parameters()).device)
    non_finite = NonFiniteLogits()
    with evaluation_mode(model), long_work():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=num_tokens,
            pad_token_id=tokenizer.eos_token_id,  # else transformers warns at each text
            use_cache=has_cache(model),  # the config says False, which is right for training
            tokenizer=tokenizer,  # for stop strings
            logits_processor=LogitsProcessorList([non_finite]),
            # each token is progress: with parameters on NVMe it takes so long that the watch could take it for a hang
            streamer=SimpleNamespace(put=lambda tokens: work_done(), end=lambda: None),
            # Until no rank needs another token: ranks may exchange in every forward pass. transformers asks for it
            # under ZeRO-3 alone, and split experts exchange at every stage.
            synced_gpus=rank_and_world_size()[1] > 1,
            **settings,
        )
    return None if non_finite.found else output[0, len(ids) :].tolist()


def has_cache(model: PreTrainedModel) -> bool:
    """Return whether `generate` may keep what it has computed of earlier tokens."""
    if "cache" not in inspect.signature(model.forward).parameters:
        return False  # a class of one's own
    try:
        # transformers 5.24 asks for a length that a cache without a layer of attention does not know
        DynamicCache(config=model.config).get_seq_length()
    except ValueError:
        return False
    return True


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text without special tokens, as documents are encoded for training."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators inside the block; afterwards they are as before."""
    # Only the model's device: a fork of all GPUs of a machine would start a context on each.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Switch dropout off inside the block; afterwards the model has the mode it had."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def encode_start(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode the beginning of a document, with the token that all of them begin with, if the data has one.

    An empty text without one is the end-of-text token, behind which every document begins.
    """
    # a tokenizer may be another class than transformers' own
    prefix = getattr(tokenizer, "init_kwargs", {}).get(DOCUMENT_PREFIX)
    first = [tokenizer.convert_tokens_to_ids(prefix)] if isinstance(prefix, str) else []
    return [*first, *encode(tokenizer, text)] or [tokenizer.eos_token_id]
