"""Pretrain a causal language model: recipe x ds_config -> runs/<name>/."""

from pretraining.command_line import parse_train_arguments
from pretraining.data.block_guard import open_guard
from pretraining.data.mixture import build_mixture
from pretraining.data.packed_dataset import build_training_dataset, step_origins
from pretraining.data.prepared import open_prepared
from pretraining.data.streaming.cache import CacheSettings
from pretraining.errors import one_line_errors
from pretraining.planning.comparison import measured
from pretraining.planning.gate import judge_plan
from pretraining.planning.run_plan import build_run_plan
from pretraining.planning.screen import print_plan
from pretraining.refusals import load_run
from pretraining.runtime.imports import prepare_imports
from pretraining.runtime.restarts import leave_again_if_stopped
from pretraining.runtime.run_folder import RunFolder, describe_environment
from pretraining.schema import REPOSITORY


def main() -> None:
    options = parse_train_arguments()
    recipe, ds_config = load_run(options.recipe, options.set, options.deepspeed, options.world_size)
    if options.plan:
        return print_plan(recipe, ds_config, options.world_size, options.gpu, options.json)
    plan = build_run_plan(recipe, ds_config, options.world_size)
    cache = CacheSettings.of(options.data_cache, options.data_cache_gb)
    data = open_prepared(recipe, options.data_dir, cache)
    run = RunFolder(options.output_dir or REPOSITORY / "runs" / recipe.name)
    leave_again_if_stopped(run)
    if options.resume == "auto" and run.is_finished(recipe.to_dict()):
        from pretraining.reporting.words import report_end

        return report_end(run)
    mixture = build_mixture(data, recipe, recipe.num_samples)
    train(recipe, ds_config, plan, data, mixture, run, options)


def train(recipe, ds_config, plan, data, mixture, run, options) -> None:
    # Plan and errors answer at once: the imports below take seconds.
    prepare_imports()
    from pretraining.checkpoints.disk_errors import one_line_disk_errors
    from pretraining.reporting.live import live_report
    from pretraining.runtime.lock import lock_run
    from pretraining.training.monitors import Monitors
    from pretraining.training.ranks import joined_ranks

    ranks = joined_ranks(recipe.monitors["hang_minutes"])
    report = live_report(run, recipe.report["every_seconds"])
    with ranks, lock_run(run), one_line_disk_errors(run.path), report:
        monitors = Monitors(run, recipe)
        while not pretrain(recipe, ds_config, plan, data, mixture, run, options, monitors):
            options.resume = "auto"  # rolled back: again from an earlier checkpoint, as the journal now says


def pretrain(recipe, ds_config, plan, data, mixture, run, options, monitors) -> bool:
    """Whether the run came to its end; False after a rollback."""
    from pretraining.checkpoints.export import averaged_weights, export_model, write_model_card
    from pretraining.checkpoints.manager import CheckpointManager
    from pretraining.checkpoints.resume import find_start, open_run
    from pretraining.checkpoints.rollback import roll_back
    from pretraining.evaluation.evaluator import Evaluator
    from pretraining.evaluation.sampling import SamplingCallback
    from pretraining.model.build import build_from_recipe, load_tokenizer
    from pretraining.model.loss import build_loss
    from pretraining.reporting.words import report_end
    from pretraining.training.arguments import build_arguments, collate_blocks
    from pretraining.training.optimizers import choose_clipping, choose_optimizer
    from pretraining.training.ranks import device_name, find_machine
    from pretraining.training.trainer import PretrainingTrainer

    start = find_start(run, recipe, data, options.resume, options.allow_change)
    continues = options.resume != "never" and (run.recipe.exists() or start.checkpoint is not None)
    machine = find_machine(run.path, continues, data.train.num_tokens)
    plan, verdict = judge_plan(plan, recipe, ds_config, machine, options.force)

    last_step = start.last_step(recipe)
    arguments = build_arguments(recipe, ds_config, run.path, plan.accumulation_steps, last_step)
    tokenizer = load_tokenizer(data.tokenizer_path)
    evaluator = Evaluator(recipe, data, tokenizer, last_step)

    guard, left_out = open_guard(run.flagged_blocks, data, recipe), start.journal.left_out
    train_dataset = build_training_dataset(
        data, recipe, mixture, start.first_sample(recipe), recipe.most_samples, guard, left_out
    )

    # before the model is built, which is a part of the memory that is measured
    monitors.begin(
        step_origins(train_dataset, recipe, run, start.step), plan, start, train_dataset.num_blocks
    )
    draws_weights = start.checkpoint is None
    language_model = build_from_recipe(recipe, tokenizer, arguments, draws_weights)

    environment = describe_environment(device_name(), plan.world_size)
    checkpoints = CheckpointManager(run, recipe, plan, data, start, environment)
    trainer = PretrainingTrainer(
        model=language_model,
        args=arguments,
        train_dataset=data.prefetched(train_dataset),
        eval_dataset=evaluator.dataset,
        data_collator=collate_blocks,
        compute_loss_func=monitors.loss(build_loss(language_model, recipe.loss)),
        optimizer_cls_and_kwargs=choose_optimizer(recipe),
        clipping=choose_clipping(recipe),
        averaged_weights=averaged_weights,
        validate=evaluator.measure,
        checkpoints=checkpoints,
        recipe_path=recipe.path,
        journal=start.journal,
        step_sizes=recipe.step_sizes,
        schedule_clock=start.schedule_clock(recipe),
        stop=monitors.stop,
        clock=monitors.speed.clock,
        callbacks=[SamplingCallback(run, recipe, tokenizer), *monitors.callbacks(checkpoints)],
    )
    open_run(run, checkpoints.identity, plan, mixture, language_model, tokenizer, train_dataset)
    verdict.keep(run, start.step)
    trainer.train(resume_from_checkpoint=start.checkpoint)
    if monitors.finding is not None:
        trainer.release()
        roll_back(run, start, monitors.finding, recipe)
        return False

    results = {**trainer.closing_validation(), "unigram_bits_per_byte": evaluator.unigram_bits_per_byte()}
    card = write_model_card(recipe.to_dict(), data.manifest, results, environment)
    export_model(trainer, tokenizer, run.export, card)
    checkpoints.wait_for_upload()
    peak_bytes = monitors.memory.of_fullest_rank()
    if trainer.is_world_process_zero():
        run.add_end({**results, "measured": measured(run, recipe, plan.world_size, machine.gpu, peak_bytes)})
        report_end(run)
    return True


if __name__ == "__main__":
    with one_line_errors():
        main()
