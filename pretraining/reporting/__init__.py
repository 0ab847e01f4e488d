"""Show a run folder as one page, live while it trains and complete without a network; say what its curve shows."""
