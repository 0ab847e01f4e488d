"""Deduplication and decontamination, as pure functions over arrays and files.

signatures       texts to hashes of their n-grams, and to the signatures that find near duplicates
duplicates       equal and similar documents, from the hashes and signatures of all pieces, and what becomes of each
decontamination  documents that hold a part of an evaluation set

The engine runs them as numbered tasks. Results do not depend on the number of workers or of slices of the work.
"""
