"""Docker Compose's files and Kubernetes' manifests: the commands of their containers are converted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sim.convert.converting import converted, refused

COMPOSE = """
services:
  server:
    image: vllm/vllm-openai:v0.11.0
    environment:
      - NCCL_P2P_DISABLE=1
      - SIZE=8192
    command: >
      --model ${MODEL:-llama3-8b} --tensor-parallel-size $$TP --max-model-len ${SIZE}
      --kv-transfer-config '{"kv_connector": "A", "kv_role": "kv_both"}'
  proxy:
    image: nginx:latest
"""
PODS = """
apiVersion: v1
kind: Service
metadata: {name: a}
---
apiVersion: apps/v1
kind: Deployment
spec:
  replicas: 3
  template:
    spec:
      initContainers:
        - {image: busybox, command: [vllm, serve, gpt2-small]}
      containers:
        - image: lmsysorg/sglang:v0.5.3
          command: [python3, -m, sglang.launch_server]
          args: ["--model-path", "llama3-8b", "--tp", "$(TP)", "--chunked-prefill-size=4096"]
          env: [{name: TP, value: "4"}, {name: KEY, valueFrom: {}}]
"""
JOB = """
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - image: nvcr.io/nvidia/pytorch:25.01-py3
          command: [/bin/bash, -x, -c]
          args:
            - |
              export TP=2
              torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 4 --hidden-size 512 \\
                --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 \\
                --vocab-size 32000 --tensor-model-parallel-size $TP --bf16
"""


def test_the_image_of_a_compose_service_starts_its_command(tmp_path: Path) -> None:
    scenario, text = converted(tmp_path, "compose.yaml", COMPOSE, "--cluster", "dgx-h100", "--var", "TP=2")
    assert scenario["model"] == "llama3-8b"
    assert scenario["parallelism"]["tp"] == 2
    assert scenario["inference"]["engine"] == "vllm-0.11"
    assert scenario["inference"]["max_request_tokens"] == 8192
    assert "NCCL_P2P_DISABLE=1" in text


def test_a_command_of_pods_has_their_variables_and_the_version_of_the_image(tmp_path: Path) -> None:
    scenario, text = converted(tmp_path, "pods.yaml", PODS, "--cluster", "dgx-h100")
    assert scenario["model"] == "llama3-8b"
    assert scenario["parallelism"]["tp"] == 4
    assert scenario["inference"]["engine"] == "sglang-0.5"
    assert scenario["inference"]["max_batch_tokens"] == 4096
    assert "Deployment: replicas 3: the scenario is what the flags of one pod say" in text


def test_a_script_in_a_manifest_is_read_as_a_launch_script(tmp_path: Path) -> None:
    scenario, _ = converted(tmp_path, "job.yaml", JOB, "--cluster", "dgx-h100")
    assert scenario["parallelism"]["tp"] == 2
    assert scenario["parallelism"]["dp"] == 8
    assert scenario["training"]["seq_len"] == 1024


SHARED = """
x-engine: &engine
  image: vllm/vllm-openai:v0.11.0
  environment: &env {SIZE: "8192"}
services:
  a:
    <<: *engine
    environment: {<<: *env, TP: "2"}
    command: ["--model", "llama3-8b", "--tensor-parallel-size", "$TP", "--max-model-len", "$SIZE"]
"""


def test_anchors_of_a_compose_file(tmp_path: Path) -> None:
    scenario, _ = converted(tmp_path, "compose.yaml", SHARED, "--cluster", "dgx-h100")
    assert scenario["parallelism"]["tp"] == 2
    assert scenario["inference"]["max_request_tokens"] == 8192


def test_aliases_that_make_a_file_very_long_are_refused(tmp_path: Path) -> None:
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9))
    problem = refused(tmp_path, "a.yaml", f"a0: &a0 [1, 1]\n{levels}", "--cluster", "dgx-h100")
    assert "a.yaml: aliases make it longer than 20,000 values" in problem
    merges = "".join(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 9)}]}}\n" for n in range(1, 9))
    problem = refused(tmp_path, "a.yaml", f"m0: &m0 {{b: 1}}\n{merges}", "--cluster", "dgx-h100")
    assert "aliases make it longer" in problem


SKY = """
resources:
  accelerators: {L4: 4, A10: 4}
