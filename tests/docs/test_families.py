"""The page on families is what `python -m docs.families` writes, and has a section for each family that is read."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from docs.families import DATA, written  # noqa: E402


def test_the_page_and_its_pictures_are_as_written() -> None:
    stale = [path.name for path, text in written().items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "written anew by python -m docs.families"


def test_today_s_families_have_a_section() -> None:
    """Each family beside those of one model's many names, and those that have a shipped model."""
    from sim.inputs.families.pictures import FAMILIES as PICTURES
    from sim.inputs.huggingface import FAMILIES

    shown = {row["config"]["model_type"] for row in yaml.safe_load(DATA.read_text("utf-8")) if "config" in row}
    shipped = {
        "gpt2",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v4",
        "gpt_oss",
    }
    as_gpt2 = {
        "gpt_neox",
        "gpt_bigcode",
        "opt",
        "biogpt",
        "xglm",
        "starcoder2",
        "jais2",
        "codegen",
        "apertus",
        "nanochat",
        "persimmon",
        "gpt_neo",
    }
    as_llama = {"internlm3", "helium", "granite", "ernie4_5", "hunyuan_v1_dense", "arcee", "glm", "glm4", "gemma"}
    as_llama |= {"internlm2", "iquestcoder", "baichuan", "qwen", "mimo", "minicpm", "hyperclovax", "stablelm", "exaone"}
    as_llama |= {"internlm", "orion", "xverse"}
    with_windows = {"ministral", "ministral3", "cwm"}  # Mistral's or OLMo 3's
    with_windows |= {"granite_swa", "granitemoe_swa", "vaultgemma", "mellum", "exaone_moe", "laguna"}
    as_a_shown_one = {"granitemoe", "solar_open", "qwen3_5_text"}  # Mixtral, GLM 4.5, Qwen 3.5
    as_a_shown_one |= {"granitemoeshared", "phimoe", "deepseek", "flex_olmo", "hy_v3", "bailing_moe", "youtu", "mamba"}
    as_a_shown_one |= {"bamba", "gemma4_text", "kolibri1", "axk1", "mimo_v2_flash", "mimo_v2", "cohere2_moe"}
    as_a_shown_one |= {"sarvam_moe", "sarvam_mla"}  # GLM 4.5, DeepSeek V3
    as_a_shown_one |= {"flint", "lara_mini"}  # Qwen 3 30B-A3B, Qwen 3.5
    other_names = {"minimax", "minimax_m1", "minimax_text_01"}  # three names of one family
    other_names |= {"apertus1p5_text", "gemma4_unified_text"}  # decoders of models of several kinds of input
    other_names |= {"cohere_compass_text"}
    other_names |= {*PICTURES}  # whose decoders are those of other families
    assert set(FAMILIES) - shown - shipped <= as_gpt2 | as_llama | with_windows | as_a_shown_one | other_names
