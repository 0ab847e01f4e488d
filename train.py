"""Pretrain a causal language model: recipe x ds_config -> runs/<name>/."""

import argparse
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from pretraining.command_line import on_one_node, parse_train_arguments
from pretraining.data.block_guard import open_guard
from pretraining.data.packed_dataset import build_training_dataset, prefetched
from pretraining.data.prepared import PreparedData, note_repeats, open_prepared
from pretraining.data.streaming.cache import ShardCache
from pretraining.errors import one_line_errors
from pretraining.extend import load_extensions
from pretraining.planning.comparison import measured
from pretraining.planning.gate import judge_plan
from pretraining.planning.run_plan import RunPlan, build_run_plan
from pretraining.planning.screen import print_plan
from pretraining.planning.setup import Setup
from pretraining.recipe import Recipe
from pretraining.recipe.refusals import check_while_preparing, load_recipe_and_ds_config
from pretraining.reporting.analysis import report_end
from pretraining.runtime.console_log import kept_console
from pretraining.runtime.durable_files import one_line_disk_errors
from pretraining.runtime.failures import kept_failure
from pretraining.runtime.imports import prepare_imports
from pretraining.runtime.installation import WORKPLACE
from pretraining.runtime.process_group import from_rank_0, rank_groups
from pretraining.runtime.processes import leave_again_if_stopped
from pretraining.runtime.run_folder import RunFolder

if TYPE_CHECKING:
    from pretraining.checkpoints.manager import CheckpointManager
    from pretraining.training.monitors import Job
    from pretraining.training.trainer import PretrainingTrainer


def main() -> None:
    options = parse_train_arguments()
    recipe, ds_config = load_recipe_and_ds_config(
        options.recipe, options.set, options.deepspeed, options.world_size, options.limit_tokens
    )
    if options.while_preparing:
        check_while_preparing(recipe, options.data_dir)
    if options.plan:
        note_repeats(recipe, options.data_dir)
        return print_plan(recipe, ds_config, options.world_size, options.gpu, options.json, options.nodes)
    if options.rehearse:
        from pretraining.rehearsal.rehearsal import rehearse

        return rehearse(recipe, ds_config, options, open_data, attempt)
    plan = build_run_plan(Setup(recipe, ds_config, options.world_size))
    data = None if options.while_preparing else open_data(recipe, options)
    run = RunFolder(options.output_dir or WORKPLACE / "runs" / recipe.name)
    leave_again_if_stopped(run)  # a launcher that takes a stop for a crash has started it again
    if on_one_node() and options.resume == "auto" and run.is_finished(recipe.to_dict()):
        return report_end(run)
    with kept_console(run), kept_failure(run):
        train(recipe, plan, data, run, options)


def open_data(recipe: Recipe, options: argparse.Namespace) -> PreparedData:
    """Open the finished data, with the mixture of its sources."""
    cache = ShardCache.of(options.data_cache, options.data_cache_gb)
    return open_prepared(recipe, options.data_dir, cache).for_run(recipe)


def train(
    recipe: Recipe, plan: RunPlan, data: PreparedData | None, run: RunFolder, options: argparse.Namespace
) -> None:
    """Train to the end; after a rollback, make another attempt. data: None to prepare it meanwhile."""
    # Plan and errors answer at once: the imports below take seconds.
    prepare_imports()  # no garbage collection, no messages that help nobody
    from pretraining.checkpoints.folders import refuse_foreign_files
    from pretraining.checkpoints.live_files import live_files
    from pretraining.reporting.live import live_report
    from pretraining.runtime.notices import notices
    from pretraining.training.arrival import Arrival
    from pretraining.training.monitors import Job, RunMonitors
    from pretraining.training.ranks import agree_on_shape, joined_ranks

    load_extensions(recipe.extensions)  # the user's own modules, on every rank
    ranks = joined_ranks(recipe.monitors.hang_minutes)
    report = live_report(run, recipe.report.every_seconds)
    sent = notices(run, recipe.name, recipe.monitors.notify)
    copies = live_files(run, recipe.checkpoints.upload)
    with ranks, run.locked(), sent, one_line_disk_errors(run.path), copies, report:
        agree_on_shape(recipe)
        # Asked once more for several nodes: each may see a folder of its own, and rank 0's counts.
        if options.resume == "auto" and from_rank_0(lambda: run.is_finished(recipe.to_dict())):
            return from_rank_0(lambda: report_end(run))
        refuse_foreign_files(run)
        monitors = RunMonitors(run, recipe)
        with closing(Arrival(recipe, options.data_dir, run, monitors.stop)) as arrival:
            data = data or arrival.open(options.resume, options.allow_change)
            while not attempt(Job(recipe, plan, data, run, options, monitors, arrival)):
                pass  # rolled back: the run's journal names the step to go on from and the samples to leave out
    # All is saved and written: from here on a signal ends this process as it ends any other.
    monitors.stop.signals.close()


