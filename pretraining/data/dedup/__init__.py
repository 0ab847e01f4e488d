"""Deduplication and decontamination: n-gram hashes, exact and MinHash pairs, clusters, fates of documents.

Pure functions over arrays and files, one for each numbered task; their results depend neither on how many
workers ran them nor on how many slices the work was cut into. The names below are imported when first used.
"""

from pretraining.lazy import imported_at_first_use

_HOME = {
    "MinHashSpec": "spec",
    "DecontaminationSpec": "spec",
    "hash_texts": "exact",
    "exact_pairs": "exact",
    "sign_piece": "minhash",
    "Signatures": "minhash",
    "SignatureParts": "parts",
    "HashParts": "parts",
    "match_slice": "pairs",
    "Clusters": "clusters",
    "cluster": "clusters",
    "duplicates_report": "reports",
    "assign_fates": "fates",
    "ContaminationIndex": "decontaminate",
    "build_index": "decontaminate",
    "merge_reports": "decontaminate",
    "read_evaluation_sets": "evaluation_sets",
}

__all__ = list(_HOME)

__getattr__ = imported_at_first_use(__name__, _HOME)
