"""Compare every layout with one plain process: losses, gradient norms, norms of layers, validations, exports, resumes.

    python benchmarks/layouts.py --data_dir data --ranks 4 > benchmarks/results/layouts.jsonl

Trains a small model of each type for ten steps. Prints a JSON line for each layout, with the largest differences.
"""
