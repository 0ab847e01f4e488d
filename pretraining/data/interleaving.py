"""Interleave the sources of a mixture: say which source the i-th sample comes from, and which draw of it that is.

Source s is due T_s(i) samples among the run's first i: a line of slope share_s in each stage. Its j-th draw may
happen once T_s > j - 1 and must have happened when T_s >= j. These windows can always be met, for any shares and
any change of shares: always take the released draw with the earliest deadline (Tijdeman, "The chairman assignment
problem", 1980; Baruah et al., "Proportionate progress", 1996). So at every i each source has had T_s(i), rounded down
or up: less than one sample away from the promise.
"""

import heapq
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, floor, lcm
from typing import NamedTuple

import numpy as np

_NEVER = 1 << 46
"""A deadline, in samples, that no run reaches. As part of a key, with the source's number, it still fits 63 bits."""

MAX_PERIOD = 1 << 20
"""The longest period that is laid out sample by sample; the smallest share is one sample in this many."""

_GRID_STEPS_OF_SMALLEST = 512
"""Grid steps of the smallest share, if the grid can be so fine: then it is within 0.1 % of the wish."""


class InterleavedStage(NamedTuple):
    """Constant shares from sample `start` of the run up to `stop` (None: without end)."""

    start: int
    stop: int | None
    counts: tuple[int, ...]
    """[sources]: samples of each in one period."""

    @classmethod
    def of(cls, start: int, stop: int | None, shares: Sequence[Fraction]) -> "InterleavedStage":
        """Make the stage that promises these shares, rounded to a grid if they need it."""
        return cls(start, stop, tuple(counts_per_period(shares)))

    @property
    def period(self) -> int:
        return sum(self.counts)

    @property
    def shares(self) -> list[Fraction]:
        return [Fraction(count, self.period) for count in self.counts]


class _Cycle(NamedTuple):
    """A piece of the sequence, repeated from sample `start` until the next piece begins."""

    start: int
    drawn: np.ndarray
    """[sources], int64: draws before it."""
    sources: np.ndarray
    """[samples], uint16"""
    ranks: np.ndarray
    """[samples], int32: earlier samples of the same source in this piece."""
    per_cycle: np.ndarray
    """[sources], int64: draws of one repetition."""


