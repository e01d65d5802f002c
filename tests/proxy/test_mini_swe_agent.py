"""mini-swe-agent, unmodified, through the proxy: opt-in, as it needs an environment of its own (it pulls in LiteLLM).

    python3.11 -m venv .venv-mini && .venv-mini/bin/pip install mini-swe-agent==2.4.6 litellm==1.80.0

LiteLLM is pinned: 1.82.7, 1.82.8 and 1.107.0 were malicious releases. GYRE_MINI_SWE_AGENT names another `mini`.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from scripted import ProxyProcess, Turn, harness, path_ids
from test_real_engine import exact, serving

from gyre_lib.trajectories.provenance import trainable_records
from proxy_app.rendering import Rendering

POLICY = Path(__file__).parents[2] / "data/models/tiny-qwen3"
SHORT = ("agent.system_template=You are an agent.", "agent.instance_template={{task}}")
"""Prompts of a length that a policy of a million parameters and a window of 2,048 tokens can take."""
MINI = os.environ.get("GYRE_MINI_SWE_AGENT", str(Path(__file__).parents[2] / ".venv-mini/bin/mini"))
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which(MINI) is None, reason="mini-swe-agent is not installed in .venv-mini"),
]


def run_mini(url, key, folder, task, steps, settings=()):
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": key,
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_GLOBAL_CONFIG_DIR": str(folder),
    }
    command = [MINI, "--yolo", "--exit-immediately", "--task", task, "--model", "openai/policy", "--output", str(folder / "out.json")]
    command += ["--cost-limit", "0", "-c", "mini.yaml", "-c", f"agent.step_limit={steps}"]
    command += [text for setting in settings for text in ("-c", setting)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)


def two_turns(request):
    turn = request.text.count("<|im_start|>assistant") - 1
    return [
        Turn("THOUGHT: look.", "think", [("bash", {"command": "echo from-mini > made.txt; cat made.txt"})]),
        Turn("Done.", "think", [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat made.txt"})]),
    ][min(turn, 1)]


def test_a_scripted_task(start, tmp_path):
    h = start(two_turns)
    result = run_mini(h.proxy.url, h.token, tmp_path, "make a file", 5)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert (tmp_path / "made.txt").read_text() == "from-mini\n"
    records = h.records()
    assert [r.branch_reason for r in records] == ["root", "extension"]
    assert all(path_ids(records, r) == sent.ids for r, sent in zip(records, h.engine.requests, strict=True))
    assert all(trainable_records(records).values()) and records[0].api == "openai"
    assert json.loads((tmp_path / "out.json").read_text())


def learn(records, folder):
    """The shipped tiny policy, trained on the recorded tokens of one execution until it says the same: a real policy for a real engine."""
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0)
    last = records[-1]
    ids = path_ids(records, last) + last.output_ids
    labels = [-100] * len(ids)
    for record in records:
        start = len(path_ids(records, record))
        labels[start : start + len(record.output_ids)] = record.output_ids
    steps = 300
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1, step / 20) * (1 - step / steps)
        loss = model(torch.tensor([ids]), labels=torch.tensor([labels])).loss
        if loss.item() < 1e-4:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss.item() < 5e-4, "the sampled turns would not be the learned ones"
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(POLICY).save_pretrained(folder)
    return folder


@pytest.mark.engine
def test_a_task_with_a_real_engine(engine_fork_socket, free_port, tmp_path):
    """A policy that has learned one task's two turns does it again: sampled by SGLang, in mini-swe-agent's own loop, to its own end."""
    scripted, real = tmp_path / "scripted", tmp_path / "real"
    scripted.mkdir()
    real.mkdir()
    proxy = ProxyProcess(tmp_path / "scripted-run", POLICY, "qwen3")
    try:
        with harness(proxy, POLICY, Rendering(POLICY, "qwen3"), two_turns) as shown:
            assert run_mini(proxy.url, shown.token, scripted, "make a file", 5, SHORT).returncode == 0
            policy = learn(shown.records(), tmp_path / "policy")
    finally:
        proxy.stop()

    with serving(policy, engine_fork_socket, free_port(), real) as served:
        served.execution("mini-task")
        result = run_mini(served.proxy.url, "mini-task", real, "make a file", 5, SHORT)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
        assert (real / "made.txt").read_text() == "from-mini\n"
        assert json.loads((real / "out.json").read_text())["info"]["exit_status"] == "Submitted"
        exact(served, "mini-task", 2)
