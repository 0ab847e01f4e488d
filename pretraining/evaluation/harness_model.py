"""A causal language model in the form that lm-eval's tasks use.

It is a separate module because it imports an optional package.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from pretraining.evaluation.likelihood import Pair, Passes, Score, ScoringStopped, score
from pretraining.evaluation.sampling import TokensCounted, encode, evaluation_mode, passes_together
from pretraining.runtime.heartbeat import long_work
from pretraining.runtime.process_group import rank_groups

PASSED_ON = ("do_sample", "top_k", "top_p")
"""Generation arguments of a task that `generate` takes unchanged."""


class HarnessModel(TemplateLM):
    """Every rank gets all requests, and the ranks share the forward passes: to lm-eval it is one process.

    Args:
        model: wrapped as in training (a DeepSpeed engine, DDP), or bare.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        passes: Passes,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self.passes, self.interrupted = model, tokenizer, passes, interrupted
        self._device = next(model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return encode(self.tokenizer, string)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Score requests of the form ((context, continuation), tokens of the context, tokens of the continuation)."""
        return [tuple(each) for each in self._scored([Pair(*tokens) for _, *tokens in requests])]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        """Sum the log-probability of whole texts: each token once, after as much context as a window holds."""
        # The first window of a text has the end-of-text token as its context.
        settings = {
            "prefix_token": self.prefix_token_id,
            "max_seq_len": self.passes.max_length,
            "context_len": 1,
        }
        windows = [
            [
                Pair(*make_disjoint_window(window))
                for window in get_rolling_token_windows(token_list=self.tok_encode(*request.args), **settings)
            ]
            for request in requests
        ]
        scores = iter(self._scored([window for text in windows for window in text]))
        return [sum(next(scores).log_probability for _ in text) for text in windows]

    def _scored(self, pairs: list[Pair]) -> list[Score]:
        return score(self.model, pairs, self.passes, self.interrupted)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        """Continue up to a stop string, greedy unless the task says otherwise; each rank takes a request a round."""
        groups = rank_groups(self.passes.degrees)
        rank, ranks = groups.evaluating
        texts: list[str | None] = [None] * len(requests)
        # One limit for all requests, because a rank that is done goes on with the longest of a round. Half of the
        # model's positions at most, so that there is room for the question.
        longest = max(normalize_gen_kwargs(request.args[1])["max_gen_toks"] for request in requests)
        most_tokens = min(longest, self.passes.max_length // 2)
        for round_start in range(0, len(requests), ranks):
            if self.interrupted():
                raise ScoringStopped
            # A forward pass may be a collective: a rank that runs out repeats the last request without effect.
            number = min(round_start + rank, len(requests) - 1)
            texts[number] = self._continued(*requests[number].args, most_tokens)
        if groups.world_size == 1:
            return texts
        shares: list = [None] * groups.world_size
        dist.all_gather_object(shares, texts)
        return [next(text for text in column if text is not None) for column in zip(*shares, strict=True)]

    @torch.no_grad()
    def _continued(self, context: str, arguments: dict, most_tokens: int) -> str:
        """Continue one context; no request gets more than `most_tokens` new tokens."""
        settings = normalize_gen_kwargs(arguments)
        # The end of a long context stays: the question comes last.
        ids = encode(self.tokenizer, context)[-(self.passes.max_length - most_tokens) :] or [
            self.eot_token_id
        ]
        prompt = torch.tensor([ids], device=self._device)
        sampling = {key: settings[key] for key in PASSED_ON if key in settings}
        # lm-eval 0.4.13 adds temperature 0 to greedy tasks, which `generate` does not need.
        if settings["do_sample"]:
            sampling["temperature"] = settings["temperature"]
        # An empty stop string would end every text at once.
        stops = [stop for stop in settings["until"] if stop]
        # An engine or DDP wraps the model that has `generate`.
        model = getattr(self.model, "module", self.model)
        with evaluation_mode(model), long_work():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=min(settings["max_gen_toks"], most_tokens),
                pad_token_id=self.eot_token_id,
                use_cache=True,
                streamer=TokensCounted(),
                synced_gpus=passes_together(),
                **({"stop_strings": stops, "tokenizer": self.tokenizer} if stops else {}),
                **sampling,
            )
        # `generate` stops after the stop string: cut it off, as lm-eval does
        text = self.tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True)
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]
