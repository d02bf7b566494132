"""`python -m docs.figures [FOLDER]`: simulate what the documentation shows and draw it."""

from __future__ import annotations

from pathlib import Path

from docs.command_line import folder
from docs.figures import PICTURES
from sim.core.files import write_text


def main() -> None:
    """Draw all pictures."""
    to = folder("docs.figures", __doc__, Path(__file__).parent)
    for name, picture in PICTURES.items():
        write_text(to / f"{name}.svg", picture())


if __name__ == "__main__":
    main()
