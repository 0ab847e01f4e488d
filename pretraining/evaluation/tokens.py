"""From text to the tokens that are scored."""

from transformers import PreTrainedTokenizerBase


def encode_pair(
    tokenizer: PreTrainedTokenizerBase, context: str, continuation: str
) -> tuple[list[int], list[int]]:
    """Tokens of the context and of the continuation as one text is encoded, cut where the context's tokens end.

    Spaces at the end of the context belong to the continuation, as in lm-eval; an empty context is the
    end-of-text token, with which every document begins.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        continuation = context[-spaces:] + continuation
        context = context[:-spaces]
    if not context:
        return [tokenizer.eos_token_id], encode(tokenizer, continuation)
    whole, before = encode(tokenizer, context + continuation), encode(tokenizer, context)
    return whole[: len(before)], whole[len(before) :]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokens of the text alone, as documents are encoded for training."""
    return tokenizer(text, add_special_tokens=False)["input_ids"]
