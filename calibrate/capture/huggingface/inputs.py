"""Makes a batch for a Hugging Face model from its config: token ids, images, videos, or sound."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from sim.core.errors import InputError

PARTS = ("vision_config", "audio_config", "encoder", "encoder_config", "backbone_config", "text_config")
# Ends of Transformers' names of classes with labels for each row, and for each pixel.
PER_ROW = (
    "SequenceClassification",
    "NextSentencePrediction",
    "ImageClassification",
    "VideoClassification",
    "AudioClassification",
    "SeriesClassification",
    "ForClassification",
    "XVector",
)
PER_PIXEL = ("SemanticSegmentation",)
TOKEN_IDS = ("_token_id", "_token_index")  # ends of the names of tokens with a meaning of their own
NUMBERS = ("regression", "multi_label_classification")  # Transformers' problem types with a number for each label
COMPARED = ("input_ids", "pixel_values", "input_features")
Make = Callable[[Any, int, int], Any]  # from a config, rows and tokens
IMAGE, CHANNELS, FRAMES, BINS = 224, 3, 8, 80  # where a config does not say it; most models' own sizes
SPOKEN, SPECTROGRAM_DIMS = "ForCTC", 3
SAMPLES, SUBSAMPLED = 320, 8  # of a waveform, and of a spectrogram's frames, for one frame of the result (Parakeet)


def batch_for(model: Any, rows: int, tokens: int, trains: bool = True) -> dict[str, Any]:
    """Return the arguments of one forward: the model's main input, what it cannot run without, and in training labels.

    Without labels, which are the decoder's input too, an encoder's decoder gets as many tokens as the encoder.

    Values are zeros, which a capture never reads; a real run takes random ones (`with_random_values`). A model of text
    and images gets text alone, unless it cannot run without images. Sound has `tokens` samples, or as many frames.

    Raises:
        InputError: if the model reads something else, such as a protein or a graph.
    """
    arguments = inspect.signature(model.forward).parameters
    first = next(iter(arguments), "")
    named = [model.main_input_name] if isinstance(model.main_input_name, str) else model.main_input_name
    main = [n for n in named if n in arguments] or [first]
    needed = [n for n, a in arguments.items() if a.default is a.empty and a.kind is a.POSITIONAL_OR_KEYWORD]
    # Without labels, text and images are compared with each other, as CLIP compares them; with labels, a model of
    # images that reads text too (BLIP) says what it sees.
    says = main == ["pixel_values"] and "input_ids" in arguments
    both = [n for n in COMPARED if n in arguments] if says or "labels" not in arguments else []
    batch: dict[str, Any] = {"return_loss": True} if trains and "return_loss" in arguments else {}
    decodes = not trains and getattr(model.config, "is_encoder_decoder", False)
    decoder = [n for n in ("decoder_input_ids",) if decodes and n in arguments]
    for name in dict.fromkeys([*main, *needed, *(both if len(both) > 1 else ()), *decoder]):
        if name not in INPUTS:
            raise InputError(
                f"{type(model).__name__}: has the input {name}; known from a config are {', '.join(INPUTS)}; "
                "name another class under architectures, or write a function that returns a calibrate.capture.Step, "
                "and give package.module:function"
            )
        batch[name] = _made(INPUTS, name, model, rows, tokens)
    for name in arguments if trains else ():
        if name in ("labels", "target_values"):
            objects = "dict" in str(arguments[name].annotation)
            batch[name] = _objects(model, batch, rows) if objects else _labels(model, batch, rows, tokens)
        elif name in TARGETS:
            batch[name] = _made(TARGETS, name, model, rows, tokens)
    return batch


def with_random_values(batch: dict[str, Any], config: Any) -> None:
    """Replace zeros by random tokens and normal numbers, in place, before a real run.

    Equal tokens would give equal rows. Matrices of such rows draw less power, so a GPU multiplies them up to a fifth
    faster than real data, and all tokens would go to the same experts. Tokens that stand for something else, such as
    an image, are left out.
    """
    special = [v for part in _parts(config) for k, v in vars(part).items() if k.endswith(TOKEN_IDS)]
    taken = torch.tensor(sorted({v for v in special if isinstance(v, int) and v > 0}), dtype=torch.long)
    vocabulary = _number(config, 1, "vocab_size")
    for name, x in batch.items():
        if name in ("input_ids", "decoder_input_ids"):
            x.random_(vocabulary)
            x[torch.isin(x, taken.to(x.device))] = 0
        elif isinstance(x, torch.Tensor) and x.is_floating_point():
            x.normal_()


def _parts(config: Any) -> Iterator[Any]:
    """Yield a config and its parts."""
    yield config
    yield from (found for p in PARTS if (found := getattr(config, p, None)) is not None and hasattr(found, "__dict__"))


def _made(makers: Mapping[str, Make], name: str, model: Any, rows: int, tokens: int) -> Any:
    try:
        return makers[name](model.config, rows, tokens)
    except (AttributeError, TypeError) as error:
        raise InputError(f"config.json: {type(model).__name__} reads {name}, whose size is missing: {error}") from None


def _objects(model: Any, batch: dict[str, Any], rows: int) -> list[dict[str, torch.Tensor]]:
    """Return one object for each image: its class, its box, and of a model that finds masks its mask."""
    image = batch["pixel_values"]
    found = {"class_labels": torch.zeros(1, dtype=torch.long), "boxes": torch.zeros(1, 4)}
    if type(model).__name__.endswith("Segmentation"):
        found["masks"] = torch.zeros(1, *image.shape[-2:])
    return [found] * rows


def _labels(model: Any, batch: dict[str, Any], rows: int, tokens: int) -> torch.Tensor:
    """Return tokens to predict, or for each row, token or pixel its class; a row may have numbers in place of one."""
    name, config = type(model).__name__, model.config
    if name.endswith("ForRegression"):
        return torch.zeros(rows, config.num_targets)
    if name.endswith(SPOKEN):
        return _spoken(config, batch, rows)
    if name.endswith(PER_PIXEL):
        image = batch["pixel_values"]
        return torch.zeros(rows, *image.shape[-2:], dtype=torch.long)
    if name.endswith(PER_ROW):
        numbers = config.num_labels == 1 or getattr(config, "problem_type", None) in NUMBERS
        return torch.zeros(rows, config.num_labels) if numbers else torch.zeros(rows, dtype=torch.long)
    labels: torch.Tensor = batch.get("input_ids", torch.zeros(rows, tokens, dtype=torch.long))
    return labels


def _spoken(config: Any, batch: dict[str, Any], rows: int) -> torch.Tensor:
    """Return half as many labels as the result has frames, so that even equal labels fit with blanks between them.

    A label is no blank, which is the token of padding, and of which Transformers makes no target (loss_ctc.py).
    """
    sound = batch[next(x for x in ("input_values", "input_features") if x in batch)]
    waveform = sound.dim() < SPECTROGRAM_DIMS
    each = getattr(config, "inputs_to_logits_ratio", None) or SAMPLES if waveform else SUBSAMPLED
    return torch.full((rows, max(1, sound.shape[1] // each // 2)), int(config.pad_token_id == 0))


def _values(config: Any, *names: str) -> Iterator[Any]:
    """Yield what a config or one of its parts says under one of these names."""
    for part in _parts(config):
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
    projected = next(_values(config, "input_feat_per_channel", "feature_projection_input_dim"), None)
    if positions is not None and projected is None:
        return torch.zeros(rows, bins, 2 * int(positions))
    return torch.zeros(rows, tokens, bins)


def _samples(config: Any, rows: int, tokens: int) -> torch.Tensor:
    """Return a waveform, of each channel if the config counts them, or a spectrogram [frames, bins] if it has both."""
    bins, frames = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if bins is not None and frames is not None:
        return torch.zeros(rows, frames, bins)
    channels = getattr(config, "audio_channels", None)
    return torch.zeros(rows, tokens) if channels is None else torch.zeros(rows, channels, tokens)


def _series(config: Any, rows: int, length: int) -> torch.Tensor:
    """Return the numbers of time series [rows, length, channels]; the models of one channel may have no dimension."""
    channels = getattr(config, "num_input_channels", None)
    size = getattr(config, "input_size", 1) if channels is None else channels
    return torch.zeros(rows, length) if channels is None and size == 1 else torch.zeros(rows, length, size)


def _past(config: Any) -> int:
    """Return how many numbers of the past a model of time series reads, with those that the longest lag reaches."""
    return int(config.context_length + max(getattr(config, "lags_sequence", None) or [0]))


def _times(config: Any, rows: int, length: int) -> torch.Tensor:
    return torch.zeros(rows, length, config.num_time_features + config.num_dynamic_real_features)


def _one_a_row(_: Any, rows: int, __: int) -> torch.Tensor:
    return torch.zeros(rows, dtype=torch.long)


def _tokens(_: Any, rows: int, tokens: int) -> torch.Tensor:
    return torch.zeros(rows, tokens, dtype=torch.long)


INPUTS: dict[str, Make] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "attention_mask": lambda config, rows, tokens: torch.ones(rows, tokens, dtype=torch.long),
    "pixel_values": _image,
    "pixel_values_videos": _video,
    "input_features": _features,
    "input_values": _samples,
    "past_values": lambda config, rows, _: _series(config, rows, _past(config)),
    "past_time_features": lambda config, rows, _: _times(config, rows, _past(config)),
    "past_observed_mask": lambda config, rows, _: torch.ones_like(_series(config, rows, _past(config))),
}
# What a model is to predict, beside `labels`. Of an image that is one object with its mask.
TARGETS: dict[str, Make] = {
    **dict.fromkeys(("start_positions", "end_positions", "next_sentence_label", "sentence_order_label"), _one_a_row),
    "future_values": lambda config, rows, _: _series(config, rows, config.prediction_length),
    "future_time_features": lambda config, rows, _: _times(config, rows, config.prediction_length),
    "class_labels": lambda _, rows, __: [torch.zeros(1, dtype=torch.long)] * rows,
    "mask_labels": lambda config, rows, _: [torch.zeros(1, *_image(config, 1, 0).shape[-2:])] * rows,
}
