"""`python -m docs.families`: write docs/families.md, a section for each family of models, with a picture of its layers.

The configs stand in docs/families.yaml; every number and every picture comes out of the simulator's own layers.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from docs.command_line import parser
from sim.inputs.model_config import ModelConfig
from sim.inputs.model_input import load_model
from sim.inputs.scenario import parse_scenario
from sim.models.flops import model_flops_per_token
from sim.models.layers import Attention, LayerSpec, Mlp, layer_specs
from sim.models.layers.beside import Beside
from sim.models.layers.compressed import CompressedAttention
from sim.models.layers.experts import Experts
from sim.models.layers.grouped_query import GroupedQueryAttention
from sim.models.layers.latent import LatentAttention
from sim.models.layers.selected_blocks import SelectedBlocksAttention
from sim.models.layers.shared_keys import SharedKeysAttention
from sim.models.layers.short_convolution import ShortConvolution
from sim.models.layers.sparse_latent import SparseLatentAttention
from sim.models.parameters import count_parameters
from sim.serve.prices.dims import serving_dims

ROOT = Path(__file__).parents[1]
DATA, PAGE, PICTURES = ROOT / "docs" / "families.yaml", ROOT / "docs" / "families.md", ROOT / "docs" / "figures"
LENGTH = 8192  # tokens of the sequence that cache and flops are given for
INTRO = """# Families, one by one

The page has one published model of each family that can be read from Hugging Face configs. Each picture has the layers
from first to last: the upper row is attention (or what replaces it), the lower row the MLP or experts. "Active" counts
the parameters that one token uses. "Cache a token": keys, values and states of all layers in 16 bits, in bytes per
token of a sequence of {length:,} tokens. "Flops a token": forward and backward for one token of such a sequence, with
causal attention.

