"""What filters, decontamination and deduplication took out, for the manifest and for people."""

import json

from pretraining.data.dedup.decontamination import merge_reports
from pretraining.data.engine.clean_stage import REPORT_NAME


def reports_of(preparation) -> dict:
    """{"filters", "decontamination", "duplicates"}: those that the recipe asks for, over all pieces."""
    if not preparation.cleans:
        return {}
    pieces, found = _piece_reports(preparation), {}
    if preparation.data.get("filters"):
        from pretraining.data.quality.report import FilterReport

        merged = FilterReport.merged([FilterReport.from_dict(piece["filters"]) for piece in pieces])
        found["filters"] = merged.to_dict()
    if preparation.data.get("decontaminate"):
        found["decontamination"] = merge_reports(
            report for piece in pieces for report in piece["decontamination"]
        )
    if preparation.compares:
        path = preparation.fates_stage.outputs(preparation.work)[0] / "report.json"
        found["duplicates"] = json.loads(path.read_text())
    return found


def cleaning_skips(preparation) -> list[dict]:
    """What the pieces left out while reading."""
    return [piece["skipped"] for piece in _piece_reports(preparation)]


def _piece_reports(preparation) -> list[dict]:
    outputs = preparation.clean_stage.outputs(preparation.work)
    return [json.loads((output / REPORT_NAME).read_text()) for output in outputs]


def as_text(manifest: dict) -> str:
    """The reports of a manifest as tables; empty where the recipe asked for nothing of the kind."""
    parts = []
    if "filters" in manifest:
        from pretraining.data.quality.report import FilterReport

        parts.append(FilterReport.from_dict(manifest["filters"]).as_text())
    if "decontamination" in manifest:
        found = manifest["decontamination"]
        sets = ", ".join(f"{name}: {entry['dropped']:,}" for name, entry in found["sets"].items())
        parts.append(
            f"decontamination: {found['dropped']:,} of {found['documents']:,} documents ({sets or 'none'})"
        )
    if "duplicates" in manifest:
        parts.append(_duplicates(manifest["duplicates"]))
    return "\n".join(parts)


def _duplicates(found: dict) -> str:
    fates = found["fates"]
    return (
        f"duplicates: {fates['duplicate']:,} of {found['documents']:,} documents in {found['clusters']:,} clusters "
        f"(the largest has {found['largest_cluster']:,}); {fates['validation_twin']:,} more too close to validation"
    )
