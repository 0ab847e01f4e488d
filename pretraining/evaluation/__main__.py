"""`python -m pretraining.evaluation RUN`: validation loss, perplexity, bits per byte and a sample."""

import argparse
import json
from pathlib import Path

from pretraining.command_line import (
    add_data_source,
    not_negative_integer,
    not_negative_number,
    positive_integer,
)
from pretraining.data import CacheSettings, open_prepared, validation_by_source
from pretraining.errors import UserError, one_line_errors
from pretraining.recipe import load_recipe
from pretraining.run_dir import RunDir

EXAMPLES = """examples:
  python -m pretraining.evaluation runs/tiny --prompt "def "
  python -m pretraining.evaluation runs/tiny --json --no-sample"""


def main() -> None:
    options = _parse_arguments()
    run = RunDir(options.run)
    if not (run.export / "config.json").exists():
        raise UserError(f"{run.export}: no exported model there; it is written at the end of train.py")
    recipe = load_recipe(str(run.recipe))
    cache = CacheSettings.of(options.data_cache, options.data_cache_gb)
    data = open_prepared(recipe, options.data_dir, cache)
    results = evaluate(run.export, data, recipe, options)
    print(json.dumps(results, ensure_ascii=False) if options.json else _readable(results))


def evaluate(export: Path, data, recipe, options: argparse.Namespace) -> dict:
    """{"loss", "perplexity", "bits_per_byte", "sample"} of an exported model on the run's validation set."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    from pretraining.evaluation.live_samples import prompts_of
    from pretraining.evaluation.sample import sample_text
    from pretraining.evaluation.validation import Validation

    transformers_logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = AutoModelForCausalLM.from_pretrained(export, dtype="auto").to(device)
        tokenizer = AutoTokenizer.from_pretrained(export)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{export}: the export cannot be loaded: {error}; the run's own command exports it again"
        ) from error
    results = Validation.of(validation_by_source(data, recipe), recipe).measure(model)
    results["unigram_bits_per_byte"] = data.manifest["splits"]["validation"]["unigram_bits_per_byte"]
    if options.sample:
        prompt = [*prompts_of(recipe), ""][0] if options.prompt is None else options.prompt
        num_tokens = recipe.evaluation["sample_tokens"] if options.tokens is None else options.tokens
        results["sample"] = sample_text(
            model, tokenizer, prompt, num_tokens, options.temperature, options.top_k, options.seed
        )
    return results


def _readable(results: dict) -> str:
    lines = [
        f"validation loss   {results['loss']:.4f} nats per token",
        f"perplexity        {results['perplexity']:.2f}",
        f"bits per byte     {results['bits_per_byte']:.4f}  "
        f"(unigram entropy of the same tokens {results['unigram_bits_per_byte']:.4f})",
    ]
    return "\n".join([*lines, "", results["sample"]] if "sample" in results else lines)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pretraining.evaluation",
        description="Measure an exported model on its run's validation set and print a sample.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, such as runs/tiny")
    add_data_source(parser)
    parser.add_argument("--prompt", help="text to continue (default: the recipe's first evaluation.prompt)")
    parser.add_argument(
        "--tokens", type=not_negative_integer, help="length of the sample (default: evaluation.sample_tokens)"
    )
    parser.add_argument(
        "--temperature", type=not_negative_number, default=0.8, help="0 is greedy (default 0.8)"
    )
    parser.add_argument("--top-k", type=positive_integer, default=50, help="default 50")
    parser.add_argument("--seed", type=not_negative_integer, default=0, help="default 0")
    parser.add_argument("--no-sample", dest="sample", action="store_false", help="measure only")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    with one_line_errors():
        main()
