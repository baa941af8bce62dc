"""Prints what the laboratory did at the end of the test run."""

import pytest

TABLES = (
    ("schedules", "schedules explored", f"{'scenario':26} {'schedules':>9} {'steps':>9} "
     f"{'outcomes':>8} {'per second':>10}  strategies that left nothing to explore"),
    ("mutant", "mutants", f"{'mutant':28} {'killed by':24} {'schedules':>9} {'seconds':>8}"),
)  # fmt: skip


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
    ]
    for key, title, header in TABLES:
        rows = [
            str(value)
            for report in reports
            if getattr(report, "when", None) == "call"
            for name, value in report.user_properties
            if name == key
        ]
        if rows:
            terminalreporter.section(title)
            terminalreporter.write_line(header)
            for row in rows:
                terminalreporter.write_line(row)
