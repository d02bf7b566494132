"""Training on pairs of answers: what the loss over pairs adds to a model's head, and the frozen reference's own head.

A micro-batch of 2n sequences holds n chosen answers and then n rejected ones, so one forward and one backward run over
both (TRL 1.16, trl/trainer/dpo_trainer.py: `DataCollatorForPreference`, `_compute_loss`; reward_trainer.py likewise).

- dpo (Rafailov et al. 2023, arXiv 2305.18290): log-probabilities of the labels, which a cross-entropy has computed
  anyway, are summed over each sequence; so are those of a frozen reference; -logsigmoid(beta · difference).
- kto (Ethayarajh et al. 2024, arXiv 2402.01306): the same of single answers, each good or bad. Both models also read as
  many other answers without gradients, each behind another one's prompt, for an estimate of their divergence (TRL 1.16,
  trl/trainer/kto_trainer.py: `_compute_kl_logps`, `_compute_loss`; LLaMA-Factory and ms-swift likewise).
- orpo (Hong et al. 2024, arXiv 2403.07691): log odds of the two, and next tokens of the chosen ones, of which TRL
  computes a cross-entropy besides (trl/experimental/orpo/orpo_trainer.py: `concatenated_forward`). No reference.
- reward: a matrix of one output in the place of the vocabulary's, over all tokens, of which each sequence's last one
  counts (Transformers 5.24, modeling_layers.py: `GenericForSequenceClassification`); -logsigmoid(difference).

Behind the logits, kernels have one number a token or a sequence, so the host's launches are what they cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from sim.core.dtypes import FP32_BYTES
from sim.core.program import BLOCK_END, Program
from sim.models.dims import Dims
from sim.models.linear import linear
from sim.models.operators import F, I, Linear, Operator, memory_op, small_kernels

if TYPE_CHECKING:
    from sim.inputs.scenario import Scenario
    from sim.inputs.training_config import PreferenceLoss

# Kernels on a number a token or a sequence, forward and backward: of dpo counted in a step of TRL 1.16 on a CPU (masked
# labels, sums, differences, logsigmoid and their gradients), of the others in its source.
PAIR_KERNELS: dict[PreferenceLoss, tuple[int, int]] = {
    "dpo": (13, 11),
    "kto": (43, 20),
    "orpo": (20, 20),
    "reward": (10, 8),
}
# Of these trainers' metrics, behind the loss: kernels on few numbers, and numbers that the host reads and waits for.
METRICS: dict[PreferenceLoss, tuple[int, int]] = {"dpo": (40, 15), "kto": (43, 18), "orpo": (0, 0), "reward": (9, 6)}


def pair_loss(d: Dims, loss: PreferenceLoss) -> Operator:
    """The loss over pairs, from each token's log-probability or each sequence's score, and the trainer's metrics.

    Transformers' Trainer makes metrics between forward and backward, and TRL reads each from the device (`.item()`):
    the host's time for them counts in full.
    """
    forward, backward = PAIR_KERNELS[loss]
    name, (kernels, reads) = "preference_loss", METRICS[loss]
    items: Program = (small_kernels(name, F, forward),)
    if d.framework.kernels_after_loss_filter and kernels:
        count = kernels + reads
        made = memory_op("preference_metrics", F, "elementwise", 1, count * 2 * FP32_BYTES, "fp32", count)
        items = (*items, BLOCK_END, replace(made, plain_host=True), BLOCK_END)
    return Operator(name, items, (small_kernels(f"{name}_backward", I, backward),))


def score_part(d: Dims) -> Operator:
    """The reward model's `[tokens, hidden] x [hidden, 1]`, whole on every tensor-parallel rank, in 16 bits."""
    plain = replace(d, linear=d.act, linear_bytes=d.act_bytes, recipe=None, few_bits=False)
    return linear(plain, Linear("score", d.rows, d.hidden, (1,), "plain"))


def scores_rewards(scenario: Scenario) -> bool:
    """Tell whether the head gives one number in the place of the vocabulary's logits."""
    return scenario.training is not None and scenario.training.pair_loss == "reward"
