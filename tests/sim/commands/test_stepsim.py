"""The console command: names from any folder, any encoding, one line for what is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sim
from sim.commands.stepsim import CALIBRATE, COMMANDS, OTHERWISE
from sim.inputs.model_input import model_presets
from sim.inputs.shipped import first_comment, shipped_scenarios
from sim.views.shipped_records import cluster_record, gpu_record, model_record
from tests.processes import ROOT
from topology.presets import CLUSTERS, GPUS


def stepsim(*words: str, cwd: Path = ROOT, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """`stepsim WORDS` as the console script runs it: the current folder is not on the path."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv[0] = 'stepsim'\n"
    script += "from sim.__main__ import main; main()"
    command = [sys.executable, "-P", "-c", script, *words]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, errors="replace")
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_help_lists_every_command_without_loading_one() -> None:
    said = stepsim("--help").stdout
    assert all(f"\n  {name} " in said for name in (*COMMANDS, "calibrate", "scenarios", "models", "clusters"))
    code = "import sys, click; from sim.commands.stepsim import main; click.Context(main).get_help()\n"
    code += "for n in main.commands.values(): click.Context(n).get_help()\n"
    code += "print(sorted({'numpy', 'pydantic', 'yaml', 'rich', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name: str) -> None:
    assert f"stepsim {name} " in stepsim(name, "--help").stdout


def test_commands_that_need_no_torch_to_say_what_they_do() -> None:
    assert "--out" in stepsim("calibrate", "fit", "--help").stdout
    assert set(CALIBRATE) == {"run", "measure", "serving", "engine", "capture", "topology", "fit", "import"}


@pytest.mark.slow
def test_shipped_scenarios_go_by_name_beside_another_sim(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "__init__.py").write_text("raise SystemExit('the wrong sim')")
    (tmp_path / "topology.py").write_text("raise SystemExit('the wrong topology')")
    found = json.loads(stepsim("run", "tp8_sp", "--json", "-", cwd=tmp_path).stdout)
    there = json.loads(stepsim("run", "scenarios/tp8_sp.yaml", "--json", "-").stdout)
    assert found["step_time_s"] == there["step_time_s"]
    assert found["scenario"]["name"] == "tp8_sp"


@pytest.mark.slow
def test_other_processes_find_the_program_too(tmp_path: Path) -> None:
    (tmp_path / "sim").mkdir()
    (tmp_path / "sim" / "__init__.py").write_text("raise SystemExit('the wrong sim')")
    words = ("sweep", "dp8", "--vary", "training.seq_len=1024,2048", "--workers", "2", "--json", "-")
    assert len(json.loads(stepsim(*words, cwd=tmp_path).stdout)["rows"]) == 2


def test_a_file_comes_before_a_shipped_name(tmp_path: Path) -> None:
    (tmp_path / "tp8").write_text((ROOT / "scenarios" / "dp8.yaml").read_text())
    assert json.loads(stepsim("run", "tp8", "--json", "-", cwd=tmp_path).stdout)["scenario"]["parallelism"]["dp"] == 8


def test_a_scenario_comes_from_standard_input() -> None:
    text = (ROOT / "scenarios" / "dp8.yaml").read_text().replace("name:", "# name:")
    command = [sys.executable, "-m", "sim", "run", "-", "--json", "-", "--measured", "1", "--set", "parallelism.dp=4"]
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scenario"]["name"] == "standard input"


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="pipes have no names on this system")
@pytest.mark.parametrize("options", [[], ["--measured", "1", "--set", "parallelism.dp=4"]], ids=str)
def test_a_scenario_comes_from_a_pipe(options: list[str]) -> None:
    """As a shell's `<(command)` gives it: what has been read is gone, and options load the scenario again."""
    read_end, write_end = os.pipe()
    os.write(write_end, (ROOT / "scenarios" / "dp8.yaml").read_bytes())
    os.close(write_end)
    command = [sys.executable, "-m", "sim", "run", f"/dev/fd/{read_end}", "--json", "-", *options]
    done = subprocess.run(command, cwd=ROOT, pass_fds=[read_end], capture_output=True, text=True)
    os.close(read_end)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["scenario"]["parallelism"]["dp"] == (4 if options else 8)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "--quiet"), "No such option '--quiet'"),
        (("search",), "Missing argument 'SCENARIO'"),
        (("run", "tp8", "--engine", "foo"), "Invalid value for '--engine'"),
    ],
)
def test_a_wrong_option_is_one_message_as_all_mistakes_are(words: tuple[str, ...], said: str) -> None:
    message = stepsim(*words, code=2).stderr
    assert message.startswith(f"error: {said}")
    assert message.count("\n") == 1
    assert f"`stepsim {words[0]} --help` shows the options" in message


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--pp=4", "parallelism.pp"),
        ("--seq-len=4096", "training.seq_len"),
        ("--calibration=cpu", "calibration"),
        ("--nodes=2", "cluster.nodes"),
    ],
)
def test_a_key_given_as_an_option_says_how_it_is_set(option: str, key: str) -> None:
    message = stepsim("run", "tp8", option, code=2).stderr
    name = option.split("=")[0]
    assert message == f"error: No such option '{name}': write --set {key}=VALUE, it is a scenario's key\n"


