"""Fit laws to the points of a ladder: the loss by size and tokens, the best rate and batch, scores by loss.

A law that the points cannot carry is refused in one line, or has notes that say which of its constants they leave open.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
from scipy.optimize import curve_fit
from scipy.special import expit

from pretraining.errors import UserError
from pretraining.planning.ladder import LossFit
from pretraining.planning.scaling_laws import ParametricLoss

FEWEST = 3
"""Sizes and token counts: each power law has a scale, an exponent, and shares the floor with the other."""
FEWEST_POINTS = 6
"""One more than the law has constants."""
DELTA = 1e-3
"""Huber's delta, on logarithms (Hoffmann et al. 2022, D.2): the least, for runs that are nearly without noise."""
HUBER = 1.345
"""Delta over the noise, at which 95 % of the points' information is used if the noise is normal (Huber 1981)."""
EXPONENTS = np.geomspace(0.05, 1.5, 8)
"""From which a fit starts, for both powers."""
STARTS, DRAWS = 6, 100
WIDE = 0.5
"""Share of a constant by which its interval may be wide before a note says so."""
VALUES, OPTIONS = ("rate", "batch"), {"rate": "rates", "batch": "batches"}
"""What a grid varies, and the options of the command for it."""
SIGNAL = 0.8
"""Share of a score's variance that the loss must explain (R squared)."""


def check_enough(points: np.ndarray) -> None:
    """Refuse points that no law can be fitted to. points: [sizes and tokens, runs], rows behind them are not read."""
    if _is_enough(points):
        return
    counts = [len(np.unique(row)) for row in points[:2]]
    distinct = np.unique(points[:2], axis=1).shape[1]
    raise UserError(
        f"the ladder cannot be fitted: its {points.shape[1]} runs with a loss, {distinct} of them different, have "
        f"{counts[0]} sizes and {counts[1]} token counts; it needs {FEWEST} of each and {FEWEST_POINTS} different "
        "runs: add --sizes or --points"
    )


def fit_loss(parameters: Sequence[float], tokens: Sequence[float], losses: Sequence[float]) -> LossFit:
    """Fit L(N, D) = E + A / N^alpha + B / D^beta by Huber's loss on logarithms, from many starts.

    Hoffmann et al. 2022, appendix D.2. Besiroglu et al. 2024 show what goes wrong there: an optimiser that stops early,
    and constants that are rounded. So each start is the least-squares optimum of E, A and B at fixed exponents, and the
    best of them are followed to the end.

    Raises:
        UserError: the points are too few, or do not differ in size or in tokens.
    """
    points = np.array([parameters, tokens, losses], dtype=float)
    points = points[:, np.isfinite(points).all(axis=0) & (points > 0).all(axis=0)]
    check_enough(points)
    middle = np.log(points[:2]).mean(axis=1)
    logs, target = np.log(points[:2]) - middle[:, None], np.log(points[2])
    # where the loss begins to grow straight follows from the noise, once that is known
    first = _log_losses(_optimum(logs, target, DELTA), logs)[0] - target
    delta = max(DELTA, HUBER * 1.4826 * float(np.median(np.abs(first))))
    best = _optimum(logs, target, delta)
    fitted = _log_losses(best, logs)[0][0]
    residuals = target - fitted
    spare = max(1, points.shape[1] - best.shape[1])
    noise = float(np.sqrt((residuals**2).sum() / spare))
    # residuals of a fit are smaller than the noise: it followed some of it
    wider = (residuals - residuals.mean()) * np.sqrt(points.shape[1] / spare)
    drawn = fitted + np.random.default_rng(0).choice(wider, (DRAWS, len(wider)))
    draws, _ = _descended(np.tile(best, (DRAWS, 1)), logs, drawn, delta)
    laws = [_as_law(each, middle) for each in draws]
    sizes, without, left_out = points[0], [], None
    shortest = np.array([points[1][sizes == size].min() for size in sizes])
    smaller = sizes < sizes.max()
    for kept in (sizes > sizes.min(), smaller, points[1] > shortest):
        if not _is_enough(points[:, kept]):
            continue
        without.append(_as_law(_optimum(logs[:, kept], target[kept], delta)[0], middle))
        if kept is smaller:
            foreseen = [without[-1].loss(*place) for place in points[:2, ~kept].T]
            errors = foreseen / points[2, ~kept] - 1
            left_out = float(errors[np.abs(errors).argmax()])
    law, notes = _as_law(best[0], middle), (*_too_short(points), *_notes(best[0], draws))
    return LossFit(law, tuple(laws), tuple(without), noise, left_out, notes)


