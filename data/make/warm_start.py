"""Make the tiny policy: a Qwen3 of about 1.3M parameters, trained on warm-start transcripts. Writes a Hugging Face folder.

    python data/make/warm_start.py [--out data/models/tiny-qwen3] [--steps 240] [--seed 0]        (three minutes on one idle CPU core)

Loss on the policy's own tokens only, through the same renderer as the proxy. The training kinds and nouns leave out the held-out pairs.
"""

import argparse
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from lookup_tasks import draw_task, training_pairs
from make_tokenizer import make_tokenizer
from rendering import render_prompt, render_transcript, renderer_of
from transcripts import Habits, draw_transcript
from transformers import Qwen3Config, Qwen3ForCausalLM

EMBEDDING_MULTIPLE = 64
"""So that tensor parallel ranks share the embedding evenly; training drives the logits of unused rows down."""


def new_policy(vocabulary: int, eos: int, pad: int) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=160,
            intermediate_size=448,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=40,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            eos_token_id=eos,
            bos_token_id=None,
            pad_token_id=pad,
            dtype=torch.float32,
        )
    )


class TranscriptLoss:
    """Mean loss of a batch of transcripts. The prompt's constant part is computed once for the whole batch."""

    def __init__(self, model: Qwen3ForCausalLM, renderer: Any, pad: int) -> None:
        self.model, self.renderer, self.pad = model, renderer, pad
        self.prefix = torch.tensor([constant_part(renderer)])

    def __call__(self, transcripts: list[list[dict[str, Any]]]) -> torch.Tensor:
        shared = self.prefix.shape[1]
        rows = [render_transcript(self.renderer, messages) for messages in transcripts]
        width = max(len(ids) for ids, _ in rows) - shared
        ids = torch.full((len(rows), width), self.pad)
        targets = torch.full((len(rows), width), -100)
        for row, (tokens, emitted) in enumerate(rows):
            tail, mask = tokens[shared:], emitted[shared:]
            ids[row, : len(tail)] = torch.tensor(tail)
            targets[row, : len(tail)] = torch.tensor([t if m else -100 for t, m in zip(tail, mask, strict=True)])
        cache = self.model(self.prefix, use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(len(rows))
        logits = self.model(ids, past_key_values=cache, use_cache=True).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100)


def constant_part(renderer: Any) -> list[int]:
    """The ids with which every prompt begins: system text, tools, and the opening of the user's turn."""
    one, other = (render_prompt(renderer, [{"role": "user", "content": text}]) for text in ("a", "b"))
    return one[: next(i for i, (x, y) in enumerate(zip(one, other, strict=True)) if x != y)]


def optimizers_of(model: Qwen3ForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (half the steps that Adam alone needs), Adam for embedding and norms."""
    layers = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(layers, lr=peak, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(out: Path, steps: int, rows: int, seed: int, habits: Habits, peak: float) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    tokenizer = make_tokenizer()
    rows_of_embedding = math.ceil(len(tokenizer) / EMBEDDING_MULTIPLE) * EMBEDDING_MULTIPLE
    model = new_policy(rows_of_embedding, tokenizer.eos_token_id, tokenizer.pad_token_id)
    loss_of = TranscriptLoss(model, renderer_of(tokenizer), tokenizer.pad_token_id)
    optimizers = optimizers_of(model, peak)
    started = time.monotonic()
    for step in range(steps):
        rate = peak * min(1.0, (step + 1) / 40, (steps - step) / (0.4 * steps))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
        loss = loss_of([draw_transcript(draw, draw_task(draw, *draw.choice(training_pairs())), habits) for _ in range(rows)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step} loss {loss.item():.4f} {time.monotonic() - started:.0f} s, {time.process_time():.0f} CPU s", flush=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    print(f"{out}: {sum(p.numel() for p in model.parameters())} parameters, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("data/models/tiny-qwen3"))
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peak", type=float, default=4e-3, help="highest learning rate")
    options = parser.parse_args()
    train(options.out, options.steps, options.rows, options.seed, Habits(), options.peak)
