"""`python -m docs.figures [FOLDER]`: simulate what the documentation shows and draw it."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.figures import PICTURES
from sim.core.files import write_text

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
for name, picture in PICTURES.items():
    write_text(folder / f"{name}.svg", picture())
