"""`python -m pretraining.evaluation RUN|EXPORT`: validation loss, perplexity, bits per byte and a sample; or scores."""

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
  python -m pretraining.evaluation runs/tiny --json --no-sample
  python -m pretraining.evaluation runs/124m --hellaswag Rowan/hellaswag
  python -m pretraining.evaluation runs/124m/export --tasks arc_easy,lambada_openai --limit 200 --json"""


def main() -> None:
    options = _parse_arguments()
    export = find_export(options.run)
    if options.tasks or options.hellaswag:
        scores = score_export(export, options)
        return print(json.dumps(scores) if options.json else _table(scores))
    results = evaluate_run(export, options)
    print(json.dumps(results, ensure_ascii=False) if options.json else _readable(results))


def find_export(folder: Path) -> Path:
    """The `from_pretrained` folder meant: `folder` itself, or that of the run in it."""
    export = folder if (folder / "config.json").exists() else RunDir(folder).export
    if not (export / "config.json").exists():
        raise UserError(f"{export}: no exported model there; it is written at the end of train.py")
    return export


def score_export(export: Path, options: argparse.Namespace) -> dict[str, float]:
    """{"<task>/<metric>": score} of an exported model; what is asked for is looked at before the model is loaded."""
    from pretraining.evaluation.measures import scorers_of
    from pretraining.evaluation.validation import DEFAULT_BATCH_SIZE

    config, tokenizer = _load(export, "AutoConfig"), _load(export, "AutoTokenizer")
    tasks = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    shape = {"max_length": config.max_position_embeddings, "batch_size": DEFAULT_BATCH_SIZE}
    scorers = scorers_of(tasks, options.hellaswag, tokenizer, options.limit, **shape)
    model = _load_model(export)
    scores = {}
    for scorer in scorers:
        scores |= scorer.measure(model)
    return scores


def evaluate_run(export: Path, options: argparse.Namespace) -> dict:
    """{"loss", "perplexity", "bits_per_byte", "sample"} of a run's export on the run's validation set."""
    run = RunDir(options.run if (options.run / "recipe.json").exists() else export.parent)
    if not run.recipe.exists():
        raise UserError(
            f"{export}: no recipe.json beside it says what it was validated on; give the run's folder, or --tasks"
        )
    recipe = load_recipe(str(run.recipe))
    cache = CacheSettings.of(options.data_cache, options.data_cache_gb)
    data = open_prepared(recipe, options.data_dir, cache)
    return evaluate(export, data, recipe, options)


def evaluate(export: Path, data, recipe, options: argparse.Namespace) -> dict:
    """As `evaluate_run`, of prepared data."""
    from pretraining.evaluation.live_samples import prompts_of
    from pretraining.evaluation.sample import sample_text
    from pretraining.evaluation.validation import Validation

    model, tokenizer = _load_model(export), _load(export, "AutoTokenizer")
    results = Validation.of(validation_by_source(data, recipe), recipe).measure(model)
    results["unigram_bits_per_byte"] = data.manifest["splits"]["validation"]["unigram_bits_per_byte"]
    if options.sample:
        prompt = [*prompts_of(recipe), ""][0] if options.prompt is None else options.prompt
        num_tokens = recipe.evaluation["sample_tokens"] if options.tokens is None else options.tokens
        results["sample"] = sample_text(
            model, tokenizer, prompt, num_tokens, options.temperature, options.top_k, options.seed
        )
    return results


def _load_model(export: Path):
    """The model, on the GPU where there is one."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _load(export, "AutoModelForCausalLM", dtype="auto").to(device)


def _load(export: Path, kind: str, **settings):
    """transformers' `kind` of an export."""
    import transformers
    from safetensors import SafetensorError

    try:
        return getattr(transformers, kind).from_pretrained(export, **settings)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{export}: the export cannot be loaded: {error}; the run's own command exports it again"
        ) from error


def _table(scores: dict[str, float]) -> str:
    width = max(map(len, scores), default=0)
    return "\n".join(f"{name:{width}}  {value:.4f}" for name, value in scores.items())


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
        description="Measure an exported model on its run's validation set and print a sample, or score it.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN|EXPORT", help="run folder, or a from_pretrained folder"
    )
    parser.add_argument(
        "--tasks", metavar="A,B", help="score these instead: lm-eval's tasks, YAML files or folders of them"
    )
    parser.add_argument(
        "--hellaswag", metavar="FILE|NAME", help="score HellaSwag of a .jsonl file or hub name"
    )
    parser.add_argument(
        "--limit", type=positive_integer, metavar="N", help="only the first N items of each task"
    )
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
