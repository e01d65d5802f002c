"""Harnesses: the command lines of programs that are not ours, and how their ends are read."""

import json
from pathlib import Path

import pytest

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.harnesses.builtin import BuiltinHarness
from gyre_lib.rollout.harnesses.choice import harness_named
from gyre_lib.rollout.harnesses.claude_code import ClaudeCode
from gyre_lib.rollout.harnesses.mini_swe_agent import MiniSweAgent
from gyre_lib.rollout.harnesses.protocol import HarnessSettings


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "agent"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("harness", [ClaudeCode("no-such-program"), MiniSweAgent("no-such-program")])
def test_a_program_that_is_not_installed_is_refused_with_the_way_to_get_it(harness):
    with pytest.raises(InputError, match=r"rollout\.harness.*install"):
        harness.check()


def test_every_configured_name_has_a_harness():
    assert [harness_named(name).name for name in ("builtin", "claude-code", "mini-swe-agent")] == [
        "builtin",
        "claude-code",
        "mini-swe-agent",
    ]


def test_claude_code_knows_a_base_url_and_a_key_and_waits_long_enough(program: Path):
    made = ClaudeCode(str(program)).command(HarnessSettings("key-1", "policy", 30, 4096, 262144, 7200.0), "do it")
    assert made.argv[1:3] == ("-p", "do it")
    assert made.env["ANTHROPIC_API_KEY"] == "key-1"
    assert made.env["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:8484"
    assert (made.env["API_FORCE_IDLE_TIMEOUT"], made.env["API_TIMEOUT_MS"]) == ("0", "7200000")
    assert made.read_only[made.argv[0]] == program


@pytest.mark.parametrize(
    ("code", "result", "failed"),
    [
        (0, {"subtype": "success", "is_error": False}, False),
        (1, {"subtype": "error_max_turns", "is_error": True, "terminal_reason": "max_turns"}, False),
        (1, {"subtype": "success", "is_error": True, "terminal_reason": "api_error", "api_error_status": 529}, True),
        (1, {"subtype": "success", "is_error": True, "terminal_reason": "api_error", "api_error_status": 400}, False),
    ],
)
def test_the_last_result_event_of_claude_code_decides(tmp_path: Path, program: Path, code: int, result: dict, failed: bool):
    output = tmp_path / "log"
    events = [{"type": "result", "is_error": False}, {"type": "system"}, {"type": "result", **result}]
    output.write_text("warning\n" + "\n".join(map(json.dumps, events)) + "\n")
    assert ClaudeCode(str(program)).read_end(code, output).endpoint_failed is failed


def test_mini_swe_agent_brings_its_environment(program: Path, tmp_path: Path):
    made = MiniSweAgent(str(program)).command(HarnessSettings("key-1"), "do it")
    assert made.env["OPENAI_API_KEY"] == "key-1"
    assert list(made.read_only.values()) == [tmp_path]


def test_the_builtin_agent_gives_the_reason_of_an_endpoint_failure(tmp_path: Path):
    (tmp_path / "log").write_text("{}\nmodel endpoint failed: status 529: busy\n")
    end = BuiltinHarness().read_end(3, tmp_path / "log")
    assert (end.endpoint_failed, end.detail) == (True, "model endpoint failed: status 529: busy")
    assert BuiltinHarness().read_end(4, tmp_path / "log").endpoint_failed is False
