"""`python -m pretraining.evaluation RUN|EXPORT`: validation loss, perplexity, bits per byte and a sample; or scores."""

import argparse
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from pretraining.command_line import (
    OneLineParser,
    add_data_source,
    add_trust,
    not_negative_integer,
    not_negative_number,
    positive_integer,
)
from pretraining.data.prepared import open_prepared
from pretraining.data.streaming.cache import ShardCache
from pretraining.errors import UserError, one_line_errors
from pretraining.extend import MODEL, load_code_of_run, load_pretrained
from pretraining.outside.masking import as_json, escaped
from pretraining.planning.quantities import share
from pretraining.recipe import Recipe, load_recipe
from pretraining.recipe.sections import Sampling
from pretraining.runtime.run_folder import RunFolder

EXAMPLES = """examples:
  python -m pretraining.evaluation runs/tiny --prompt "def "
  python -m pretraining.evaluation runs/tiny --json --no-sample
  python -m pretraining.evaluation runs/124m --hellaswag Rowan/hellaswag
  python -m pretraining.evaluation runs/124m/export --tasks arc_easy,lambada_openai --limit 200 --json"""


def main(arguments: list[str] | None = None) -> None:
    options = _parse_arguments(arguments)
    # A run folder has its config in the export, so config.json at the top means an export.
    is_export = (options.run / "config.json").exists()
    export = options.run if is_export else RunFolder(options.run).exported()
    # An export that was given by its own path is in the folder of its run, unless another is named.
    run = RunFolder(options.run if (options.run / "recipe.json").exists() else export.parent)
    if options.of:
        if run.recipe.exists():
            raise UserError(f"--of {options.of}: {export} is in the folder of its run; leave it out")
        run = RunFolder(options.of)
        if not run.recipe.exists():
            raise UserError(f"--of {options.of}: no run folder (no {run.recipe.name} there)")
    recipe = load_recipe(str(run.recipe)) if run.recipe.exists() else None
    if recipe is not None:
        kinds = [MODEL] if options.tasks or options.hellaswag else [MODEL, "metric"]
        load_code_of_run(recipe.extensions, kinds, options.trust_extensions)
    if options.tasks or options.hellaswag:
        scores = score_export(export, recipe, options)
        width = max(map(len, scores), default=0)
        lines = (f"{name:{width}}  {value:.4f}" for name, value in scores.items())
        return print(as_json(scores) if options.json else "\n".join(lines))
    if recipe is None:
        what = (
            "no recipe.json beside it says what it was validated on; name its run with --of, or use --tasks"
        )
        raise UserError(f"{export}: {what}")
    results = evaluate_run(export, recipe, options)
    if options.json:
        return print(as_json(results, ensure_ascii=False))
    print(f"validation loss   {results['loss']:.4f} nats per token")
    print(f"perplexity        {results['perplexity']:.2f}")
    unigram = f"(unigram entropy of the same tokens {results['unigram_bits_per_byte']:.4f})"
    print(f"bits per byte     {results['bits_per_byte']:.4f}  {unigram}")
    sets = [name.removesuffix("_loss") for name in results if name.endswith("_loss")]
    width = max([16, *map(len, sets)])
    for name in sets:
        loss, bits = results[f"{name}_loss"], results[f"{name}_bits_per_byte"]
        print(f"{name:{width}}  {loss:.4f} nats per token, {bits:.4f} bits per byte")
    if "sample" in results:
        text = results["sample"]
        print("no sample: the model's logits are not finite" if text is None else f"\n{escaped(text)}")
    return None


def score_export(export: Path, recipe: Recipe | None, options: argparse.Namespace) -> dict[str, float]:
    """Compute {"<task>/<metric>": score} of an exported model; tasks are opened before the model is loaded."""
    # Imported here, so that --help and wrong arguments do not wait for torch.
    from pretraining.evaluation.scores import Passes
    from pretraining.evaluation.validation import DEFAULT_BATCH_SIZE, build_scorers

    # The light parts first: an unknown task or a missing file is reported before the weights are read.
    config, tokenizer = _load(export, "AutoConfig"), _load(export, "AutoTokenizer")
    tasks = [name.strip() for name in (options.tasks or "").split(",") if name.strip()]
    batch_size = recipe.training.per_device_eval_batch_size if recipe else DEFAULT_BATCH_SIZE
    passes = Passes(config.max_position_embeddings, batch_size)
    try:
        scorers = build_scorers(tasks, options.hellaswag, tokenizer, passes, options.limit)
    except UserError as error:  # it names the key of a recipe
        raise UserError(re.sub(r"^evaluation\.", "--", str(error))) from error
    model = _load_model(export, recipe)
    scores = {}
    for scorer in scorers:
        scores |= scorer.measure(model)
    return scores