`python -m docs.families` writes this page from `docs/families.yaml`. [Models](models.md#families) says what is
approximate.
"""
COLOURS = {
    "full": "#4e79a7",
    "window": "#a0cbe8",
    "chunks": "#76b7b2",
    "latent": "#b07aa1",
    "selected": "#d4a6c8",
    "compressed": "#8c6bb1",
    "shared": "#bab0ac",
    "state": "#f28e2b",
    "convolution": "#ffbe7d",
    "attention and state": "#e15759",
    "nothing": "#dddddd",
    "dense": "#59a14f",
    "experts": "#edc948",
}


class Kind(NamedTuple):
    """What a cell of the picture is: its colour's name, and its words."""

    colour: str
    words: str


def attention_kind(attention: Attention | None) -> Kind:
    """What mixes tokens in a layer."""
    if attention is None:
        return Kind("nothing", "nothing")
    if isinstance(attention, Beside):
        return Kind("attention and state", "attention beside a state")
    if isinstance(attention, CompressedAttention):
        return compressed_kind(attention)
    if isinstance(attention, SparseLatentAttention):
        sizes = f"{attention.heads} heads, rank {attention.latent_rank}"
        whose = "selected keys" if attention.selects else "keys that an earlier layer selected"
        return Kind(
            "selected" if attention.selects else "latent",
            f"latent attention to {attention.indexer.top_k:,} {whose}, {sizes}",
        )
    if isinstance(attention, LatentAttention):
        return Kind("latent", f"latent attention, {attention.heads} heads, rank {attention.latent_rank}")
    if isinstance(attention, ShortConvolution):
        return Kind("convolution", f"gated convolution over {attention.conv_kernel} tokens")
    if not isinstance(attention, GroupedQueryAttention):
        return Kind("state", "layer with a state")
    heads = f"{attention.heads} heads of {attention.head_dim}, {attention.kv_heads} of keys"
    if isinstance(attention, SharedKeysAttention):
        of = "all tokens" if attention.window is None else f"a window of {attention.window.tokens:,}"
        return Kind(
            "shared",
            f"queries over {of}, with an earlier layer's keys, {attention.heads} heads of {attention.head_dim}",
        )
    if isinstance(attention, SelectedBlocksAttention):
        x = attention.indexer
        return Kind("selected", f"attention to {x.top_k:,} tokens in selected blocks of {x.block}, {heads}")
    extras = [word for word, there in (("sinks", attention.sinks), ("gate", attention.gate)) if there]
    extra = "".join(f", {word}" for word in extras)
    window = attention.window
    if window is None:
        return Kind("full", f"attention over all tokens, {heads}{extra}")
    kind = "chunks" if window.chunked else "window"
    return Kind(kind, f"attention in {kind} of {window.tokens:,}".replace("in window", "in a window") + extra)


def compressed_kind(attention: CompressedAttention) -> Kind:
    """DeepSeek V4's attention."""
    sizes, window = f"{attention.heads} heads of {attention.head_dim}", f"a window of {attention.window.tokens}"
    if attention.rate is None:
        return Kind("window", f"attention in {window}, {sizes}")
    if attention.indexer is None:
        return Kind("compressed", f"attention to {window} and a key for each {attention.rate} tokens, {sizes}")
    selected = f"{attention.indexer.top_k} of the keys for each {attention.rate} tokens"
    return Kind("selected", f"attention to {window} and {selected}, {sizes}")


def mlp_kind(mlp: Mlp | None) -> Kind:
    """What stands behind it."""
    if mlp is None:
        return Kind("nothing", "nothing")
    if isinstance(mlp, Experts):
        shared = f", {mlp.shared.ffn:,} shared" if mlp.shared is not None else ""
        return Kind("experts", f"{mlp.moe.top_k} of {mlp.moe.experts} experts of {mlp.moe.ffn:,}{shared}")
    return Kind("dense", f"{mlp.activation} MLP of {mlp.ffn:,}")


def picture(specs: Sequence[LayerSpec], title: str) -> str:
    """The layers from left to right as two rows of cells, and what their colours mean."""
    rows = [[attention_kind(s.attention) for s in specs], [mlp_kind(s.mlp) for s in specs]]
    width, left, height = 760.0, 92.0, 22
    cell = (width - left - 8) / len(specs)
    out = []
    for i, (row, name) in enumerate(zip(rows, ("mixes tokens", "behind it"), strict=True)):
        y = 8 + i * (height + 6)
        out.append(f'<text x="{left - 8:.0f}" y="{y + 15}" text-anchor="end">{name}</text>')
        for j, kind in enumerate(row):
            at = f'x="{left + j * cell:.1f}" y="{y}" width="{max(1.0, cell - 1):.1f}" height="{height}"'
            out.append(f'<rect {at} fill="{COLOURS[kind.colour]}"><title>{j}: {escape(kind.words)}</title></rect>')
    y = 8 + 2 * (height + 6) + 14
    for kind in dict.fromkeys(k for row in rows for k in row if k.colour != "nothing"):
        number = sum(k == kind for row in rows for k in row)
        out.append(f'<rect x="{left:.0f}" y="{y - 10}" width="11" height="11" fill="{COLOURS[kind.colour]}"/>')
        out.append(f'<text x="{left + 18:.0f}" y="{y}">{number} × {escape(kind.words)}</text>')
        y += 18
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {y}" role="img"'
    style = 'font-family="system-ui, sans-serif" font-size="12" fill="#333"'
    return f'{frame} aria-label="Layers of {escape(title)}" {style}>\n' + "\n".join(out) + "\n</svg>\n"


def model_of(row: dict[str, Any]) -> ModelConfig:
    """The model of a row of the file."""
    if "preset" in row:
        return load_model(row["preset"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(row["config"]), encoding="utf-8")
        return load_model(str(file))


def cache_bytes_per_token(model: ModelConfig) -> float:
    """Of a sequence of `LENGTH` tokens, over all layers, in 16 bits."""
    inference = {"requests": {"prompt_len": 8, "output_len": 8}}  # of no effect on a cache's bytes, nor is the model
    d = serving_dims(parse_scenario({"model": "llama3.1-8b", "inference": inference, "cluster": "dgx-h200"}))
    specs = layer_specs(model)
    kept = sum(s.attention.sequence_bytes(d, LENGTH) for s in specs if s.attention is not None)
    return (kept + sum(s.ngrams.sequence_bytes(d) for s in specs if s.ngrams is not None)) / LENGTH


def stem(title: str) -> str:
    """The name of a section's picture."""
    return "family_" + re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")


def section(row: dict[str, Any], model: ModelConfig) -> str:
    """A family's part of the page."""
    count, specs = count_parameters(model), layer_specs(model)
    family = row.get("config", {}).get("model_type")
    source = f"`model_type: {family}`" if family else f"shipped as `{row['preset']}`"
    flops, cache = model_flops_per_token(model, LENGTH), cache_bytes_per_token(model)
    cells = [
        f"{len(specs)}",
        f"{count.total:,}",
        f"{count.active / 1e9:.2f} B",
        f"{cache / 1024:.1f} KiB",
        f"{flops / 1e9:.1f} G",
    ]
    return "\n".join(
        [
            f"## {row['title']}",
            "",
            f"{row['about'][0].upper()}{row['about'][1:]}; {source}.",
            "",
            f"![Layers of {row['title']}](figures/{stem(row['title'])}.svg)",
            "",
            "| layers | parameters | active | cache a token | flops a token |",
            "|---|---|---|---|---|",
            "| " + " | ".join(cells) + " |",
            "",
        ]
    )


def written() -> dict[Path, str]:
    """All that the command writes: the page and its pictures."""
    rows = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    parts, out = [INTRO.format(length=LENGTH)], {}
    for row in rows:
        model = model_of(row)
        parts.append(section(row, model))
        out[PICTURES / f"{stem(row['title'])}.svg"] = picture(layer_specs(model), row["title"])
    return {PAGE: "\n".join(parts), **out}


def main() -> None:
    """Write the page and its pictures."""
    parser("docs.families", __doc__).parse_args()
    for path, text in written().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
