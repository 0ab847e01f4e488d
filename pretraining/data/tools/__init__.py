"""Commands for prepared data: verify, inspect, measure, convert, publish. Each has a file of its own."""