def evaluate_run(export: Path, recipe: Recipe, options: argparse.Namespace) -> dict:
    """Measure a run's export on the run's validation set: {"loss", "perplexity", "bits_per_byte", "sample"}."""
    from pretraining.evaluation.sampling import prompts_of, sample_text
    from pretraining.evaluation.validation import Validation, validation_sets

    cache = ShardCache.of(options.data_cache, options.data_cache_gb)
    data = open_prepared(recipe, options.data_dir, cache)
    model, tokenizer = _load_model(export, recipe), _load(export, "AutoTokenizer")
    validation = Validation(validation_sets(data, recipe), recipe)
    results = {**validation.measure(model), "unigram_bits_per_byte": validation.unigram_bits_per_byte()}
    if options.sample:
        # The recipe may list no prompt: then the sample starts from the end-of-text token.
        prompt = [*prompts_of(recipe), ""][0] if options.prompt is None else options.prompt
        num_tokens = recipe.evaluation.sample_tokens if options.tokens is None else options.tokens
        # The recipe's settings, with what the command line says instead.
        typed = {each.name: getattr(options, each.name) for each in fields(Sampling)}
        typed = {name: value for name, value in typed.items() if value is not None}
        sampling = replace(recipe.evaluation.sampling, **typed)
        results["sample"] = sample_text(model, tokenizer, prompt, num_tokens, sampling)
    return results


def _load_model(export: Path, recipe: Recipe | None) -> Any:
    """Load the model, on the GPU if there is one, in the precision of its run's validations if the run is known."""
    import torch
    from transformers.utils import is_torch_tf32_available, logging
    from transformers.utils.import_utils import enable_tf32

    from pretraining.upstream.wide_weights import is_wide, keep_in_fp32

    logging.disable_progress_bar()  # only the results are printed
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if recipe is not None and recipe.weights.keep_in_fp32:
        # A model some of whose weights the run kept in fp32 keeps these so.
        dtype = _load(export, "AutoConfig").dtype
        model = _load(export, "AutoModelForCausalLM", dtype=torch.float32)
        keep_in_fp32(model, recipe.weights.wide_tables, recipe.weights.has_wide, dtype)
        for parameter in model.parameters():
            if not is_wide(parameter):
                parameter.data = parameter.data.to(dtype)
    else:
        model = _load(export, "AutoModelForCausalLM", dtype="auto")
    model = model.to(device)
    if recipe is None:
        return model
    # Weights that the run kept in fp32 (without DeepSpeed, or at stage 0) multiply as they did there.
    training = recipe.training
    if is_torch_tf32_available():
        enable_tf32(bool(training.get("tf32", training.get("bf16"))))
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    half = next((dtype for key, dtype in halves.items() if training.get(key)), None)
    # An export in 16 bit multiplies in 16 bit anyway.
    if half is not None and model.dtype == torch.float32:
        model.forward = torch.autocast(device, half)(model.forward)
    return model


def _load(export: Path, kind: str, **settings: Any) -> Any:
    """Load an export with the class of transformers that is called `kind`."""
    from safetensors import SafetensorError

    try:
        return load_pretrained(kind, export, **settings)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        what = f"the export cannot be loaded: {error}; the run's own command exports it again"
        raise UserError(f"{export}: {what}") from error


def _parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    what = "Measure an exported model on its run's validation set and print a sample, or score it."
    shown = {"description": what, "epilog": EXAMPLES}
    parser = OneLineParser("python -m pretraining.evaluation", **shown, allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, metavar="RUN|EXPORT", help="run folder, or a from_pretrained folder")
    add("--of", type=Path, metavar="RUN", help="the run of an export that is elsewhere (default: beside it)")
    add("--tasks", metavar="A,B", help="score these instead: lm-eval's tasks, YAML files or folders of them")
    add("--hellaswag", metavar="FILE|NAME", help="score HellaSwag of a .jsonl file or hub name")
    add("--limit", type=positive_integer, metavar="N", help="only the first N items of each task")
    add_data_source(parser)
    add("--prompt", help="text to continue (default: the recipe's first evaluation.prompt)")
    what = "length of the sample (default: evaluation.sample_tokens)"
    add("--tokens", type=not_negative_integer, help=what)
    what = "0 is greedy (default: evaluation.sampling of the recipe)"
    add("--temperature", type=not_negative_number, help=what)
    add("--top-k", type=positive_integer, help="draw among so many of the likeliest tokens")
    add("--top-p", type=share, help="draw among the likeliest with this probability together")
    add("--seed", type=not_negative_integer, help="of the draws")
    add("--no-sample", dest="sample", action="store_false", help="measure only")
    add_trust(parser)
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    is_scored = options.tasks is not None or options.hellaswag is not None
    if options.tasks is not None and not options.tasks.strip(" ,"):
        parser.error("--tasks: names no task")
    if (options.seed or 0) >= 1 << 63:
        parser.error(f"--seed: {options.seed} is above 2**63 - 1")
    if options.limit and not is_scored:
        parser.error("--limit: goes with --tasks or --hellaswag")
    for name in ("prompt", "tokens", *(each.name for each in fields(Sampling))):
        if getattr(options, name) is not None and (is_scored or not options.sample):
            parser.error(f"--{name.replace('_', '-')}: is of a sample, and none is drawn here; leave it out")
    return options


if __name__ == "__main__":
    with one_line_errors():
        main()
