"""Filters by recipe: which texts are trained on, and what each rule costs.

chain = FilterChain.of([{"rule": "gopher_quality"}, {"rule": "pii"}])
kept = chain.apply(texts, wheres)      # None where a rule rejects
print(chain.report.as_text())

The names are imported when first used: a preparation without filters waits for none of them.
"""

from pretraining.lazy import imported_at_first_use

_HOME = {"FilterChain": "chain", "FilterReport": "report", "filters_schema": "rules"}

__all__ = list(_HOME)

__getattr__ = imported_at_first_use(__name__, _HOME)
