"""Find which tasks a preparation needs if it takes only the first documents of a source.

The task in which a portion ends is run up to its end and no further. All tasks before it are run whole, and none behind
it. So what is prepared depends on the sources and the portion alone: not on the order of work, and not on what smaller
portions were prepared before.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pretraining.data.manifest import digest_of
from pretraining.data.portions import Portion

if TYPE_CHECKING:
    from pretraining.data.preparation.tokenizing import Tokenize

SURE_SHARE = 0.9
"""Share of the tasks that seem to be needed, which are started at once; the last ones are awaited one by one."""


@dataclass(frozen=True)
class Begun:
    """The first tasks of a source that a data set holds whole, and what they gave."""

    tasks: int
    keys: str
    """Digest of the keys of their texts."""
    documents: int
    """Of training, as the three below."""
    tokens: int
    shards: int
    largest_task: int
    """Tokens of the largest task."""
    validation_documents: int
    skipped: dict
    encoding: dict
    cleaned: dict | None = None

    @classmethod
    def of(cls, source: dict, keys: list[list[str]]) -> "Begun | None":
        """Read it from the source's entry of a manifest; None if its tasks were cut otherwise."""
        if "begun" not in source:
            return None
        begun = cls(**source["begun"])
        return begun if begun.tasks and begun.keys == digest_of(keys[: begun.tasks]) else None

    def to_dict(self) -> dict:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class SourceSurvey:
    """The tasks of one source."""

    used: list[int]
    """Finished ones that the target needs, in their order, behind those that were begun with."""
    bounds: dict[int, Portion]
    """The task in which the target ends, if it is known."""
    missing: list[int]
    """Those to run next; none: the source is finished."""


@dataclass(frozen=True)
class Survey:
    """The tasks of all sources."""

    sources: list[SourceSurvey]

    @property
    def bounds(self) -> dict[int, Portion]:
        return {number: bound for source in self.sources for number, bound in source.bounds.items()}

    @property
    def missing(self) -> list[int]:
        return [number for source in self.sources for number in source.missing]


def survey_source(
    tokenize: "Tokenize",
    numbers: list[int],
    target: Portion | None,
    begun: Begun | None,
    most_tokens: int | None,
) -> SourceSurvey:
    """Look how far the tasks `numbers` of a source have come towards its target; `tokenize` has no bounds.

    most_tokens: of a task, while none is finished; None if nobody knows.
    """
    numbers = numbers[begun.tasks :] if begun else numbers
    if target is None:
        missing = [number for number in numbers if not tokenize.folder(number).is_dir()]
        return SourceSurvey([n for n in numbers if n not in set(missing)], {}, missing)
    used: list[int] = []
    largest, left = 0, target
    if begun:
        largest, left = begun.largest_task, target.less(begun.documents, begun.tokens)
    for place, number in enumerate(numbers):
        bounded = tokenize.bounded({number: left})
        if bounded.folder(number).is_dir():
            if bounded.result(number)["cut"]:
                return SourceSurvey([*used, number], {number: left}, [])
            # It ended before its bound: it is complete, whatever the bound was.
            bounded.folder(number).rename(tokenize.folder(number))
        if tokenize.folder(number).is_dir():
            train = tokenize.result(number)["splits"]["train"]
            if left.is_reached(train["documents"], train["tokens"]):
                return SourceSurvey(used, {number: left}, [number])
            used.append(number)
            largest, left = max(largest, train["tokens"]), left.less(train["documents"], train["tokens"])
            continue
        # Of the next tasks, those that are needed whole if none has more tokens than the largest.
        most = largest or most_tokens
        by_tokens_alone = left.tokens is not None and left.documents is None
        sure = int(SURE_SHARE * left.tokens / most) if by_tokens_alone and most else 1
        if sure > 1:
            waiting = [n for n in numbers[place : place + sure] if not tokenize.folder(n).is_dir()]
            return SourceSurvey(used, {}, waiting)
        return SourceSurvey(used, {number: left}, [number])
    return SourceSurvey(used, {}, [])
