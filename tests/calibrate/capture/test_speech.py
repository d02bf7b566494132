"""Captured losses of speech models: connectionist temporal classification (CTC)."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capturing runs torch's own code")

from calibrate.capture import Step  # noqa: E402
from calibrate.capture.huggingface.step import huggingface_maker  # noqa: E402
from calibrate.capture.options import Options  # noqa: E402
from calibrate.capture.run_step import record  # noqa: E402

pytest.importorskip("transformers", reason="a Hugging Face config needs transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def test_a_ctc_loss_of_known_lengths_has_the_alphas_of_a_real_one() -> None:
    """Their shape depends on the longest target, which no weight decides."""

    def step() -> Step:
        model = torch.nn.Linear(8, 5)
        x, labels = torch.zeros(2, 12, 8), torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]])

        def loss() -> torch.Tensor:
            lengths, frames = (labels > 0).sum(-1), torch.full((2,), 12)
            log_probs = model(x).log_softmax(-1).transpose(0, 1)
            return torch.nn.functional.ctc_loss(log_probs, labels.masked_select(labels > 0), frames, lengths)

        return Step(model, loss, torch.optim.SGD(model.parameters()), 12, 2)

    loss = step().loss()
    alphas = next(n for n in nodes_under(loss) if n.name() == "CtcLossBackward0")._saved_result1
    rows = {row.name: row for row in record(step, "cpu")[1].rows}
    assert rows["aten._ctc_loss"].outputs[1][0][1] == tuple(alphas.shape) == (2, 12, 2 * 3 + 1)
    assert rows["aten._ctc_loss_backward"].outputs[0][0][1] == (12, 2, 5)


def test_speech_is_aligned_with_labels_that_fit_into_its_frames() -> None:
    """Labels that are blanks are no targets (Transformers' loss_ctc.py); of more than fit the loss is infinite."""
    waves = {"conv_dim": [16, 16], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2}
    places = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    config = {"model_type": "wav2vec2", **SMALL, **waves, **places, "vocab_size": 12, "pad_token_id": 0}
    make = huggingface_maker(config, Options(seq_len=400, micro_batch_size=2, optimizer="sgd"))
    loss = make().loss()
    assert 0.0 < loss.item() < float("inf")
    recorder = record(make)[1]
    forward = next(row for row in recorder.rows if row.name == "aten._ctc_loss")
    frames, classes = forward.inputs[0][0][1][0], forward.inputs[0][0][1][2]
    assert (frames, classes) == (39, 12)
    assert forward.outputs[1][0][1] == (2, frames, 2 * (400 // 10 // 2) + 1)
    backward = next(i for i, row in enumerate(recorder.rows) if row.name == "aten._ctc_loss_backward")
    alphas = recorder.lives[forward.outputs[1][1]].bytes
    beside = [x for x in recorder.lives if (x.born, x.died) == (backward, backward + 1)]
    assert [x.bytes for x in beside] == [alphas]


def nodes_under(loss: Any) -> list[Any]:
    """Autograd's nodes of a result, each with the first of those that it passes its gradient to."""
    found = [loss.grad_fn]
    while found[-1].next_functions and found[-1].next_functions[0][0] is not None:
        found.append(found[-1].next_functions[0][0])
    return found