envs:
  MODEL: llama3-8b
setup: |
  pip install vllm==0.11.0
run: |
  vllm serve $MODEL --tensor-parallel-size $SKYPILOT_NUM_GPUS_PER_NODE \\
    --max-num-seqs 64 2>&1 | tee server.log &
"""
DSTACK = """
type: service
python: "3.12"
env:
  - MODEL=llama3-8b
commands:
  - pip install sglang==0.5.3
  - python3 -m sglang.launch_server --model-path $MODEL --tp 2
resources:
  gpu: 80GB:2
"""


def test_a_job_of_skypilot_has_its_variables_and_the_gpus_of_all_alternatives(tmp_path: Path) -> None:
    """SkyPilot sets SKYPILOT_NUM_GPUS_PER_NODE; `pip install` names the engine's version."""
    scenario, _ = converted(tmp_path, "sky.yaml", SKY, "--cluster", "dgx-h100")
    assert scenario["model"] == "llama3-8b"
    assert scenario["parallelism"]["tp"] == 4
    assert scenario["inference"]["engine"] == "vllm-0.11"
    assert scenario["inference"]["max_running_requests"] == 64


def test_gpus_that_differ_between_alternatives_are_asked_for(tmp_path: Path) -> None:
    told = refused(tmp_path, "sky.yaml", SKY.replace("A10: 4", "A10: 8"), "--cluster", "dgx-h100")
    assert "--var SKYPILOT_NUM_GPUS_PER_NODE=VALUE gives one" in told


def test_a_service_of_dstack(tmp_path: Path) -> None:
    scenario, _ = converted(tmp_path, "a.dstack.yml", DSTACK, "--cluster", "dgx-h100")
    assert scenario["model"] == "llama3-8b"
    assert scenario["parallelism"]["tp"] == 2
    assert scenario["inference"]["engine"] == "sglang-0.5"


KSERVE = """
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: a}
spec:
  predictor:
    minReplicas: 1
    model:
      modelFormat: {name: huggingface}
      args: [--model_name=llama3, --model_id=llama3-8b, "--tensor-parallel-size=$(TP)", --max-model-len=4096]
      env: [{name: TP, value: "2"}]
"""


def test_kserves_runtime_has_vllms_flags(tmp_path: Path) -> None:
    """kserve/kserve, python/huggingfaceserver: vLLM is its engine for generation."""
    scenario, said = converted(tmp_path, "isvc.yaml", KSERVE, "--cluster", "dgx-h100")
    assert (scenario["model"], scenario["parallelism"]["tp"]) == ("llama3-8b", 2)
    assert scenario["inference"]["max_request_tokens"] == 4096
    assert "not expressed" not in said


def test_an_image_that_is_pulled_starts_nothing(tmp_path: Path) -> None:
    text = """docker pull vllm/vllm-openai:v0.11.0
docker run --gpus all vllm/vllm-openai:v0.11.0 --model llama3-8b --tensor-parallel-size 2
"""
    scenario, said = converted(tmp_path, "s.sh", text, "--cluster", "dgx-h100")
    assert (scenario["model"], scenario["parallelism"]["tp"]) == ("llama3-8b", 2)
    assert "the first of" not in said


@pytest.mark.parametrize(
    ("started", "flag"),
    [
        ("{} bash -lc", "-tp"),
        ("--rm {} /usr/bin/bash -c", "-tp"),
        ("--entrypoint /bin/bash {} -c", "--tensor-parallel-size"),
    ],
)
def test_an_image_s_shell_is_no_model(tmp_path: Path, started: str, flag: str) -> None:
    """What the quotes behind `IMAGE bash -c` say is the server's command."""
    inner = f'pip install -U "x>=5" && vllm serve llama3-8b {flag} 8'
    text = f"docker run --gpus all {started.format('vllm/vllm-openai:v0.18.0')} '{inner}'"
    scenario, _ = converted(tmp_path, "run.sh", text, "--cluster", "dgx-h100")
    assert (scenario["model"], scenario["parallelism"]["tp"]) == ("llama3-8b", 8)