def test_the_number_of_gpus_given_as_an_option_is_told_what_decides_it() -> None:
    said = "their number is tp·cp·pp·dp: write --set parallelism.dp=N; `stepsim search --gpus N` finds layouts"
    assert stepsim("run", "tp8", "--gpus=4", code=2).stderr == f"error: No such option '--gpus': {said}\n"


def test_an_option_of_a_whole_number_says_so() -> None:
    said = stepsim("search", "tp8", "--workers", "abc", code=2).stderr
    told = "error: Invalid value for '--workers': 'abc' is not a whole number."
    assert said == f"{told} (`stepsim search --help` shows the options)\n"


def test_lists() -> None:
    scenarios, models = stepsim("scenarios").stdout, stepsim("models").stdout
    assert all(name in scenarios for name in shipped_scenarios())
    assert "8.03B parameters" in next(line for line in models.splitlines() if line.startswith("llama3-8b "))
    clusters = stepsim("clusters").stdout
    assert "dgx-h100 " in clusters
    assert "rtx4090" in clusters
    assert stepsim("--version").stdout == f"stepsim {sim.__version__}\n"
    assert "_STEPSIM_COMPLETE=bash_complete" in stepsim("completion", "bash").stdout


def test_one_shipped_model_cluster_or_gpu_in_full() -> None:
    model, cluster, gpu = stepsim("models", "deepseek-v3"), stepsim("clusters", "dgx-h100"), stepsim("clusters", "t4")
    assert model.stdout.startswith("deepseek-v3: 671B parameters, 37.6B active, 61 layers\n")
    assert "arXiv 2412.19437" in model.stdout
    rows = [line.split(maxsplit=2) for line in (model.stdout + cluster.stdout + gpu.stdout).splitlines()]
    said = {row[0]: row[1:] for row in rows if len(row) > 1}
    assert said["moe.experts"] == ["256"]
    assert said["inter_node.nic_bandwidth_bytes_per_s"][0] == "50000000000"
    assert "(50.00 GB/s)" in said["inter_node.nic_bandwidth_bytes_per_s"][1]
    assert said["inter_node.nic_bandwidth_bytes_per_s"][1].endswith(
        "DGX H100 data sheet: 18 NVLink at 25 GB/s, 8 NDR NICs"
    )
    assert said["intra_node.kind"] == ["nvswitch"]
    assert said["inter_node.efficiency"] == ["0.96", "NCCL: src/graph/topo.h"]
    assert said["inter_node.oversubscription"] == ["1", "default"]
    assert "h100-sxm, for cluster: {gpu: h100-sxm}" in cluster.stdout
    assert "(989.4 TFLOP/s)" in cluster.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("explain", "parallelism.zero"), "`stepsim run --explain KEY` explains a key of a scenario"),
        (("fit",), "it is `stepsim calibrate fit`"),
        (("what-if",), "`stepsim run SCENARIO --advise` and `stepsim sweep SCENARIO --vary KEY=A,B`"),
    ],
)
def test_words_that_nearly_are_commands_or_names_lead_to_those(words: tuple[str, ...], said: str) -> None:
    assert said in stepsim(*words, code=2).stderr


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("models", "QWEN"), ("qwen3-8b", "qwen3-next-80b-a3b")),
        (("models", "Llama 3.2"), ("llama3.2-1b",)),
        (("clusters", "4090"), ("rtx4090",)),
        (("clusters", "H100"), ("dgx-h100", "h100-pcie")),
        (("scenarios", "serve"), ("serve_llama8b", "serve_cpu")),
        (("scenarios", "speculative"), ("serve_speculative_llama70b",)),
    ],
)
def test_a_word_lists_what_says_it(words: tuple[str, ...], names: tuple[str, ...]) -> None:
    def plain(text: str) -> str:
        return "".join(filter(str.isalnum, text.lower()))

    lines = stepsim(*words).stdout.splitlines()
    assert {*names} <= {line.split()[0] for line in lines}
    assert all(plain(words[1]) in plain(line) for line in lines)


