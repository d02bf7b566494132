"""`python -m docs.figures [FOLDER]`: simulate what the documentation shows and draw it."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.figures.sources import FIGURES
from docs.figures.svg import draw
from sim.files import write_text

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
for name, chart in FIGURES.items():
    write_text(folder / f"{name}.svg", draw(chart()))
