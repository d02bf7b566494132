"""`python -m docs.notebooks [FOLDER]`: run the notebooks beside this file, and write each as a page of the site."""

from __future__ import annotations

from pathlib import Path

from docs.command_line import folder
from docs.notebooks.running import NOTEBOOKS, as_page, executed, saved
from sim.core.files import write_text


def main() -> None:
    """Run and write all notebooks."""
    to = folder("docs.notebooks", __doc__, Path(__file__).parent)
    for path in NOTEBOOKS:
        notebook = executed(path)
        write_text(to / path.name, saved(notebook))
        write_text(to / f"{path.stem}.md", as_page(notebook))


if __name__ == "__main__":
    main()
