"""A run folder as one page: live while it trains, complete without a network; and what its curve says, in words."""
