"""The update done plainly: one process, transformers' model, one unpacked row at a time, the whole batch at once.

Nothing here is shared with the trainer but the advantages: it is what the trainer is compared with, in tests and in `gyre bench training`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gyre_lib.config.run_config import TrainingConfig
from gyre_lib.training.advantages import advantages
from gyre_lib.training.packing import ReadyGroup
from gyre_lib.trajectories.materialisation import TrajectoryRow


class PlainTrainer:
    """Weights, gradients and Adam state under Hugging Face names."""

    def __init__(self, model_dir: Path, settings: TrainingConfig):
        self.settings = settings
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
        self.adam = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
        )

    def log_probs(self, row: TrajectoryRow) -> Tensor:
        """float32[targets of the row]"""
        ids = torch.as_tensor(row.token_ids.astype("int64"))
        logits = self.model(ids[None]).logits[0].float() / row.temperature
        positions = torch.as_tensor(row.targets).nonzero().squeeze(1)
        return torch.log_softmax(logits[positions - 1], dim=-1).gather(1, ids[positions][:, None]).squeeze(1)

    def step(self, groups: list[ReadyGroup]) -> dict[str, float]:
        """One update over these groups; gradients stay in place afterwards. Returns loss, norm before the clip, gated executions."""
        s = self.settings
        executions = sum(len(group.executions) for group in groups)
        self.adam.zero_grad(set_to_none=False)
        total = gated = 0.0
        for group in groups:
            values = advantages([execution.reward for execution in group.executions], s.advantage_std)
            for execution, advantage in zip(group.executions, values, strict=True):
                rows = [row for row in execution.rows if row.targets.any()]
                if not rows or advantage == 0.0:
                    continue
                behaviour = [torch.as_tensor(row.logprobs[row.targets]) for row in rows]
                with torch.no_grad():
                    ratios = [self.log_probs(row) - mu for row, mu in zip(rows, behaviour, strict=True)]
                count = sum(len(ratio) for ratio in ratios)
                ratio = float(torch.cat(ratios).double().mean().exp())
                if (advantage > 0 and ratio > s.ratio_high) or (advantage < 0 and ratio < s.ratio_low):
                    gated += 1
                    continue
                for row, log_ratio in zip(rows, ratios, strict=True):
                    weight = log_ratio.exp().clamp(max=s.token_weight_cap)
                    loss = -(advantage / count / executions) * (weight * self.log_probs(row)).sum()
                    loss.backward()
                    total += float(loss.detach())
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip_grad_norm))
        self.adam.step()
        return {"loss": total, "grad_norm": norm, "gated": gated}

    def weights(self) -> dict[str, Any]:
        """Copies, as NumPy arrays; a tied output layer is left out."""
        return _by_expert({name: parameter.detach() for name, parameter in self.model.named_parameters()})

    def gradients(self) -> dict[str, Any]:
        return _by_expert({name: parameter.grad for name, parameter in self.model.named_parameters() if parameter.grad is not None})


def _by_expert(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """NumPy copies, with transformers' stacked experts under the names that model folders have."""
    named: dict[str, Any] = {}
    for name, tensor in tensors.items():
        stem, _, stacked = name.partition("experts.")
        if not stacked:
            named[name] = tensor.clone().numpy()
            continue
        for number, expert in enumerate(tensor.clone()):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if stacked == "gate_up_proj" else [("down_proj", expert)]
            named |= {f"{stem}experts.{number}.{part}.weight": value.numpy() for part, value in parts}
    return named
