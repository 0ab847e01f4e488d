"""How far evaluation is from what it must equal: lm-eval's own scores, and one plain process.

    python benchmarks/scores.py runs/tiny/export --keep

Prints one JSON line. Of an exported model, on questions of random words in HellaSwag's fields: the largest
difference of an ending's log-probability (nats) to lm-eval's own model class, how many items differ in acc or
acc_norm, and the seconds of both, taken in turn (medians). Of small runs on two ranks under each ZeRO stage: the
largest difference to one plain process of validation, HellaSwag and two lm-eval tasks in the loop, relative where a
value is above 1; and how many samples differ.
"""

from pathlib import Path

from gear import STAGES, largest_difference, middle, parser_of, record, small_runs, timed

BATCH_SIZE = 8


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("export", type=Path, help="a from_pretrained folder")
    parser.add_argument("--items", type=int, default=200, help="questions (default 200)")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    options = parser.parse_args()
    with small_runs() as workshop:
        values = {
            "hellaswag": against_lm_eval(options.export, options.items, options.rounds, workshop.folder),
            "stages": against_plain(workshop),
        }
    record("scores", values, options.keep)


def against_lm_eval(export: Path, num_items: int, rounds: int, folder: Path) -> dict:
    """The same model, tokenizer and items, through both."""
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pretraining.evaluation.scores import HellaSwag, Passes, load_tasks, read_items, score
    from tests.gear.scored_tasks import write_hellaswag_task, write_items

    items = write_items(folder / "hellaswag_val.jsonl", num_items)
    model, tokenizer = (kind.from_pretrained(export) for kind in (AutoModelForCausalLM, AutoTokenizer))
    shape = {"max_length": model.config.max_position_embeddings, "batch_size": BATCH_SIZE}
    task = load_tasks([str(write_hellaswag_task(folder / "task", items))])
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, **shape)
    ours = HellaSwag(read_items(str(items)), tokenizer, Passes(**shape))
    seconds: dict[str, list[float]] = {"ours": [], "lm_eval": []}
    for _ in range(rounds):
        seconds["ours"].append(timed(lambda: ours.measure(model)))
        seconds["lm_eval"].append(timed(lambda: evaluate(theirs, task, bootstrap_iters=0)))
    samples = evaluate(theirs, task, bootstrap_iters=0)["samples"]["hellaswag"]
    samples.sort(key=lambda sample: sample["doc_id"])
    expected = [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]
    found = [each.log_probability for each in score(model, ours.pairs, ours.passes)]
    pairs = zip(ours.items, ours.answers(model), samples, strict=True)
    differing = sum(
        (answer.plain == item.right) != bool(sample["acc"])
        or (answer.normalised == item.right) != bool(sample["acc_norm"])
        for item, answer, sample in pairs
    )
    return {
        "items": num_items,
        "max_abs_difference_nats": largest_difference(found, expected),
        "items_that_differ": differing,
        "seconds": {name: middle(times, 3) for name, times in seconds.items()},
    }


def against_plain(workshop) -> dict[str, dict]:
    """{stage: {"max_difference", "samples_that_differ"}} of runs of ten steps, validated twice."""
    from tests.gear.scored_tasks import write_items, write_tasks

    items = write_items(workshop.folder / "items.jsonl", 20)
    tasks = write_tasks(workshop.folder / "tasks", items)
    settings = (f"evaluation.hellaswag={items}", f'evaluation.tasks=["{tasks}"]')
    plain, found = workshop.plain(settings), {}
    for stage in STAGES:
        run = workshop.run(stage, 2, settings=settings)
        rows = zip(run.validation_rows, plain.validation_rows, strict=True)
        differences = [
            abs(row[name] - other[name]) / max(1.0, abs(other[name]))
            for row, other in rows
            for name in other
            if name.startswith("eval/")
        ]
        differing = sum(a != b for a, b in zip(run.samples, plain.samples, strict=True))
        found[stage] = {"max_difference": max(differences), "samples_that_differ": differing}
    return found


if __name__ == "__main__":
    main()
