"""What a mixture promises and what the schedule gives: as data for mixture.json, as text for the start of a run."""

from collections.abc import Sequence

from pretraining.data.mixing.schedule import Schedule

LIKE = 0.02
"""Difference of a source's shares below which two mixtures are alike."""
MOST_NAMED = 3


def mixture_table(
    schedule: Schedule,
    names: Sequence[str],
    num_blocks: Sequence[int],
    sequence_length: int,
    num_samples: int,
) -> dict:
    """Per stage and over the first `num_samples` samples of the run: shares, tokens and epochs of each source.

    "promised" is the printed share, as a fraction of whole numbers beside its decimal value; "realised" is what
    the schedule really draws, which never differs by a whole block.
    """
    stages = []
    for stage in schedule.stages:
        stop = num_samples if stage.stop is None else min(stage.stop, num_samples)
        if stop > stage.start:
            stages.append(_part(schedule, names, num_blocks, sequence_length, stage.start, stop, stage))
    return {
        "sequence_length": sequence_length,
        "samples": num_samples,
        "tokens": num_samples * sequence_length,
        "stages": stages,
        "run": _part(schedule, names, num_blocks, sequence_length, 0, num_samples),
    }


def _part(schedule, names, num_blocks, length, start, stop, stage=None) -> dict:
    """One stage, or the whole run: its samples and a row a source."""
    drawn = schedule.realised(stop) - schedule.realised(start)
    due = [
        after - before
        for after, before in zip(schedule.promised(stop), schedule.promised(start), strict=True)
    ]
    rows = []
    for source, name in enumerate(names):
        draws, wanted = int(drawn[source]), due[source]
        row = {"source": name, "promised_share": float(wanted / (stop - start))}
        if stage is not None:
            row["promised_counts"] = [stage.counts[source], stage.period]
        row |= {
            "realised_share": draws / (stop - start),
            "promised_tokens": float(wanted * length),
            "realised_tokens": draws * length,
            "source_tokens": num_blocks[source] * length,
            "epochs": draws / num_blocks[source],
        }
        rows.append(row)
    return {"first_sample": start, "samples": stop - start, "sources": rows}


def validation_note(table: dict, validation_tokens: Sequence[int]) -> str | None:
    """One sentence to stand beside a training loss and a validation loss; None if both are of the same mixture.

    table: as `mixture_table` makes it. validation_tokens: [sources] tokens of the validation split, which keeps the
    sources' natural proportions.
    """
    total, rows = sum(validation_tokens), table["run"]["sources"]
    if not total:
        return None
    shares = [
        (row["source"], row["realised_share"], n / total)
        for row, n in zip(rows, validation_tokens, strict=True)
    ]
    if all(abs(trained - validated) < LIKE for _, trained, validated in shares):
        return None
    furthest = sorted(shares, key=lambda share: -abs(share[1] - share[2]))[:MOST_NAMED]
    named = ", ".join(f"{name} {trained:.0%} and {validated:.0%}" for name, trained, validated in furthest)
    return f"Training and validation hold different shares of the sources ({named}): compare their losses by source."


def format_table(table: dict) -> str:
    """The table as text: a row a source for each stage, and for the run where there are several stages."""
    width = max(6, *(len(row["source"]) for row in table["run"]["sources"]))
    heads = ("promised", "realised", "tokens", "epochs")
    lines = [f"{'source':<{width}}{heads[0]:>12}{heads[1]:>12}{heads[2]:>20}{heads[3]:>10}"]
    several = len(table["stages"]) > 1
    for number, stage in enumerate(table["stages"], 1):
        if several:
            lines.append(f"stage {number}: {stage['samples'] * table['sequence_length']:,} tokens")
        lines += [_line(row, width) for row in stage["sources"]]
    if several:
        lines.append(f"run: {table['tokens']:,} tokens")
        lines += [_line(row, width) for row in table["run"]["sources"]]
    if table.get("validation_note"):
        lines.append(table["validation_note"])
    return "\n".join(lines)


def _line(row: dict, width: int) -> str:
    promised, realised = row["promised_share"], row["realised_share"]
    return (
        f"{row['source']:<{width}}{promised:>12.6%}{realised:>12.6%}"
        f"{row['realised_tokens']:>20,}{row['epochs']:>10.3f}"
    )
