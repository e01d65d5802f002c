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
from scripted import Turn, path_ids
from test_real_engine import served  # noqa: F401

from gyre_lib.trajectories.provenance import trainable_records

MINI = os.environ.get("GYRE_MINI_SWE_AGENT", str(Path(__file__).parents[2] / ".venv-mini/bin/mini"))
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which(MINI) is None, reason="mini-swe-agent is not installed in .venv-mini"),
]


def run_mini(url, key, folder, task, steps):
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
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL)


def test_a_scripted_task(start, tmp_path):
    def script(request):
        turn = request.text.count("<|im_start|>assistant") - 1
        return [
            Turn("THOUGHT: look.", "think", [("bash", {"command": "echo from-mini > made.txt; cat made.txt"})]),
            Turn("Done.", "think", [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat made.txt"})]),
        ][min(turn, 1)]

    h = start(script)
    result = run_mini(h.proxy.url, h.token, tmp_path, "make a file", 5)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert (tmp_path / "made.txt").read_text() == "from-mini\n"
    records = h.records()
    assert [r.branch_reason for r in records] == ["root", "extension"]
    assert all(path_ids(records, r) == sent.ids for r, sent in zip(records, h.engine.requests, strict=True))
    assert all(trainable_records(records).values()) and records[0].api == "openai"
    assert json.loads((tmp_path / "out.json").read_text())


@pytest.mark.engine
def test_a_task_with_a_real_engine(served, tmp_path):  # noqa: F811
    served.execution("mini-task")
    result = run_mini(served.proxy.url, "mini-task", tmp_path, "make a file", 3)
    records = served.records("mini-task")
    assert records, result.stdout[-2000:] + result.stderr[-2000:]
    assert {r.branch_reason for r in records} <= {"root", "extension"} and records[0].branch_reason == "root"
