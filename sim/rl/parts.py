"""The workloads that a step of reinforcement learning is made of, each as a scenario of its own."""

from __future__ import annotations

import math

from sim.inputs.parallelism import Parallelism, split_layers
from sim.inputs.rl_config import RewardModel, Rl
from sim.inputs.rules.rl import inference_of, layout_of
from sim.inputs.scenario import Scenario
from sim.inputs.training_config import Preference, Recompute
from sim.inputs.workloads import RequestPattern
from sim.rl.answers import Answers
from sim.rl.batches import Batch


def update_scenario(scenario: Scenario, batch: Batch) -> Scenario:
    """One update of the policy: a training step over the micro-batches that `batch` says."""
    t, dp = scenario.for_training, scenario.parallelism.dp
    own = {
        "seq_len": batch.seq_len,
        "micro_batch_size": batch.micro_batch_size,
        "global_batch_size": batch.micro_batches * batch.micro_batch_size * dp,
        "tokens": None,
        "batch_schedule": (),
    }
    return scenario.unchecked_copy(update={"rl": None, "training": t.model_copy(update=own)})


def critic_scenario(scenario: Scenario, batch: Batch) -> Scenario:
    """One update of a critic with the policy's sizes, layout and micro-batches: `update_scenario` with a matrix of one
    output in the place of the vocabulary's. Its loss on a few numbers a token is that of a reward model."""
    own = update_scenario(scenario, batch)
    plain = {"preference": Preference(loss="reward"), "cross_entropy": "unfused", "loss_chunks": None}
    model = scenario.model.model_copy(update={"tied_embeddings": False, "mtp_layers": 0})
    return own.unchecked_copy(update={"model": model, "training": own.for_training.model_copy(update=plain)})


def engine_scenario(scenario: Scenario, rl: Rl, answers: Answers) -> Scenario:
    """The engine as a serving workload; its requests are the answers, all at once."""
    longest = RequestPattern(
        prompt_len=int(answers.prompt_tokens.max()), output_len=int(answers.output_tokens.max()), count=rl.answers
    )
    own = {
        "rl": None,
        "training": None,
        "inference": inference_of(rl.generation, longest, scenario.model, scenario.cluster.gpu),
        "parallelism": layout_of(rl.generation, scenario.model),
    }
    return scenario.unchecked_copy(update=own)


def reward_scenario(scenario: Scenario, reward: RewardModel, batch: Batch) -> Scenario:
    """A forward of the reward model over one micro-batch of the policy's, on replicas of `tp` of the training ranks."""
    tp, experts = reward.tp, reward.model.moe.experts if reward.model.moe else 1
    dp = scenario.parallelism.ranks // tp
    layers = split_layers(reward.model.layers, 1)
    layout = Parallelism(tp=tp, dp=dp, ep=math.gcd(tp, experts), layers_per_stage=layers)
    plain = {"lora": None, "recompute": Recompute(mode="none"), "activation_offload": False, "optimizer": "adamw"}
    own = update_scenario(scenario, batch)
    size = batch.micro_batch_size * dp
    training = own.for_training.model_copy(update={**plain, "global_batch_size": size})
    return own.unchecked_copy(update={"model": reward.model, "parallelism": layout, "training": training})
