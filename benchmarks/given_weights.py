"""Weights that exist: logits and memory of a model that begins with them, and ten steps from them.

    python benchmarks/given_weights.py
    python benchmarks/given_weights.py --width 1024 --layers 8 --keep

`logits` and `memory`: a Llama of fp32 weights is saved by transformers and built from its folder by two ranks at every
stage. Printed are the largest difference of the logits to transformers' own, and the peak of the memory of both ranks
(PSS, sampled) above what they had before, over the bytes of the model. Pages that both have mapped count once.

`steps`: train.py on two ranks at every stage, from the export of a finished run, compared with a loop of torch and
transformers alone: their model, AdamW, schedule and clipping, on the same samples. The largest difference of the loss.
"""

import argparse
import json
import time
from pathlib import Path

from gear import (
    STAGES,
    TOKENIZER,
    as_ranks,
    is_rank,
    largest_difference,
    last_json,
    leave_at_once,
    llama_of,
    parser_of,
    proportional_bytes,
    record,
    run_command,
    sampled_peak,
    small_runs,
)

STEPS = 10


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=768, help="of the Llama (default 768)")
    parser.add_argument("--layers", type=int, default=16, help="of the Llama (default 16)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if is_rank():
        return build_on_rank(options)
    with small_runs() as workshop:
        num_bytes, found = save_source(workshop.folder, options), {}
        for stage in STAGES:
            words = as_ranks(2, "--folder", workshop.folder, "--stage", stage)
            found[stage] = last_json(run_command(*words, OMP_NUM_THREADS="1").stdout)
        source = workshop.plain().folder / "export"
        settings = (f"model.initial_weights={source}",)
        reference = plain_loop(workshop, source, settings)
        runs = {stage: workshop.run(stage, 2, settings=settings) for stage in STAGES}
        apart = {stage: largest_difference(run.losses, reference) for stage, run in runs.items()}
        values = {
            "ranks": 2,
            "model_bytes": num_bytes,
            "max_abs_logit_difference": {stage: each["difference"] for stage, each in found.items()},
            "peak_over_model": {stage: round(each["peak"] / num_bytes, 3) for stage, each in found.items()},
            "seconds": {stage: round(each["seconds"], 2) for stage, each in found.items()},
            "steps": STEPS,
            "max_abs_loss_difference": apart,
        }
    record("given_weights", values, options.keep)


def save_source(folder: Path, options: argparse.Namespace) -> int:
    """Save a drawn Llama and its logits; return its bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    config = AutoConfig.for_model(**llama_of(options.width, options.layers))
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder / "source")
    with torch.no_grad():
        torch.save(model(trial_ids()).logits, folder / "logits.pt")
    return sum(each.numel() * each.element_size() for each in model.parameters())


def trial_ids():
    import torch

    return (torch.arange(256).view(2, 128) * 97) % 16384


def build_on_rank(options: argparse.Namespace) -> None:
    """Do one rank's part: build, measure, compute the logits; rank 0 prints both ranks' answer."""
    import deepspeed
    import torch
    import torch.distributed as dist

    from pretraining.ds_config import load_ds_config
    from pretraining.model.build import build_model
    from pretraining.model.counting import build_on_meta
    from pretraining.model.given_weights import GivenWeights
    from pretraining.model.weight_files import open_weights
    from pretraining.recipe import load_recipe
    from pretraining.training.arguments import build_arguments
    from pretraining.training.ranks import join_ranks

    folder, stage, section = options.folder, options.stage, llama_of(options.width, options.layers)
    join_ranks()
    recipe = load_recipe("features/gpt2", ["speed.compile=none"])
    meta, _ = build_on_meta(section)
    arguments = build_arguments(recipe, load_ds_config(stage), folder, 1)
    # What a first build keeps for ever (libraries, buffers of communication) is no copy of the weights.
    small = {"vocab_size": 64, "num_hidden_layers": 1, "intermediate_size": 8}
    build_model({**section, **small}, TOKENIZER, arguments)
    dist.barrier()
    before, began = proportional_bytes(), time.monotonic()
    with sampled_peak(proportional_bytes, 0.003) as peak:
        given = GivenWeights("source", open_weights(folder / "source"), meta)
        given.digest()
        model = build_model(section, TOKENIZER, arguments, given=given).eval()
        seconds = time.monotonic() - began
        for parameter in model.parameters():
            parameter.detach().sum()  # pages of a file take memory once they are read
        dist.barrier()
    gathered = deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == "zero3")
    with torch.no_grad(), gathered:
        # transformers' own loop over modules: no engine is needed for a forward pass of whole weights
        whole = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(**section)).eval()
    plain.load_state_dict(whole, strict=True)
    with torch.no_grad():
        difference = (plain(trial_ids()).logits - torch.load(folder / "logits.pt")).abs().max().item()
    answer = {"difference": difference, "peak": peak[0] - before, "seconds": seconds}
    answers = [answer, answer]
    dist.all_gather_object(answers, answer)
    if dist.get_rank() == 0:
        merged = {"difference": max, "peak": sum, "seconds": max}
        print(json.dumps({key: of(each[key] for each in answers) for key, of in merged.items()}))
    leave_at_once()


def plain_loop(workshop, source: Path, settings: tuple[str, ...]) -> list[float]:
    """The losses of the recipe's ten steps by torch and transformers alone, on the run's samples."""
    import torch
    from transformers import AutoModelForCausalLM, get_scheduler

    from pretraining.data.packed_dataset import build_training_dataset
    from pretraining.data.prepared import open_prepared
    from pretraining.recipe import load_recipe

    recipe = load_recipe(str(workshop.recipe), settings)
    samples = build_training_dataset(open_prepared(recipe, workshop.data).for_run(recipe), recipe, 0)
    model, training = AutoModelForCausalLM.from_pretrained(source).train(), recipe.training
    groups = [
        {"params": [each for each in model.parameters() if (each.ndim >= 2) == decays], "weight_decay": decay}
        for decays, decay in ((True, training.weight_decay), (False, 0.0))
    ]
    betas = (training.adam_beta1, training.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=training.learning_rate, betas=betas, eps=training.adam_epsilon)
    steps = (training.warmup_steps, recipe.num_steps)
    schedule = get_scheduler(training.lr_scheduler_type, optimizer, *steps, training.lr_scheduler_kwargs)
    losses, size = [], recipe.samples_per_step
    for step in range(STEPS):
        batch = [samples[index] for index in range(step * size, (step + 1) * size)]
        ids, labels = (
            torch.stack([torch.as_tensor(each[key]) for each in batch]) for key in ("input_ids", "labels")
        )
        logits = model(ids.long()).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.long().flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    main()
