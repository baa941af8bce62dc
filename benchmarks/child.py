"""A worker process of a benchmark, and the lines it writes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading

from benchmarks.results import ROOT


class Child:
    """A process that runs a module of the benchmarks, gets a text on standard input and writes one
    JSON object a line; `read` waits for the next one. With ``more`` it is sent further lines, up to
    :meth:`close`."""

    def __init__(
        self, module: str, text: str, prefix: tuple[str, ...] = (), more: bool = False
    ) -> None:
        inherited = os.environ.get("PYTHONPATH")
        path = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._collect, daemon=True).start()
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()
        if not more:
            self.close()

    def send(self, line: str) -> None:
        """One more line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Nothing more is sent."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _collect(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def read(self, seconds: float) -> dict[str, object] | None:
        """The next message, or None at the end. Raises queue.Empty after `seconds`."""
        line = self._lines.get(timeout=max(seconds, 0.01))
        return json.loads(line) if line else None

    def end(self) -> None:
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may block its end
            self.process.wait(30)
