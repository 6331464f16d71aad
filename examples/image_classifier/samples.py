"""Real photos to classify: the clear ones that ship inside scikit-image and scikit-learn, and variants of them.

The files are sent as they are on disk. A variant is the same photo as another camera, angle or light would give it,
saved as JPEG. Nothing is downloaded.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from ..sample import Answer, Sample, cycled

TITLE = "EfficientNet-lite0 names photos"
ASKED, ANSWERED = "photo", "what it sees"

PHOTOS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "chelsea.png": ("a cat", ("tabby", "tiger cat", "Egyptian cat")),
    "coffee.png": ("an espresso", ("espresso",)),
    "camera.png": ("a photographer's tripod", ("tripod",)),
    "rocket.jpg": ("a rocket", ("missile", "projectile")),
    "motorcycle_left.png": ("a motorcycle", ("moped", "motor scooter")),
    "motorcycle_right.png": ("a motorcycle", ("moped", "motor scooter")),
    "china.jpg": ("a palace in Beijing", ("palace",)),
}
"""File → what it shows, and the classes that say so: ImageNet has mopeds but no motorcycle, missiles but no rocket."""

VARIANTS: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "mirrored": ImageOps.mirror,
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.35),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.75),
    "closer": lambda image: ImageOps.fit(image, (image.width * 9 // 10, image.height * 9 // 10)),
    "tilted": lambda image: image.rotate(6, Image.Resampling.BICUBIC, fillcolor=(127, 127, 127)),
    "flat": lambda image: ImageEnhance.Contrast(image).enhance(0.88),
    "pale": lambda image: ImageEnhance.Color(image).enhance(0.5),
    "soft": lambda image: image.filter(ImageFilter.GaussianBlur(1)),
    "vivid": lambda image: ImageEnhance.Color(image).enhance(1.4),
}


def photo(name: str) -> bytes:
    """Return a photo's file as its package ships it."""
    package, folder = ("sklearn.datasets", "images") if name == "china.jpg" else ("skimage", "data")
    return (files(package) / folder / name).read_bytes()


def samples(count: int | None = None) -> list[Sample]:
    """Return `count` photos, the unmodified ones first; by default each photo and each variant once."""
    originals = {name: photo(name) for name in PHOTOS}
    every = [_sample(name, name, content, original=True) for name, content in originals.items()]
    wanted = len(PHOTOS) * (1 + len(VARIANTS)) if count is None else count
    pictures = {name: Image.open(io.BytesIO(content)).convert("RGB") for name, content in originals.items()}
    for title, change in VARIANTS.items():
        for name, picture in pictures.items():
            if len(every) < wanted:
                every.append(_sample(name, f"{name}, {title}", _saved(change(picture))))
    return cycled(every, wanted)


def reader() -> Callable[[Sample, Mapping[str, Any]], Answer]:
    """Return what reads the answer from a result's outputs."""
    return lambda _, outputs: Answer(bytes(outputs["label"][0]).decode(), float(outputs["score"][0]))


def _sample(photo_name: str, name: str, content: bytes, original: bool = False) -> Sample:
    about, right = PHOTOS[photo_name]
    return Sample(name, about, {"image": [content]}, right, original)


def _saved(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=85)
    return file.getvalue()
