"""A run folder as one page: live while it trains, complete without a network; and what its curve says, in words."""

from pretraining.lazy import imported_at_first_use

_HOME = {"live_report": "live", "report_end": "words"}

__all__ = list(_HOME)

__getattr__ = imported_at_first_use(__name__, _HOME)