def test_what_has_another_name_is_no_command() -> None:
    """Else its hint would never be seen."""
    assert not OTHERWISE.keys() & {*COMMANDS, "calibrate", "scenarios", "models", "clusters", "completion"}


@pytest.mark.parametrize("command", ["models", "clusters"])
def test_every_shipped_record_can_be_shown(command: str) -> None:
    names = model_presets() if command == "models" else (*CLUSTERS, *GPUS)
    shown = model_record if command == "models" else lambda name: (gpu_record if name in GPUS else cluster_record)(name)
    for name in names:
        assert shown(name).startswith(name)
    wrong = stepsim(command, f"{names[0]}x", code=2).stderr
    assert wrong.startswith(f"error: found '{names[0]}x'; nothing shipped says this; did you mean ")
    assert wrong.endswith(f"(`stepsim {command}` lists the names)\n")


def test_every_shipped_scenario_says_what_it_shows() -> None:
    assert all(len(first_comment(path)) > 20 for path in shipped_scenarios().values())


def test_completion_knows_commands_and_scenarios() -> None:
    def complete(words: str, at: int) -> str:
        return stepsim(_STEPSIM_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=str(at)).stdout

    assert "plain,search" in complete("stepsim se", 1)
    assert "plain,zb_h1_pp8" in complete("stepsim run zb_h", 2)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1"])
def test_output_in_any_encoding(encoding: str) -> None:
    said = stepsim("run", "tp8_sp", PYTHONIOENCODING=encoding).stdout
    assert "+ fits" in said
    assert "#" in said
    stepsim("scenarios", PYTHONIOENCODING=encoding)
    stepsim("clusters", PYTHONIOENCODING=encoding)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("rnu",), "did you mean 'run'?"),
        (("run", "1f1b_pp9"), "did you mean '1f1b_pp8'?"),
        (("run", "llama3-8b"), "found the name of a model"),
        (("run", "hf://Qwen/Qwen3.5-27B"), "hf://Qwen/Qwen3.5-27B: found the name of a model"),
        (("run", "https://huggingface.co/Qwen/Qwen3-32B"), "--set model=hf://Qwen/Qwen3-32B`"),
        (("run",), "SCENARIO: is missing"),
    ],
)
def test_mistakes(words: tuple[str, ...], said: str) -> None:
    error = stepsim(*words, code=2).stderr
    assert error.startswith("error: ")
    assert said in error


def test_a_missing_extra_is_one_line() -> None:
    code = "import sys; sys.modules['torch'] = None\n"  # as if it were not installed
    code += "from sim.commands.command import run_command; run_command('calibrate.serving.side_by_side')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: this needs torch: pip install 'stepsim[calibrate]'\n"


def test_the_summary_names_model_gpus_and_profile(tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    done = stepsim("run", "tp8_sp", "--html", str(page))
    words = " ".join(done.stdout.split())
    assert "llama3-70b (70.6B parameters, 80 layers)" in words
    assert "8 GPUs (dgx-b200: b200-sxm, 8 to a node)" in words
    assert "operator times: b200-sxm (shipped profile" in words
    assert f"wrote {page} (" in done.stderr
    assert page.resolve().as_uri() in done.stderr


def test_require_fit() -> None:
    small = ("--set", "cluster.gpu.memory_bytes=8GiB", "--json", "-")
    stepsim("run", "tp8", *small)
    stepsim("run", "tp8", *small, "--require-fit", code=1)
    stepsim("run", "tp8_sp", "--json", "-", "--require-fit")
    stepsim("run", "serve_batch1", "--set", "cluster.gpu.memory_bytes=8GiB", "--json", "-", "--require-fit", code=1)


@pytest.mark.slow
def test_search_in_a_pipe_is_whole() -> None:
    words = ("search", "search_llama3_8b", "--only", "tp=4", "--only", "schedule=interleaved_1f1b", "--workers", "1")
    said = stepsim(*words, COLUMNS="").stdout
    assert "…" not in said
    assert all(name in said for name in ("MFU", "Exposed", "Bubble", "Recompute"))
