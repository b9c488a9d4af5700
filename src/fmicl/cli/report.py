"""`fmicl report RUN`: figures and HTML page of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fmicl.cli.command import command


@dataclass(frozen=True)
class Report:
    """Draw a run's figures and write its page."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""

    def __call__(self) -> None:
        """Write the page, then say where it is."""
        from fmicl.runs.folder import READ_ONLY_HINT, open_run
        from fmicl.runs.report import write_report
        from fmicl.utils.files import check_writable

        run = open_run(self.run)
        check_writable(run.path, READ_ONLY_HINT)
        print(f"page: {write_report(run.path)}")


run = command(Report)
