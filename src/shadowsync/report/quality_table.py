"""The quality of a trained model as a table in the terminal."""

from rich.table import Table

from shadowsync.metrics.quality import TestMetrics
from shadowsync.report.words import count, decimal


def quality_table(measured: TestMetrics) -> Table:
    """What `shadowsync evaluate` prints."""
    table = Table("measure", "value", title="Quality")
    table.columns[1].justify = "right"
    table.add_row("samples", count(measured.samples))
    table.add_row("AUC", decimal(measured.auc))
    table.add_row("normalized entropy (NE)", decimal(measured.ne))
    table.add_row("log loss", decimal(measured.logloss))
    table.add_row("calibration (mean prediction / mean label)", decimal(measured.calibration))
    return table
