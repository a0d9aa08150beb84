"""The target's own answers, many at once: a static cache and one CUDA graph a token.

transformers' `generate` took 146 ms a token for 2,048 rows here, ten times this. Every row starts at position 0;
while a row is within its prompt, the prompt's token replaces the one just written, so nothing is padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from transformers import DeepseekV3ForCausalLM


class Writer:
    """Writes `length` tokens a row (prompt included) for exactly `rows` rows at a time."""

    def __init__(self, model: DeepseekV3ForCausalLM, rows: int, length: int) -> None:
        self.model, self.length = model, length
        config, device = model.config, model.device
        width = config.kv_lora_rank + config.qk_rope_head_dim
        shape = (config.num_hidden_layers, rows, length, width)
        self.cache = torch.zeros(shape, dtype=model.dtype, device=device)
        self.prompts = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.lengths = torch.ones(rows, dtype=torch.long, device=device)
        self.temperature = torch.zeros(rows, 1, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.token = torch.zeros(rows, dtype=torch.long, device=device)
        self.written = torch.zeros(rows, length, dtype=torch.long, device=device)
        self.columns = torch.arange(length, device=device)
        self.up = [self._split(layer.self_attn) for layer in model.model.layers]
        self.graph: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def _split(attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """kv_b_proj as what makes keys [heads, nope, latent] and what makes values [heads, value, latent]."""
        nope, value = attention.qk_nope_head_dim, attention.v_head_dim
        weight = attention.kv_b_proj.weight.view(attention.num_heads, nope + value, -1)
        return weight[:, :nope].contiguous(), weight[:, nope:].contiguous()

    @torch.no_grad()
    def write(self, prompts: list[list[int]], temperatures: list[float]) -> torch.Tensor:
        """Tokens [rows, length]. Temperature 0 is greedy. Past an end token the target simply goes on."""
        self.prompts.zero_()
        table = torch.tensor([p + [0] * (self.length - len(p)) for p in prompts])
        self.prompts.copy_(table)
        self.lengths.copy_(torch.tensor([len(p) for p in prompts]))
        self.temperature.copy_(torch.tensor(temperatures)[:, None])
        if self.graph is None and self.model.device.type == "cuda":
            self._capture()
        self.position.zero_()
        self.token.copy_(self.prompts[:, 0])
        for _ in range(self.length):
            if self.graph is not None:
                self.graph.replay()
            else:
                self._step()
        return self.written.clone()

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.position.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        self.position.zero_()
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        self.written.index_copy_(1, self.position, self.token[:, None])
        states = self.model.model.embed_tokens(self.token)
        cos, sin = self.model.model.rotary_emb(states[None], self.position[None])
        half = cos.shape[-1] // 2
        rotary = cos[0, 0, :half], sin[0, 0, :half]
        hidden = torch.where(self.columns > self.position, float("-inf"), 0.0)
        for index, layer in enumerate(self.model.model.layers):
            states = states + self._attend(index, layer.self_attn, layer.input_layernorm(states), rotary, hidden)
            states = states + layer.mlp(layer.post_attention_layernorm(states)[:, None])[:, 0]
        logits = self.model.lm_head(self.model.model.norm(states)).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        chosen = (logits + self.temperature * noise).argmax(-1)
        self.position.add_(1)
        following = self.prompts.index_select(1, self.position.clamp(max=self.length - 1))[:, 0]
        self.token.copy_(torch.where(self.position < self.lengths, following, chosen))

    def _attend(
        self,
        index: int,
        attention: Any,
        states: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Latent attention with the key and value projections absorbed, as SGLang decodes."""
        keys_up, values_up = self.up[index]
        rank, nope = attention.kv_lora_rank, attention.qk_nope_head_dim
        query = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(states)))
        query = query.view(len(states), attention.num_heads, attention.qk_head_dim)
        latent = attention.kv_a_proj_with_mqa(states)
        row = torch.cat([attention.kv_a_layernorm(latent[:, :rank]), rotate(latent[:, rank:], *rotary)], dim=-1)
        cache = self.cache[index]
        cache.index_copy_(1, self.position, row[:, None].to(cache.dtype))
        absorbed = torch.einsum("bhn,hnr->bhr", query[..., :nope], keys_up)
        query = torch.cat([absorbed, rotate(query[..., nope:], *rotary)], dim=-1)
        scores = (query @ cache.mT).float() * attention.scaling + hidden
        mixed = functional.softmax(scores, dim=-1).to(cache.dtype) @ cache[..., :rank]
        values = torch.einsum("bhr,hvr->bhv", mixed, values_up)
        return attention.o_proj(values.flatten(1))


def rotate(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Interleaved rotary pairs; the result has the halves apart, as transformers leaves them."""
    even, odd = values[..., 0::2], values[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
