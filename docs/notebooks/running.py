"""Running a notebook, and the page that shows its cells with what they gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NOTEBOOKS = sorted(HERE.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """The notebook with the outputs of a fresh run from the repository's folder.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(HERE.parents[1])}}
    NotebookClient(notebook, timeout=120, coalesce_streams=True, resources=folder).execute()
    return notebook


def saved(notebook: Any) -> str:
    """The notebook as a file, without times of execution and this machine's kernel."""
    import nbformat

    for cell in notebook.cells:
        cell.metadata = {}
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    text: str = nbformat.writes(notebook)
    return text + "\n"


def as_page(notebook: Any) -> str:
    """Markdown: text as it is, programs as fences, and below them what they printed or showed."""
    pieces = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            pieces.append(cell.source)
        else:
            pieces.append(f"```python\n{cell.source}\n```")
            pieces += [shown for output in cell.outputs if (shown := _shown(output))]
    return "\n\n".join(pieces) + "\n"


def _shown(output: Any) -> str:
    """One output: HTML where there is some, else its text."""
    if output.output_type == "stream":
        return f"```text\n{output.text.rstrip()}\n```"
    data = output.data
    if "text/html" in data:
        return f'<div class="output">\n{data["text/html"]}\n</div>'
    return f"```text\n{data['text/plain']}\n```"
