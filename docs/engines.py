"""`python -m docs.engines`: print the table of serving engines in docs/serving_engines.md, from their records."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs.command_line import parser
from sim.variants.engines import ENGINES


def engine_table() -> str:
    """The records as a Markdown table: an engine a row; host seconds beside Hopper."""
    head = ["`engine`", "since", "prompts", "between iterations", "a launch", "graphs to", "decode", "before", "behind"]
    rows = [head, ["---"] * len(head)]
    for e in ENGINES.values():
        t = e.host_on("hopper")
        parts = (
            (t.iteration_s, ""),
            (t.rank_s, " a further rank"),
            (t.sequence_s, " a sequence"),
            (t.message_s, " on several GPUs"),
            (t.prompt_s, " with prompts"),
        )
        between = " + ".join(f"{s * 1e3:.3g} ms{what}" for s, what in parts if s) + ", beside the GPU" * e.overlaps
        launch = f"{t.launch_s * 1e6:.3g} µs" if t.launch_s else ""
        tops = {e.defaults.graphs_to, *[case.changes.get("graphs_to", 0) for case in e.cases]} - {0}
        running = max(
            [e.defaults.max_running_requests, *[case.changes.get("max_running_requests", 0) for case in e.cases]]
        )
        most = sorted({e.graph_sizes(top, running)[-1] for top in tops})
        graphs = " or ".join([str(n) for n in most]) if len(most) < 3 else f"{most[0]} to {most[-1]}"
        before = f"{t.request_s * 1e3:.3g} ms" if t.request_s else ""
        before += f" + {t.prompt_token_s * 1e6:.3g} µs a token" if t.prompt_token_s else ""
        behind = f"{(t.output_s + t.piece_s + t.text_output_s) * 1e6:.3g} µs a sequence" if t.piece_s else ""
        chunks = e.defaults.chunked_prefill
        prompts = "in chunks" if chunks or not e.whole_prompts else "whole"
        prompts += " beside tokens" if chunks or e.prompts_beside else ", first and alone"
        rows.append([f"`{e.name}`", e.date, prompts, between, launch, graphs, e.decode_attention, before, behind])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Print the table."""
    parser("docs.engines", __doc__).parse_args()
    print(engine_table())


if __name__ == "__main__":
    main()
