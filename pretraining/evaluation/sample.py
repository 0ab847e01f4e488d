"""A text sample from a model, exported or in training."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pretraining.evaluation.tokens import encode
from pretraining.runtime.heartbeat import long_work, work_done


@torch.no_grad()
def sample_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
) -> str:
    """Continue `prompt` by at most `num_tokens` tokens, fewer where the model's positions end.

    An empty prompt starts from the end-of-text token, as every document does. temperature 0 is greedy. Random
    generators and the model's mode are left as they were. Under ZeRO-3 every rank must call it alike.
    """
    ids = encode(tokenizer, prompt) or [tokenizer.eos_token_id]
    room = model.config.max_position_embeddings - len(ids)
    if min(num_tokens, room) <= 0:
        return tokenizer.decode(ids, skip_special_tokens=True)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": top_k}
        if temperature
        else {"do_sample": False}
    )
    prompt_ids = torch.tensor([ids], device=model.device)
    with seeded(seed, model.device), evaluation_mode(model), long_work():
        output = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=min(num_tokens, room),
            pad_token_id=tokenizer.eos_token_id,
            use_cache=True,
            streamer=TokensCounted(),
            **sampling,
        )
    return tokenizer.decode(output[0], skip_special_tokens=True)


class TokensCounted:
    """What `generate` streams its tokens to: each is progress, with parameters on NVMe a slow one."""

    def put(self, tokens: torch.Tensor) -> None:
        work_done()

    def end(self) -> None:
        """Nothing is left to do."""


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """torch's generators at `seed` inside the block, where they were afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """No dropout inside the block; afterwards the mode it had."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
