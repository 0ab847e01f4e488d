"""No source is read more often than the recipe allows."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

from pretraining.data.mixing.schedule import Schedule
from pretraining.recipe.data import WishedStage
from pretraining.schema import problem

DEFAULT_MAX_EPOCHS = 1
"""Of a source in a mixture: repeating text is a choice to be stated (Muennighoff et al. 2023: up to 4 cost little)."""

ROUNDING_SLACK = Fraction(1, 500)
"""By which the rounding of shares to the grid may pass a cap that the shares as written keep."""


def check_epochs(
    schedule: Schedule,
    wished: Sequence[WishedStage],
    num_blocks: Sequence[int],
    max_epochs: Sequence[float | None],
    names: Sequence[str],
    num_samples: int,
    sequence_length: int,
    tokens_per_step: int,
    where: str,
) -> None:
    """UserError where the run's draws of a source are more than `max_epochs` times its blocks.

    It says which max_epochs, weight or budget would do.
    """
    draws = schedule.realised(num_samples)
    for source, name in enumerate(names):
        cap = DEFAULT_MAX_EPOCHS if max_epochs[source] is None else max_epochs[source]
        allowed = Fraction(repr(cap)) * num_blocks[source]
        wish = wished_draws(wished, source, num_samples)
        if wish <= allowed and draws[source] <= allowed * (1 + ROUNDING_SLACK) + 1:
            continue
        needed = ceil(max(wish, int(draws[source])) / num_blocks[source] * 100) / 100
        tokens = num_blocks[source] * sequence_length
        remedies = [f"--set data.sources.{source}.max_epochs={needed:g}", "add text"]
        if len(wished) == 1:
            share, per_step = wished[0].shares[source], Fraction(tokens_per_step, sequence_length)
            remedies += _smaller_share_or_run(share, allowed, num_samples, per_step, tokens_per_step)
        what = (
            f"{name!r} has {tokens:,} tokens and {float(wish) * sequence_length:,.0f} are to be read from it, "
            f"{needed:g} epochs where {cap:g} "
            f"{'is' if cap == 1 else 'are'} allowed; {', or '.join(remedies)}"
        )
        raise problem(where, f"data.sources.{source}", what)


def wished_draws(wished: Sequence[WishedStage], source: int, num_samples: int) -> Fraction:
    """Blocks of a source that the shares as written take from a run of `num_samples`."""
    stops = [num_samples if stage.stop is None else stage.stop for stage in wished]
    return sum((stop - stage.start) * stage.shares[source] for stage, stop in zip(wished, stops, strict=True))


def _smaller_share_or_run(
    share: Fraction, allowed: Fraction, num_samples: int, samples_per_step: Fraction, tokens_per_step: int
) -> list[str]:
    """The largest share, rounded down to 6 digits, and the largest budget of whole steps, that fit."""
    largest = int(allowed / num_samples * 10**6) / 10**6
    steps = int(allowed / share / samples_per_step)
    return [
        *([f"lower its share from {float(share):.6g} to {largest:g}"] if largest else []),
        *([f"--set budget.tokens={steps * tokens_per_step}"] if steps else []),
    ]
