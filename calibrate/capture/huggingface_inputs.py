"""Makes a batch for a Hugging Face model from its config: token ids, images, videos, or sound."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from sim.core.errors import InputError

PARTS = ("vision_config", "audio_config", "encoder", "encoder_config", "backbone_config", "text_config")
COMPARED = ("input_ids", "pixel_values", "input_features")
IMAGE, CHANNELS, FRAMES, BINS = 224, 3, 8, 80  # where a config does not say it; most models' own sizes


def batch_for(model: Any, rows: int, tokens: int, trains: bool = True) -> dict[str, Any]:
    """Return the arguments of one forward: the model's main input, what it cannot run without, and in training labels.

    Without labels, which are the decoder's input too, an encoder's decoder gets as many tokens as the encoder.

    Values are zeros. A model of text and images gets text alone, unless it cannot run without images. Sound has
    `tokens` samples, or as many frames.

    Raises:
        InputError: if the model reads something else, such as a protein or a graph.
    """
    arguments = inspect.signature(model.forward).parameters
    first = next(iter(arguments), "")
    main = model.main_input_name if model.main_input_name in arguments else first
    needed = [n for n, a in arguments.items() if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD]
    # Without labels, text and images are compared with each other, as CLIP compares them.
    both = [] if "labels" in arguments else [n for n in COMPARED if n in arguments]
    batch: dict[str, Any] = {"return_loss": True} if trains and "return_loss" in arguments else {}
    decodes = not trains and getattr(model.config, "is_encoder_decoder", False)
    decoder = [n for n in ("decoder_input_ids",) if decodes and n in arguments]
    for name in dict.fromkeys([main, *needed, *(both if len(both) > 1 else ()), *decoder]):
        if name not in INPUTS:
            raise InputError(
                f"{type(model).__name__}: has the input {name}; known from a config are {', '.join(INPUTS)}; "
                "write a function that returns a calibrate.capture.Step, and give package.module:function"
            )
        batch[name] = INPUTS[name](model.config, rows, tokens)
    if trains and "labels" in arguments:
        batch["labels"] = _labels(model, batch, rows, tokens)
    return batch


def _labels(model: Any, batch: dict[str, Any], rows: int, tokens: int) -> torch.Tensor:
    """Return tokens to predict, or one class a row."""
    if "Classification" in type(model).__name__:
        return torch.zeros(rows, dtype=torch.long)
    labels: torch.Tensor = batch.get("input_ids", torch.zeros(rows, tokens, dtype=torch.long))
    return labels


def _values(config: Any, *names: str) -> Iterator[Any]:
    """Yield what a config or one of its parts says under one of these names."""
    for part in (config, *(getattr(config, p, None) for p in PARTS)):
        for name in names:
            found = getattr(part, name, None)
            if found is not None:
                yield found


def _number(config: Any, default: int, *names: str) -> int:
    return next((x for x in _values(config, *names) if isinstance(x, int)), default)


def _image(config: Any, rows: int, _: int) -> torch.Tensor:
    size = next(_values(config, "image_size", "img_size", "input_size", "crop_size"), IMAGE)
    if isinstance(size, dict):
        size = [size.get("height", IMAGE), size.get("width", IMAGE)]
    height, width = size[-2:] if isinstance(size, list | tuple) else (size, size)
    frames = next(_values(config, "num_frames", "frames_per_clip"), None)
    shape = (rows, _number(config, CHANNELS, "num_channels", "in_channels", "in_chans"), height, width)
    return torch.zeros(shape if frames is None else (rows, int(frames), *shape[1:]))


def _video(config: Any, rows: int, tokens: int) -> torch.Tensor:
    image = _image(config, rows, tokens)
    return image if image.dim() == 5 else image.unsqueeze(1).repeat(1, FRAMES, 1, 1, 1)


def _features(config: Any, rows: int, tokens: int) -> torch.Tensor:
    """Return a spectrogram: [bins, frames] where a config fixes the frames after a convolution of stride 2."""
    bins = _number(config, BINS, "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
    positions = next(_values(config, "max_source_positions"), None)
    if positions is not None and next(_values(config, "input_feat_per_channel"), None) is None:
        return torch.zeros(rows, bins, 2 * int(positions))
    return torch.zeros(rows, tokens, bins)


def _samples(config: Any, rows: int, tokens: int) -> torch.Tensor:
    """Return a waveform, of each channel if the config counts them, or a spectrogram [frames, bins] if it has both."""
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if bins is not None and frames is not None:
        return torch.zeros(rows, frames, bins)
    channels = getattr(config, "audio_channels", None)
    return torch.zeros(rows, tokens) if channels is None else torch.zeros(rows, channels, tokens)


def _tokens(_: Any, rows: int, tokens: int) -> torch.Tensor:
    return torch.zeros(rows, tokens, dtype=torch.long)


INPUTS: dict[str, Callable[[Any, int, int], torch.Tensor]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "attention_mask": lambda config, rows, tokens: torch.ones(rows, tokens, dtype=torch.long),
    "pixel_values": _image,
    "pixel_values_videos": _video,
    "input_features": _features,
    "input_values": _samples,
}
