"""The page as one text: data, style, scripts and the chart library inside, nothing from a network."""

import html
import json
from functools import cache
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "page"
SCRIPTS = ("vendor/uplot-1.6.32.min.js", "format.js", "charts.js", "sections.js", "main.js")
STYLES = ("vendor/uplot-1.6.32.min.css", "style.css")


def page_text(payload: dict, title: str) -> str:
    """The HTML of a report. Every text of a run is data: the scripts show it as text, never as markup."""
    # Inside a script element only `<` could end it.
    data = json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    parts = {**_fixed_parts(), "title": html.escape(title), "data": data.replace("<", "\\u003c")}
    pieces = (PAGE / "index.html").read_text(encoding="utf-8").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


@cache
def _fixed_parts() -> dict[str, str]:
    def joined(names) -> str:
        return "\n".join((PAGE / name).read_text(encoding="utf-8") for name in names)

    return {"style": joined(STYLES), "script": joined(SCRIPTS)}


def write_page(path: Path, text: str) -> None:
    """Replace the page atomically: whoever opens it sees the old one or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # Lone surrogates, which no browser can show, become question marks.
    partial.write_bytes(text.encode("utf-8", errors="replace"))
    partial.replace(path)
