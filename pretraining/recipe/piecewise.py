"""Values that change while a run goes on: `[[0, 0.85], [300, 0.95]]` rises over 300 steps and stays there.

A point is [place, value], or [place, value, "cosine"]. A place is a number of finished steps, a share of the run below
1, or "end". The way from one point to the next is a straight line, or half a wave to a point of "cosine". A value
holds before the first point and after the last one; two points at one place are a jump.
"""

import json
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from pretraining.outside.schema import Wrong

END, COSINE = "end", "cosine"
POINTS = {"type": "array", "minItems": 1, "items": {"type": "array", "minItems": 2}}
Points = list[list[Any]]


def number_or_points(**limits: float) -> dict:
    """Return the JSON Schema of a value that is a number, or given by points."""
    return {"anyOf": [{"type": "number", **limits}, POINTS]}


def place_of(point: list, num_steps: float) -> float:
    place = point[0]
    return num_steps if place == END else place * num_steps if place < 1 else place


def value_at(value: float | Points, step: float, num_steps: float) -> float:
    """Return the value of the step after `step` finished ones, in a run of `num_steps`."""
    if not isinstance(value, list):
        return value
    for earlier, later in pairwise(value):
        first, last = place_of(earlier, num_steps), place_of(later, num_steps)
        if first <= step < last:
            share = (step - first) / (last - first)
            if later[-1] == COSINE:
                share = (1 - math.cos(math.pi * share)) / 2
            return earlier[1] + share * (later[1] - earlier[1])
    return value[0 if step < place_of(value[0], num_steps) else -1][1]


def check_points(value: float | Points | None, at: str, num_steps: float, below: float = math.inf) -> Wrong:
    """Points are well formed, in their order, and their values are from 0 to less than `below`."""
    before = 0.0
    for number, point in enumerate(value if isinstance(value, list) else ()):
        wanted = [0, *point[1:2]] if point[0] == END else point[:2]
        if point[2:] not in ([], [COSINE]) or any(type(each) not in (int, float) for each in wanted):
            what = f'is {json.dumps(point)}; write [place, value], or [place, value, "{COSINE}"]: a place is a number'
            yield f"{at}.{number}", f'{what} of steps, a share of the run below 1, or "{END}"'
        if not 0 <= point[1] < below:
            bound = "" if below == math.inf else f" and less than {below:g}"
            yield f"{at}.{number}", f"has the value {point[1]:g}; it must be at least 0{bound}"
        if (place := place_of(point, num_steps)) < before:
            yield f"{at}.{number}", f"is at step {place:g}, before the one that precedes it ({before:g})"
        before = place


def placed(points: Points, num_steps: float) -> Points:
    """Return the points with places in steps, of a run of `num_steps`; a place in its first step moves to its end."""
    places = [place_of(point, num_steps) for point in points]
    return [[place and max(1.0, place), *point[1:]] for place, point in zip(places, points, strict=True)]


def shrunk(value: float | Points, share: float) -> float | Points:
    """Return the value for a run that is shorter by a factor: places in steps move with its end."""
    if not isinstance(value, list):
        return value
    moved = [place if place == END or place < 1 else max(1.0, place * share) for place, *_ in value]
    return [[place, *point[1:]] for place, point in zip(moved, value, strict=True)]


def shrink_points(places: Iterable[dict], share: float) -> None:
    """Move all points in keywords of a schedule, or rows of `optimizer.groups`, as `shrunk` does."""
    for place in places:
        for key in {"points", "weight_decay", "momentum"} & place.keys():
            place[key] = shrunk(place[key], share)
