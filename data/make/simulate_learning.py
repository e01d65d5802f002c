"""Would this policy learn in the demo's few updates? One process, emulated tools, the objective and staleness of the real system.

    python data/make/simulate_learning.py [--model data/models/tiny-qwen3] [--seeds 5] [--updates 12] [--groups 8] …

Prints, for each seed, the held-out score before and after with standard errors, and the habits on the way. It chooses settings; the
figures that count are the demo's own.
"""

import argparse
import copy
import json
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from emulated_shell import EmulatedShell
from lookup_tasks import ANSWER_FILE, LookupTask, draw_task, heldout_pairs, training_pairs
from rendering import render_prompt, renderer_of
from transformers import AutoTokenizer, Qwen3ForCausalLM


@dataclass
class Play:
    """One execution: the ids so far, which of them the policy emitted, and their log-probs."""

    task: LookupTask
    ids: list[int]
    targets: list[bool]
    logprobs: list[float]
    shell: EmulatedShell
    calls: int = 0
    over: bool = False
    commands: list[str] = field(default_factory=list)

    @property
    def reward(self) -> float:
        return float(self.shell.files.get(ANSWER_FILE, "").rstrip("\n") == self.task.answer)


class Player:
    """Plays executions in one batch: sampling with a key-value cache, replies parsed by the proxy's renderer."""

    def __init__(self, tokenizer: Any, temperature: float, max_turns: int, max_output_tokens: int) -> None:
        self.renderer = renderer_of(tokenizer)
        self.temperature, self.max_turns, self.max_output_tokens = temperature, max_turns, max_output_tokens
        self.stop = set(self.renderer.get_stop_token_ids())

    def play(self, model: Qwen3ForCausalLM, tasks: list[LookupTask]) -> list[Play]:
        plays = []
        for task in tasks:
            ids = render_prompt(self.renderer, [{"role": "user", "content": task.instruction}])
            plays.append(Play(task, ids, [False] * len(ids), [0.0] * len(ids), EmulatedShell(task)))
        while active := [play for play in plays if not play.over]:
            for play, (output, logprobs) in zip(active, self._sample(model, [play.ids for play in active]), strict=True):
                self._advance(play, output, logprobs)
        return plays

    def _advance(self, play: Play, output: list[int], logprobs: list[float]) -> None:
        prompt = list(play.ids)
        play.ids += output
        play.targets += [True] * len(output)
        play.logprobs += logprobs
        play.calls += 1
        parsed = self.renderer.parse_response(output, prompt_ids=prompt[-16:])
        calls = [call for call in parsed.tool_calls or [] if call.name == "shell" and isinstance(call.arguments, dict)]
        if not calls or output[-1] not in self.stop or play.calls >= self.max_turns:
            play.over = True
            return
        results = []
        for call in calls:
            command = str(call.arguments.get("command"))
            play.commands.append(command)
            results.append({"role": "tool", "content": play.shell.run(command)})
        bridged = self.renderer.bridge_to_next_turn(prompt[-40:], output, results)
        added = bridged.token_ids[len(prompt[-40:]) + len(output) :]
        play.ids += added
        play.targets += [False] * len(added)
        play.logprobs += [0.0] * len(added)

    @torch.no_grad()
    def _sample(self, model: Qwen3ForCausalLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        mask = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        outputs: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        reply = model(ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        alive = torch.ones(len(prompts), dtype=torch.bool)
        for _ in range(self.max_output_tokens):
            scores = torch.log_softmax(reply.logits[:, -1] / self.temperature, -1)
            chosen = torch.multinomial(scores.exp(), 1)
            for row, (token, score) in enumerate(zip(chosen[:, 0].tolist(), scores.gather(1, chosen)[:, 0].tolist(), strict=True)):
                if alive[row]:
                    outputs[row].append(token)
                    logprobs[row].append(score)
                    alive[row] = token not in self.stop
            if not alive.any():
                break
            mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.long)], 1)
            positions = positions[:, -1:] + 1
            reply = model(chosen, attention_mask=mask, position_ids=positions, past_key_values=reply.past_key_values, use_cache=True)
        return list(zip(outputs, logprobs, strict=True))


@dataclass
class Settings:
    updates: int = 10
    groups: int = 4
    executions: int = 8
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    ratio_low: float = 0.8
    ratio_high: float = 1.25
    temperature: float = 1.0
    steps_per_burst: int = 2
    extra_dispatch: float = 0.5
    clip_grad_norm: float = 1.0
    max_turns: int = 4
    max_output_tokens: int = 64


def objective(model: Qwen3ForCausalLM, groups: list[list[Play]], settings: Settings, pad: int) -> dict[str, float]:
    """Accumulates the batch's gradient (execution-level ratio gate, capped token weights); returns what happened."""
    rewards = [torch.tensor([play.reward for play in group]) for group in groups]
    plays = [play for group in groups for play in group]
    advantages = torch.cat([(r - r.mean()) / (r.std(unbiased=False) + 1e-6) if r.std(unbiased=False) > 0 else r * 0 for r in rewards])
    used = [(play, advantage.item()) for play, advantage in zip(plays, advantages, strict=True) if advantage != 0]
    gated = 0
    ratios = []
    for first in range(0, len(used), 16):
        part = used[first : first + 16]
        width = max(len(play.ids) for play, _ in part)
        ids = torch.full((len(part), width), pad)
        targets = torch.zeros(len(part), width)
        recorded = torch.zeros(len(part), width)
        for row, (play, _) in enumerate(part):
            ids[row, : len(play.ids)] = torch.tensor(play.ids)
            targets[row, : len(play.ids)] = torch.tensor(play.targets, dtype=torch.float32)
            recorded[row, : len(play.ids)] = torch.tensor(play.logprobs)
        scores = torch.log_softmax(model(ids).logits[:, :-1] / settings.temperature, -1).gather(2, ids[:, 1:, None])[..., 0]
        mask = targets[:, 1:]
        log_ratio = (scores.detach() - recorded[:, 1:]) * mask
        count = mask.sum(1)
        ratio = (log_ratio.sum(1) / count).exp()
        advantage = torch.tensor([a for _, a in part])
        gate = ~(((advantage > 0) & (ratio > settings.ratio_high)) | ((advantage < 0) & (ratio < settings.ratio_low)))
        weight = log_ratio.exp().clamp(max=5.0)
        loss = -(gate * advantage * (weight * scores * mask).sum(1) / count).sum() / len(plays)
        loss.backward()
        gated += int((~gate).sum())
        ratios += ratio.tolist()
    return {
        "used": len(used) / len(plays),
        "gated": gated / max(1, len(used)),
        "ratio_spread": max((abs(math.log(r)) for r in ratios), default=0),
    }


