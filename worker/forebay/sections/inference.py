"""The settings of which models are served, and of where and how they run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from forebay.sections.base import Section

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?|fake.*", re.ASCII)


def _device(name: str) -> str:
    if _DEVICE.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a device: set it to auto, cpu, cuda or cuda:N")
    return name


class ModelSettings(Section):
    """Which model to serve and how to make it."""

    name: str = Field("model", description="as requests and results name it")
    version: str = Field("1", description="as requests and results name it")
    factory: str | None = Field(None, description="package.module:Class, or a function that returns the model")
    path: Path | None = Field(
        None, description="a .pt2 (torch.export, AOTInductor) or TorchScript .pt file, in place of factory"
    )
    weights: Path | None = Field(None, description="a .safetensors file for the factory's model")
    options: Mapping[str, Any] = Field(default_factory=dict, description="keyword arguments of the factory")
    share: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="of an accelerator's time, in proportion to those of the other models that wait for it",
    )

    @model_validator(mode="after")
    def _one_source(self) -> ModelSettings:
        if self.factory is None and self.path is None:
            raise ValueError("set factory (package.module:Class) or path (.pt2 or TorchScript .pt)")
        if self.factory is not None and self.path is not None:
            raise ValueError("factory and path exclude each other: remove one")
        if self.factory is not None and ":" not in self.factory:
            raise ValueError(f"factory {self.factory!r} must read package.module:Class")
        return self


class Inference(Section):
    """Where and how the model runs."""

    device: Annotated[str, AfterValidator(_device)] = Field(
        "auto", description="auto, cpu, cuda or cuda:N; fake:N?… is an accelerator made of software, for tests"
    )
    replicas: int = Field(1, ge=1, description="copies of the model that run side by side")
    executor: Literal["process", "thread", "inline"] = Field(
        "process", description="process: can be killed and restarted; thread: shares weights; inline: for tests"
    )
    start_method: Literal["forkserver", "spawn"] = Field(
        "forkserver",
        description="how processes start: forkserver: forked of one that has torch imported, which saves each new "
        "replica the seconds of that (Linux; elsewhere as spawn); spawn: each in an interpreter of its own",
    )
    precision: Literal["fp32", "tf32", "bf16", "fp16", "int8", "int8_weight_only", "float8", "int4", "auto"] = Field(
        "fp32",
        description="what the model computes in; int8: linear layers with activations, too (torchao); auto: the "
        "fastest within max_deviation, measured at the start",
    )
    max_deviation: float | None = Field(
        None,
        ge=0,
        description="how far outputs may be from fp32 on golden inputs, relative to the largest, or as share of "
        "changed labels; auto takes 0.02 where it is not set",
    )
    cache_dir: Path | None = Field(
        None, description="what replicas keep for later starts, this user's alone; default ~/.cache/forebay"
    )
    compile: Literal["none", "inductor", "aoti", "cudagraph"] = Field(
        "none",
        description="before the first request; inductor: torch.compile; aoti: one package for batches of any size, "
        "kept in cache_dir; cudagraph: a graph for each size and bucket, on CUDA",
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of a device's memory that this worker may take, divided among its replicas; default all",
    )
    self_check: bool = Field(
        True,
        description="at the start, compare a few rows alone, in a batch and padded, and refuse a model that mixes them",
    )
    execution_timeout_ms: int = Field(
        30_000, ge=1, description="a batch that runs longer is a hang: the replica is restarted"
    )
    start_timeout_ms: int = Field(300_000, ge=1_000, description="to load and warm up a replica")
    max_steps: int = Field(
        4_096, ge=1, description="of a row, where the model runs in steps: one that has not ended by then is an error"
    )
    prepare_workers: int = Field(
        0, ge=0, description="processes per model that run prepare() before batching; 0: the replica runs it"
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="of a replica; default on a CPU: the cores divided by the replicas of all models, "
        "or 1 where that is as good",
    )
    canary_interval_ms: int = Field(
        10_000,
        ge=0,
        description="a replica that is idle this long runs the model's example, or random numbers, and is replaced "
        "where its answer is not that of its start; 0: never",
    )
    max_restarts: int = Field(
        5, ge=0, description="deaths of replicas in a row, with no batch finished between them, before exit 75"
    )
