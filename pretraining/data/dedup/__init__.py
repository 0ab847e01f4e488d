"""Deduplication and decontamination, as pure functions over arrays and files.

ngrams           texts to hashes of their n-grams
minhash          what a recipe says about near duplicates, and the signatures that find them
pairs            equal and similar documents, from the hashes and signatures of all pieces
clusters         what pairs connect, and what becomes of each document
decontamination  documents that hold a part of an evaluation set

The engine runs them as numbered tasks. Results do not depend on the number of workers or of slices of the work.
"""
