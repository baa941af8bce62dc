"""Prints what the laboratory did at the end of the test run.

With ``DEVALLOC_RECORD_MUTANTS=1`` a run of all mutants also writes the file from which the table in
docs/interleaving.md is made."""

import os

import pytest

TABLES = (
    ("schedules", "schedules explored", f"{'scenario':26} {'schedules':>9} {'steps':>9} "
     f"{'outcomes':>8} {'per second':>10}  strategies that left nothing to explore"),
    ("mutant", "mutants", f"{'mutant':32} {'killed by':26} {'schedules':>9} {'seconds':>8}"),
)  # fmt: skip


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
    ]
    for key, title, header in TABLES:
        values = [
            value
            for report in reports
            if getattr(report, "when", None) == "call"
            for name, value in report.user_properties
            if name == key
        ]
        if values:
            terminalreporter.section(title)
            terminalreporter.write_line(header)
            for value in values:
                terminalreporter.write_line(value if isinstance(value, str) else row(*value))
        if key == "mutant" and os.environ.get("DEVALLOC_RECORD_MUTANTS") == "1":
            from tests.interleaving.table import COLUMNS, write_killed

            write_killed(dict(zip(COLUMNS, value, strict=False)) for value in values)


def row(name: str, scenario: str, schedules: int, seconds: float) -> str:
    return f"{name:32} {scenario:26} {schedules:9} {seconds:8.1f}"