def habits(plays: list[Play]) -> dict[str, float]:
    """Shares of executions that show each habit."""
    computed = [[c for c in play.commands if " > " in c] for play in plays]
    return {
        "looked": _mean([play.commands[:1] == ["ls"] for play in plays]),
        "right_file": _mean([c[-1].endswith(f"> {ANSWER_FILE}") for c in computed if c]),
        "calls": _mean([play.calls for play in plays]),
        "tokens": _mean([sum(play.targets) for play in plays]),
    }


def _mean(values: list) -> float:
    return sum(values) / max(1, len(values))


def score(player: Player, model: Qwen3ForCausalLM, seed: int, samples: int) -> tuple[float, float, list[Play]]:
    """(mean, standard error, plays) over the held-out pairs, `samples` executions each, tasks drawn with the seed."""
    draw = random.Random(seed)
    tasks = [draw_task(draw, kind, noun) for kind, noun in sorted(heldout_pairs()) * 2]
    plays = player.play(model, [task for task in tasks for _ in range(samples)])
    mean = _mean([play.reward for play in plays])
    return mean, math.sqrt(mean * (1 - mean) / len(plays)), plays


def learn(
    model_dir: Path, seed: int, settings: Settings, samples: int, log: bool, known: tuple[float, float, list[Play]] | None
) -> dict[str, Any]:
    """One run. `known`: the policy's score before, where it has been measured already (it does not depend on the seed)."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    player = Player(tokenizer, settings.temperature, settings.max_turns, settings.max_output_tokens)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), eps=settings.adam_eps, weight_decay=0.0
    )
    # As in the shipped folder: two fixed tasks of each pair, taken in a shuffled order.
    shipped = random.Random(7)
    tasks = [draw_task(shipped, *pair) for pair in training_pairs() * 2]
    order = draw.sample(tasks, len(tasks))
    start = known or score(player, model, 1000, 2 * samples)
    before, error_before, plays = start
    history = [{"update": 0, "score": before, **habits(plays)}]
    published = copy.deepcopy(model)
    queue: list[list[Play]] = []
    dispatched = 0

    def dispatch(groups: int) -> None:
        nonlocal dispatched
        chosen = [order[(dispatched + i) % len(order)] for i in range(groups)]
        dispatched += groups
        played = player.play(published, [task for task in chosen for _ in range(settings.executions)])
        queue.extend(played[i : i + settings.executions] for i in range(0, len(played), settings.executions))

    dispatch(round((settings.extra_dispatch + settings.steps_per_burst) * settings.groups))
    for update in range(settings.updates):
        batch, queue[:] = queue[: settings.groups], queue[settings.groups :]
        optimizer.zero_grad()
        report = objective(model, batch, settings, tokenizer.pad_token_id)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad_norm).item()
        optimizer.step()
        plays = [play for group in batch for play in group]
        history.append({"update": update + 1, "score": _mean([p.reward for p in plays]), **habits(plays), **report, "norm": norm})
        if log:
            print(json.dumps({k: round(v, 3) for k, v in history[-1].items()}), flush=True)
        if (update + 1) % settings.steps_per_burst == 0:
            published.load_state_dict(model.state_dict())
            if update + 1 < settings.updates:
                dispatch(settings.steps_per_burst * settings.groups)
    after, error_after, plays = score(player, model, 1000 + seed, samples)
    return {
        "seed": seed,
        "before": before,
        "after": after,
        "error": math.hypot(error_before, error_after),
        "habits_before": history[0],
        "habits_after": habits(plays),
        "history": history,
        "start": start,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("data/models/tiny-qwen3"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4, help="executions per held-out task")
    parser.add_argument("--log", action="store_true", help="print every update")
    for name, value in vars(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args())
    settings = Settings(**{name: options[name] for name in vars(Settings())})
    torch.set_num_threads(1)
    start = None
    for seed in range(options["first_seed"], options["first_seed"] + options["seeds"]):
        started = time.monotonic()
        result = learn(options["model"], seed, settings, options["samples"], options["log"], start)
        start = result["start"]
        after = {k: round(v, 2) for k, v in result["habits_after"].items()}
        before = {k: round(result["habits_before"][k], 2) for k in after}
        gain = result["after"] - result["before"]
        print(
            f"seed {seed}: {result['before']:.3f} -> {result['after']:.3f} (+{gain:.3f}, s.e. {result['error']:.3f},"
            f" {gain / max(result['error'], 1e-9):.1f} s.e.) before {before} after {after} {time.monotonic() - started:.0f} s",
            flush=True,
        )
