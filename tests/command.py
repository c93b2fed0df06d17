"""`covey ...`, called as a user would, in this process."""

import sys

import pytest

from covey.cli import app as cli
from covey.cli import report as cli_report
from covey.cli import weights as cli_weights


class Command:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        for console in (cli.out, cli.err, cli_report.out, cli_weights.err):
            # a line is a line, however long the test's folder is named
            monkeypatch.setattr(console, "width", max(console.width, 1000))

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        self._monkeypatch.setattr(sys, "argv", ["covey", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err

    def done(self, *arguments: object) -> str:
        """Standard output of a command that works."""
        status, out, said = self(*arguments)
        assert status == 0, (arguments, said)
        return out