def attempt(job: "Job") -> bool:
    """Train from where the run is to its end. Return False if a monitor wants a rollback: the caller tries again."""
    from pretraining.checkpoints.manager import CheckpointManager
    from pretraining.checkpoints.resume import begin_run, find_start, roll_back
    from pretraining.evaluation.validation import Evaluator
    from pretraining.model.build import build_from_recipe
    from pretraining.model.given_weights import open_given
    from pretraining.model.loss import build_loss
    from pretraining.training.arguments import build_arguments
    from pretraining.training.ranks import find_machine
    from pretraining.training.trainer import PretrainingTrainer, RunParts

    recipe, data, run, monitors, options = job.recipe, job.data, job.run, job.monitors, job.options
    start = find_start(run, recipe, data, options.resume, options.allow_change, job.plan.layout)
    progress = start.progress(recipe)
    groups = rank_groups(job.plan.degrees)  # of ranks that work on the same samples
    given = None if start.checkpoint else open_given(recipe, data.tokenizer)
    start = start.with_given(run, given.facts if given else None)
    machine = job.plan.machine or find_machine(run, start, data.known_tokens)  # a rehearsal brings its own
    plan = judge_plan(job.plan, machine, options.force)
    arguments = build_arguments(recipe, plan.ds_config, run.path, plan.accumulation_steps, progress.last_step)
    # The guard looks for damaged or degenerate blocks; rollbacks leave samples out.
    guard = open_guard(run.flagged_blocks if groups.is_first_of_sample else None, data, recipe)
    dataset = build_training_dataset(
        data, recipe, progress.first_sample, guard=guard, left_out=start.journal.left_out
    )
    evaluator = Evaluator(recipe, data, data.tokenizer, progress.last_step, run, plan.degrees)
    monitors.begin(plan, start, dataset)  # measures memory from here on, so that the model is counted
    draw = start.checkpoint is None and job.device is None
    with job.device or nullcontext():
        model = build_from_recipe(recipe, data.tokenizer, arguments, draw, given, groups)
    checkpoints = (job.checkpoints or CheckpointManager)(run, recipe, plan, data, start)
    trainer = PretrainingTrainer(
        recipe,
        model,
        arguments,
        loss=build_loss(model, recipe.resolved_loss, groups),
        train_dataset=prefetched(dataset),
        parts=RunParts(evaluator, checkpoints, monitors, job.arrival, groups=groups),
    )
    # If data is still prepared, this waits until the first step's samples are there.
    job.arrival.follow(dataset, progress)
    # The first write of this attempt: all above may refuse.
    begin_run(run, plan, data, checkpoints.identity, model, dataset)
    trainer.train(resume_from_checkpoint=start.checkpoint)
    if (finding := monitors.stability.finding) is not None:
        trainer.release()
        # raises `GaveUp` if the recipe allows no further attempt
        options.resume = roll_back(run, start, recipe, finding.step, finding.sentence)
        return False
    finish(job, plan, trainer, checkpoints)
    return True


def finish(
    job: "Job", plan: RunPlan, trainer: "PretrainingTrainer", checkpoints: "CheckpointManager"
) -> None:
    """Measure the trained model once more, export it, and write down how the run went."""
    from pretraining.checkpoints.export import export_model, keep_changed_export, write_model_card

    recipe, data, run = job.recipe, job.data, job.run
    results = trainer.closing_results()
    environment = checkpoints.identity.environment
    card = write_model_card(recipe.to_dict(), data.latest().manifest, results, environment)
    from_rank_0(lambda: keep_changed_export(run))
    export_model(trainer, data.tokenizer, run.export, card)
    checkpoints.wait_for_upload()
    peak_bytes = job.monitors.memory.of_fullest_rank()
    if trainer.is_world_process_zero():
        speed = measured(run, plan, plan.machine.gpu, peak_bytes)
        run.add_end({**results, "measured": speed})
        report_end(run)


if __name__ == "__main__":
    with one_line_errors():
        main()
