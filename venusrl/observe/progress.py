"""Live progress: a panel on a terminal, a line a step elsewhere."""

from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table

from venusrl.core.output import Spare

Status = Mapping[str, str]


class Progress:
    """Shows a status mapping, refreshed by itself while it is open. An output that takes nothing ends nothing.

    Args:
      status: called for the current status, name -> text, in the order to show.
      title: of the panel.
      console: sys.stdout's by default. Its file is wrapped: rich ends the program at a pipe that breaks.
    """

    def __init__(self, status: Callable[[], Status], title: str, console: Console | None = None):
        self._status = status
        self._title = title
        self.console = console or Console()
        self.console.file = Spare(self.console.file)
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._panel, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, *exc) -> None:
        if self._live is not None:
            self._live.stop()

    def line(self, text: str) -> None:
        """A line that stays, above the panel."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def show(self, table: Table) -> None:
        """A table that stays."""
        self.console.print(table)

    def _panel(self) -> Table:
        table = Table(title=self._title, show_header=False, title_justify="left")
        table.add_column(style="bold")
        table.add_column(min_width=40)
        for name, text in self._status().items():
            table.add_row(name, text)
        return table


def summary_table(title: str, rows: Mapping[str, str]) -> Table:
    """Names and values, to print at the end of a run."""
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, text in rows.items():
        table.add_row(name, text)
    return table
