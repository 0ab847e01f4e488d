"""Text samples while a run trains: the recipe's prompts after every validation, drawn with the same seed each time."""

from transformers import PreTrainedTokenizerBase, TrainerCallback

from pretraining.evaluation.sample import sample_text
from pretraining.recipe import Recipe
from pretraining.runtime.durable_files import append_row
from pretraining.runtime.run_folder import RunFolder, keep_past_rows


class LiveSamples(TrainerCallback):
    """Rows of samples.jsonl: {"step", "prompt", "text"}, the text with its prompt.

    Every rank draws all samples, the same tokens: under ZeRO-3 a forward pass is a collective. The curve does not
    see it: random generators and training mode are as before.
    """

    def __init__(self, run: RunFolder, recipe: Recipe, tokenizer: PreTrainedTokenizerBase):
        self.run, self.tokenizer = run, tokenizer
        self.prompts, self.num_tokens = prompts_of(recipe), recipe.evaluation["sample_tokens"]

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            keep_past_rows(self.run.samples, state.global_step, state.log_history, lambda row: True)

    def on_evaluate(self, args, state, control, model, **kwargs):
        for prompt in self.prompts if self.num_tokens else ():
            text = sample_text(model, self.tokenizer, prompt, self.num_tokens)
            if state.is_world_process_zero:
                append_row(self.run.samples, {"step": state.global_step, "prompt": prompt, "text": text})


def prompts_of(recipe: Recipe) -> list[str]:
    """The recipe's `evaluation.prompt`, one text or several, as a list."""
    prompt = recipe.evaluation["prompt"]
    return [prompt] if isinstance(prompt, str) else prompt