class Interleaving:
    """Map sample -> (source, draw) over the stages of a run, in O(1); a source's draws go on from stage to stage."""

    def __init__(self, stages: Sequence[InterleavedStage]):
        self.stages = tuple(stages)
        self.num_sources = len(self.stages[0].counts)
        # T at the beginning of each stage. Fractions: a rounding error would add up over the samples of a run.
        self._dues = [[Fraction(0)] * self.num_sources]
        for stage in self.stages[:-1]:
            length = stage.stop - stage.start
            rows = zip(self._dues[-1], stage.shares, strict=True)
            self._dues.append([due + length * share for due, share in rows])
        self._cycles: list[_Cycle] = []
        drawn = [0] * self.num_sources
        for stage in self.stages:
            drawn = self._lay_out(stage, drawn)
        # For `searchsorted`: the pieces are in the order of their first samples.
        self._starts = np.array([cycle.start for cycle in self._cycles], np.int64)

    def _lay_out(self, stage: InterleavedStage, drawn: list[int]) -> list[int]:
        """Add the stage's pieces: periods until the state repeats, the repetition, the samples before the border."""
        position, seen, pieces = stage.start, {}, []
        # A draw due after the border has another deadline than in the periods before: no window is longer.
        last_regular = None if stage.stop is None else stage.stop - 2 * stage.period
        while last_regular is None or position < last_regular:
            index = len(pieces)
            # How far each source is ahead of its line: the same state goes on with the same periods.
            state = tuple(done - index * count for done, count in zip(drawn, stage.counts, strict=True))
            if state in seen:
                cycle = pieces[seen[state] :]
                # A cycle of one period that was added last can itself be repeated.
                if len(cycle) > 1 or cycle[0] is not self._cycles[-1]:
                    self._add(position, np.concatenate([piece.sources for piece in cycle]), drawn)
                if last_regular is None:
                    return drawn
                # As often as it fits.
                repeated = self._cycles[-1]
                times = (last_regular - position) // len(repeated.sources)
                position += times * len(repeated.sources)
                per_cycle = repeated.per_cycle.tolist()
                drawn = [done + times * more for done, more in zip(drawn, per_cycle, strict=True)]
                break
            seen[state] = index
            piece, after = self._draw(position, position + stage.period, drawn)
            pieces.append(self._add(position, piece, drawn))
            position, drawn = position + stage.period, after
        if position >= stage.stop:
            return drawn
        # One by one up to the stage's border.
        piece, after = self._draw(position, stage.stop, drawn)
        self._add(position, piece, drawn)
        return after

    def _add(self, start: int, sources: np.ndarray, drawn: list[int]) -> _Cycle:
        ranks = np.empty(len(sources), np.int32)
        per_cycle = np.bincount(sources, minlength=self.num_sources)
        # Stable, so that samples of one source keep their order and their ranks count up.
        by_source = np.argsort(sources, kind="stable")
        firsts = np.repeat(np.cumsum(per_cycle) - per_cycle, per_cycle)
        ranks[by_source] = np.arange(len(sources)) - firsts
        self._cycles.append(_Cycle(start, np.array(drawn, np.int64), sources, ranks, per_cycle))
        return self._cycles[-1]

    def draws(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the sources [n] of samples [n] of the run, and which draw of its source each is [n], int64."""
        samples = np.asarray(samples, np.int64)
        # The last piece that starts at or before the sample.
        which = np.searchsorted(self._starts, samples, side="right") - 1
        sources, draws = np.empty_like(samples), np.empty_like(samples)
        for number in np.unique(which):
            chosen, cycle = which == number, self._cycles[number]
            times, places = np.divmod(samples[chosen] - cycle.start, len(cycle.sources))
            found = cycle.sources[places].astype(np.int64)
            sources[chosen] = found
            draws[chosen] = cycle.drawn[found] + times * cycle.per_cycle[found] + cycle.ranks[places]
        return sources, draws

    def realised(self, num_samples: int) -> np.ndarray:
        """Count the run's first `num_samples` samples that come from each source: [sources], int64."""
        if num_samples == 0:
            return np.zeros(self.num_sources, np.int64)
        # By the last sample: at a border, `num_samples` itself belongs to the next piece.
        cycle = self._cycles[int(np.searchsorted(self._starts, num_samples - 1, side="right")) - 1]
        times, rest = divmod(num_samples - cycle.start, len(cycle.sources))
        partial = np.bincount(cycle.sources[:rest], minlength=self.num_sources)
        return cycle.drawn + times * cycle.per_cycle + partial

    def promised(self, num_samples: int) -> list[Fraction]:
        """Return T(num_samples), what each source is due among the first samples of the run: [sources]."""
        number = self._stage_at(num_samples)
        stage, shares = self.stages[number], zip(self._dues[number], self.stages[number].shares, strict=True)
        return [due + (num_samples - stage.start) * share for due, share in shares]

    def _deadline(self, source: int, draw: int) -> int:
        """Return the sample by which draw `draw` (0-based) must have happened: the first i with T(i) >= draw + 1."""
        for stage, dues in zip(self.stages, self._dues, strict=True):
            if not stage.counts[source]:
                continue
            first = stage.start + ceil((draw + 1 - dues[source]) * stage.period / stage.counts[source])
            # Due in this stage; else the shares of a later stage decide.
            if stage.stop is None or first <= stage.stop:
                return first
        return _NEVER

    def _draw(self, start: int, stop: int, drawn: list[int]) -> tuple[np.ndarray, list[int]]:
        """Choose the sources of samples inside one stage, [stop - start], uint16; also return `drawn` after them."""
        num_sources = len(drawn)
        windows = [self._windows(source, start, stop, drawn[source]) for source in range(num_sources)]
        releases = np.concatenate([release for release, _ in windows])
        keys = np.concatenate([due * num_sources + source for source, (_, due) in enumerate(windows)])
        by_release = np.argsort(releases, kind="stable")
        # Take for each sample the smallest key (deadline first) among those released and not yet taken.
        ready, taken, place = [], [], 0
        # A last release that is never reached, so that the inner loop needs no check of the end.
        released, ordered = [*releases[by_release].tolist(), stop + 1], keys[by_release].tolist()
        for i in range(start + 1, stop + 1):
            while released[place] <= i:
                heapq.heappush(ready, ordered[place])
                place += 1
            taken.append(heapq.heappop(ready))
        # A key is deadline x sources + source: ties go to the source named first, on every machine.
        deadlines, chosen = np.divmod(np.array(taken, np.int64), num_sources)
        assert (deadlines > np.arange(start, stop)).all(), "a draw missed its deadline"
        counts = np.bincount(chosen, minlength=num_sources).tolist()
        return chosen.astype(np.uint16), [done + more for done, more in zip(drawn, counts, strict=True)]

    def _windows(self, source: int, start: int, stop: int, drawn: int) -> tuple[np.ndarray, np.ndarray]:
        """Return first and last sample counts [n], [n] of the draws from `drawn` on that may happen by `stop`."""
        number = self._stage_at(start)
        stage, due = self.stages[number], self._dues[number][source]
        last = ceil(self.promised(stop)[source]) if stage.counts[source] else ceil(due)
        draws = range(drawn, max(drawn, last))
        if not stage.counts[source]:
            return np.full(len(draws), start), np.array([self._deadline(source, n) for n in draws], np.int64)
        base, slope = floor(due), stage.counts[source] * due.denominator
        # Whole numbers from here on: thousands of Fractions would take seconds. Beyond 63 bits, Python's integers.
        part = due.numerator - base * due.denominator
        largest = (draws.stop - base + 1) * due.denominator * stage.period
        dtype = np.int64 if largest < 1 << 62 else object
        ahead = np.arange(draws.start - base, draws.stop - base, dtype=dtype)
        behind = (ahead * due.denominator - part) * stage.period
        releases = stage.start + behind // slope + 1
        # Two minus signs round the division up.
        deadlines = stage.start - (-(behind + due.denominator * stage.period) // slope)
        # Only the last draws can have deadlines behind the border, at the shares of a later stage.
        for place in range(len(draws) - 1, -1, -1):
            if stage.stop is None or deadlines[place] <= stage.stop:
                break
            deadlines[place] = self._deadline(source, draws[place])
        return releases.astype(np.int64), deadlines.astype(np.int64)

    def _stage_at(self, sample: int) -> int:
        return max(number for number, stage in enumerate(self.stages) if stage.start <= sample)


def counts_per_period(shares: Sequence[Fraction]) -> list[int]:
    """Return the samples of each source in one period, whose length is their sum: at most `MAX_PERIOD`.

    The counts are exact if the shares have a small common denominator, as decimal weights do. Other shares are rounded
    to a grid of 2**-10 to 2**-20, by largest remainder. A share that is not zero never becomes zero.
    """
    denominator = lcm(*(share.denominator for share in shares))
    if denominator <= MAX_PERIOD:
        return [int(share * denominator) for share in shares]
    smallest, grid = min(share for share in shares if share), 1 << 10
    while grid < MAX_PERIOD and grid * smallest < _GRID_STEPS_OF_SMALLEST:
        grid *= 2
    # At least 1: a share that is not zero must not vanish.
    counts = [max(1, int(share * grid)) if share else 0 for share in shares]
    sources = [source for source, share in enumerate(shares) if share]
    while (missing := grid - sum(counts)) != 0:
        # Counts raised to 1 may take the sum past the grid, so steps go both ways.
        step = 1 if missing > 0 else -1
        movable = [source for source in sources if counts[source] + step > 0]
        furthest = max(movable, key=lambda source: step * (shares[source] * grid - counts[source]))
        counts[furthest] += step
    return counts
