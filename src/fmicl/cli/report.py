"""`fmicl report RUN`: figures and HTML page of a run, or one page of an archive of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fmicl.cli.command import command


@dataclass(frozen=True)
class Report:
    """Draw a run's figures and write its page, or write one page of all archived runs."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder, or an archive of runs such as results/."""
    out: Path | None = None
    """Of an archive: the page (None: report.html in it)."""

    def __call__(self) -> None:
        """Write the page, then say where it is."""
        from fmicl.runs.folder import READ_ONLY_HINT, Run, is_run_or_sweep, open_run
        from fmicl.runs.report import write_report
        from fmicl.utils.files import check_writable

        if self.run.is_dir() and not Run.is_run(self.run) and not is_run_or_sweep(self.run) and self._is_archive():
            from fmicl.reproduce.page import write_page

            print(f"page: {write_page(self.run, self.out)}")
            return
        if self.out is not None:
            raise ValueError("--out is for the page of an archive; a run's page is in its folder")
        run = open_run(self.run)
        check_writable(run.path, READ_ONLY_HINT)
        print(f"page: {write_report(run.path)}")

    def _is_archive(self) -> bool:
        """Whether there are JSON files one folder down, as in an archive of runs."""
        return next(self.run.glob("*/*.json"), None) is not None


run = command("report", Report)
