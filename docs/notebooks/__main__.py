"""`python -m docs.notebooks [FOLDER]`: run the notebooks beside this file, and write each as a page of the site."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.notebooks.running import NOTEBOOKS, as_page, executed, saved
from sim.core.files import write_text

folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
for path in NOTEBOOKS:
    notebook = executed(path)
    write_text(folder / path.name, saved(notebook))
    write_text(folder / f"{path.stem}.md", as_page(notebook))
