"""The ragged model of `first.py`: texts as numbers, masked where they are padded."""

from __future__ import annotations

import torch
from torch import nn

from forebay import Model, TensorSpec


class Texts(Model):
    """An embedding of 1,000 words, two layers of attention, and the mean over what is no padding."""

    inputs = (TensorSpec("ids", "INT64", [-1, -1], pad=0),)
    outputs = (TensorSpec("y", "FP32", [-1, 64]),)

    def load(self, device: torch.device) -> None:
        """Build it."""
        torch.manual_seed(0)
        self.table = nn.Embedding(1_000, 64, padding_idx=0).to(device)
        layers = [nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0) for _ in range(2)]
        self.layers = nn.ModuleList(layers).to(device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Run a batch."""
        is_pad = ids == 0
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=is_pad)
        x = x.masked_fill(is_pad.unsqueeze(-1), 0.0)
        return x.sum(1) / (~is_pad).sum(1, keepdim=True).clamp(min=1)