def _log_losses(constants: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return log L [runs, points], and its derivatives [runs, points, constants].

    constants: log E, log A / N0^alpha, log B / D0^beta, log alpha, log beta of each run. logs: of N / N0 and D / D0
    [2, points].
    """
    powers = np.exp(constants[:, 3:, None]) * logs
    terms = np.exp(constants[:, :3, None] - np.concatenate([np.zeros_like(powers[:, :1]), powers], axis=1))
    total = terms.sum(axis=1)
    shares = terms / total[:, None]
    slopes = np.concatenate([shares, -shares[:, 1:] * powers], axis=1)
    return np.log(total), slopes.transpose(0, 2, 1)


def _optimum(logs: np.ndarray, target: np.ndarray, delta: float) -> np.ndarray:
    """Return the best constants [1, constants] for these logarithms of losses, from every pair of EXPONENTS."""
    exponents = np.array([*product(EXPONENTS, EXPONENTS)])
    # relative errors are nearly those of the logarithms
    powers = np.exp(-exponents[:, None] * logs.T)
    columns = np.concatenate([np.ones_like(powers[..., :1]), powers], axis=2) * np.exp(-target)[:, None]
    scales = _solved((columns[..., None] * columns[..., None, :]).sum(axis=1), columns.sum(axis=1))
    starts = np.log(np.concatenate([np.maximum(scales, 1e-6), exponents], axis=1))
    costs = _huber(_log_losses(starts, logs)[0] - target, delta)
    ends, costs = _descended(starts[costs.argsort()[:STARTS]], logs, target, delta)
    return ends[[costs.argmin()]]


def _descended(
    starts: np.ndarray, logs: np.ndarray, targets: np.ndarray, delta: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return where Huber's loss is least near each start [runs, constants], and how large it is there [runs].

    The method of Levenberg and Marquardt, to the last digit: else it stops early in a long valley (Besiroglu et al.
    2024). A valley without an end makes a difference in the last digit a large one. So all sums have a fixed order:
    those of BLAS, and of scipy's least_squares, depend on where in memory the numbers are.

    targets: logarithms of losses, [points] or [runs, points].
    """
    constants, damping = starts, np.full(len(starts), 1e-3)
    fitted, slopes = _log_losses(constants, logs)
    costs = _huber(fitted - targets, delta)
    for _ in range(500):
        off = fitted - targets
        weighted = slopes * (delta / np.maximum(np.abs(off), delta))[..., None]
        curvature = (weighted[..., None] * slopes[..., None, :]).sum(axis=1)
        extent = np.einsum("rii->ri", curvature)
        extent += damping[:, None] * np.maximum(extent, 1e-9)
        tried = constants - _solved(curvature, (weighted * off[..., None]).sum(axis=1))
        with np.errstate(over="ignore", invalid="ignore"):
            there, steeper = _log_losses(tried, logs)
            reached = _huber(there - targets, delta)
        is_better = reached < costs
        damping = np.clip(np.where(is_better, damping / 10, damping * 10), 1e-12, 1e12)
        if not is_better.any() and damping.min() >= 1e12:
            break
        constants = np.where(is_better[:, None], tried, constants)
        fitted, costs = np.where(is_better[:, None], there, fitted), np.where(is_better, reached, costs)
        slopes = np.where(is_better[:, None, None], steeper, slopes)
    return constants, costs


def _huber(off: np.ndarray, delta: float) -> np.ndarray:
    """Return the sum of Huber's loss over the points [runs, points]."""
    size = np.abs(off)
    near = np.minimum(size, delta)
    return (near * (size - near / 2)).sum(axis=1)


def _solved(matrices: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Solve symmetric positive definite systems [runs, n, n] by elimination, in a fixed order."""
    rows = np.concatenate([matrices, right[..., None]], axis=2)
    for place in range(rows.shape[1]):
        pivot = rows[:, place] / rows[:, place, place, None]
        rows -= rows[:, :, place, None] * pivot[:, None]
        rows[:, place] = pivot
    return rows[..., -1]


def _as_law(constants: np.ndarray, middle: np.ndarray) -> ParametricLoss:
    floor, size, length = constants[:3]
    alpha, beta = np.exp(np.minimum(constants[3:], 600.0))
    # a number that JSON can hold, where sizes explain nothing and the exponent has run away
    scales = np.exp(np.minimum([floor, size + alpha * middle[0], length + beta * middle[1]], 600.0))
    lowest, of_size, of_tokens = scales.tolist()
    return ParametricLoss(lowest, of_size, of_tokens, float(alpha), float(beta), "a ladder")


def _is_enough(points: np.ndarray) -> bool:
    distinct = np.unique(points[:2], axis=1).shape[1]
    return distinct >= FEWEST_POINTS and all(len(np.unique(row)) >= FEWEST for row in points[:2])


def _too_short(points: np.ndarray) -> Iterator[str]:
    """Say if the loss falls faster and faster: in this law each doubling of the tokens brings less than the one before.

    It does so early in training, before a power law begins; a forecast from there is too high.
    """
    bends = []
    for size in np.unique(points[0]):
        _, tokens, losses = np.log(points[:, points[0] == size])
        order = np.unique(tokens, return_index=True)[1]
        bends += np.diff(np.diff(losses[order]) / np.diff(tokens[order])).tolist()
    # one and a half standard errors: chance alone says it of one ladder in ten
    if len(bends) >= FEWEST and np.mean(bends) < -1.5 * np.std(bends, ddof=1) / np.sqrt(len(bends)):
        what = "the loss falls faster from one token count to the next"
        yield f"{what}: the runs are too short for a law, and the forecast is too high; raise --longest"


def _notes(best: np.ndarray, draws: list[np.ndarray]) -> tuple[str, ...]:
    """Say which constants the points leave open (Besiroglu et al. 2024): the forecast is then good near the ladder."""
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    low, high, values = (np.exp(each[[0, 3, 4]]) for each in (low, high, best))
    names = ("the floor E", "the exponent of the size", "the exponent of the tokens")
    return tuple(
        f"the points leave {name} open: {value:.3g} ({a:.3g} to {b:.3g})"
        for name, value, a, b in zip(names, values, low, high, strict=True)
        if b - a > WIDE * max(value, 1e-9)
    )


def best_values(
    cells: Sequence[tuple[float, float]],
    values: Sequence[tuple[float, float]],
    losses: Sequence[float],
    place: tuple[float, float],
    batch: float,
) -> tuple[dict[str, tuple[float, float, float]], list[str]]:
    """Find the best rate and batch at a size and tokens, from a grid of both in several cells (N, D).

    In every cell log L is a paraboloid in the logarithms of rate and batch, of one curvature everywhere, around a
    minimum that is linear in log N and log D (power laws, as in Li et al. 2025 and Bjorck et al. 2024). Its axes are
    aslant: a larger batch wants a larger rate. That is linear in its products, so that least squares solve it whole.

    cells: sizes and tokens of the runs. values: (rate, tokens of a step) of each. losses: not finite where a run
    diverged. place: size and tokens that are asked for. batch: tokens of a step there.

    Returns:
        {"rate", "batch": together, if they have a minimum; "rate_at_batch": the best rate at `batch`}, without those
        of which the grid has one value, each with the ends of its interval; and notes on what the grid does not show.
    """
    kept = np.isfinite(losses)
    logs = np.log(np.array([*zip(*cells, strict=True), *zip(*values, strict=True)], dtype=float))[:, kept]
    target = np.log(np.array(losses)[kept])
    cell, tried = _cells(logs)
    count, rows = int(cell.max()) + 1, [2 + row for row in (0, 1) if tried[row] >= FEWEST]
    # what the cells do not show is a column of zeros, for which least squares give 0
    middle, shown = logs.mean(axis=1), np.ptp(logs[:2], axis=1) > 0.1
    logs = logs - middle[:, None]
    around = np.stack([np.ones_like(target), *(logs[:2] * shown[:, None])])
    size, tokens = (np.log(place) - middle[:2]) * shown
    pairs = [(a, b) for a in range(len(rows)) for b in range(a, len(rows))]
    products = [logs[rows[a]] * logs[rows[b]] * (1 if a == b else 2) for a, b in pairs]
    pulls = [-2 * logs[row] * column for row in rows for column in around]
    matrix = np.stack([*np.eye(count)[:, cell], *products, *pulls], axis=1)

    def minima(weights: np.ndarray) -> dict[str, float]:
        """Return the logarithms of the best values at `place`, each cell weighted by how often it was drawn."""
        root = np.sqrt(weights[cell])
        solution = np.linalg.lstsq(matrix * root[:, None], target * root, rcond=None)[0][count:]
        curvature = np.zeros((len(rows), len(rows)))
        for (a, b), value in zip(pairs, solution, strict=False):
            curvature[a, b] = curvature[b, a] = value
        pull = solution[len(pairs) :].reshape(len(rows), 3) @ [1.0, size, tokens]
        found = {}
        if rows and np.linalg.eigvalsh(curvature).min() > 0:
            lowest = np.linalg.solve(curvature, pull) + middle[rows]
            found = {VALUES[row - 2]: value for row, value in zip(rows, lowest, strict=True)}
        if len(rows) == 2 and curvature[0, 0] > 0:
            at_batch = pull[0] - curvature[0, 1] * (np.log(batch) - middle[3])
            found["rate_at_batch"] = at_batch / curvature[0, 0] + middle[2]
        return found

    best, random = minima(np.ones(count)), np.random.default_rng(0)
    # cells are drawn whole: their runs share what is special to a size
    draws = [minima(np.bincount(random.integers(0, count, count), minlength=count)) for _ in range(DRAWS)]
    answers = {}
    for name, value in best.items():
        drawn = [draw[name] for draw in draws if name in draw] or [-np.inf, np.inf]
        low, high = np.quantile(drawn, [0.05, 0.95])
        # in digits that do not depend on where in memory the numbers are
        ends = np.exp([value, min(value, low), max(value, high)])
        answers[name] = tuple(float(f"{end:.6g}") for end in ends)
    missing = [name for name, number in zip(VALUES, tried, strict=True) if number > 1 and name not in best]
    return answers, [f"the grid shows no best {name}: widen --{OPTIONS[name]}" for name in missing]


def _cells(logs: np.ndarray) -> tuple[np.ndarray, list[int]]:
    """Return the cell of each run, and how many rates and batches a cell has at most.

    logs: of size, tokens, rate and batch [4, runs].
    """
    # token counts of a size are doublings, as near as whole steps come: with another batch they differ a little
    shortest = np.array([logs[1][logs[0] == size].min() for size in logs[0]])
    places = [logs[0], np.rint((logs[1] - shortest) / np.log(2))]

    def numbered() -> np.ndarray:
        return np.unique(np.stack(places), axis=1, return_inverse=True)[1].ravel()

    cell, values = numbered(), logs[2:].round(1)
    tried = [max(len(np.unique(row[cell == each])) for each in set(cell)) for row in values]
    # two values show a slope and no minimum: runs of each are then cells of their own
    places += [row for row, number in zip(values, tried, strict=True) if number < FEWEST]
    return numbered(), tried


def fit_score(losses: Sequence[float], scores: Sequence[float]) -> Callable[[float], float] | None:
    """Return a task's score by the loss, as a sigmoid (Bhagia et al. 2024); None if the loss explains too little of it.

    A score moves from its level of chance to its highest as the loss falls; the task has a signal if that explains
    SIGNAL of its variance.
    """
    x, y = np.array(losses, dtype=float), np.array(scores, dtype=float)
    x, y = (values[np.isfinite(x) & np.isfinite(y)] for values in (x, y))
    if len(x) < FEWEST_POINTS or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None

    def score(loss: np.ndarray, chance: float, rise: float, steepness: float, middle: float) -> np.ndarray:
        return chance + rise * expit(-steepness * (loss - middle))

    start = (float(y.min()), float(np.ptp(y)), 4 / float(np.ptp(x)), float(np.median(x)))
    try:
        found, _ = curve_fit(score, x, y, start, maxfev=10_000)
    except RuntimeError:  # no end was found
        return None
    explained = 1 - ((score(x, *found) - y) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    has_signal = explained >= SIGNAL and found[1] * found[2] > 0
    return (lambda loss: float(score(loss, *found))) if has_signal else None
