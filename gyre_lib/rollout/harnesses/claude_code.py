"""Claude Code, unmodified: the npm package's native program in print mode, with a base URL and a key.

Settings follow what version 2.1.220 was seen to do: time limits above any generation (else a slow turn is sampled twice), no traffic
but the model's, no attribution line, no caching marks, sub-agents under the same model name, the policy's true context window.
"""

import json
import os
import shutil
from pathlib import Path

from gyre_lib.config.errors import InputError
from gyre_lib.rollout.harnesses.protocol import BASE_URL, HarnessCommand, HarnessEnd, HarnessSettings

VERSION = "2.1.220"
INSTALL = f"npm install -g @anthropic-ai/claude-code@{VERSION}"
PROGRAM_INSIDE = "/run/gyre/claude"
ENDPOINT_REASONS = frozenset({"api_error"})


class ClaudeCode:
    name = "claude-code"

    def __init__(self, program: str = "") -> None:
        self._program = program or os.environ.get("GYRE_CLAUDE_CODE", "claude")

    def check(self) -> None:
        self._path()

    def _path(self) -> Path:
        found = shutil.which(self._program)
        if found is None:
            raise InputError(
                f"rollout.harness: Claude Code is not installed ({self._program} not found); `{INSTALL}`, or set GYRE_CLAUDE_CODE"
            )
        return Path(found).resolve()

    def command(self, settings: HarnessSettings, instruction: str) -> HarnessCommand:
        argv = (
            PROGRAM_INSIDE, "-p", instruction, "--output-format", "json", "--model", settings.model_name,
            "--max-turns", str(settings.max_turns), "--dangerously-skip-permissions",
        )  # fmt: skip
        longest_ms = str(int(1000 * max(settings.budget_s, 600.0)))
        env = {
            "ANTHROPIC_BASE_URL": BASE_URL,
            "ANTHROPIC_API_KEY": settings.token,
            "HOME": "/tmp",
            "IS_SANDBOX": "1",
            "API_FORCE_IDLE_TIMEOUT": "0",
            "API_TIMEOUT_MS": longest_ms,
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": longest_ms,
            "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": longest_ms,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_PROMPT_CACHING": "1",
            "ENABLE_TOOL_SEARCH": "0",
            "CLAUDE_CODE_SUBAGENT_MODEL": settings.model_name,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(settings.max_output_tokens),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(settings.max_context_tokens),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(settings.max_context_tokens),
        }
        return HarnessCommand(argv, env, {PROGRAM_INSIDE: self._path()})

    def read_end(self, exit_code: int, output: Path) -> HarnessEnd:
        """The last `result` event decides; `subtype` says success even on API errors."""
        result = _last_result(output)
        reason = str(result.get("terminal_reason", ""))
        if exit_code == 0 and not result.get("is_error"):
            return HarnessEnd()
        detail = f"exit code {exit_code} {reason} {str(result.get('result', ''))[:200]}".strip()
        status = result.get("api_error_status")
        # A 400 is the proxy's answer about this execution (a prompt too long, a closed key); only outages are the endpoint's fault.
        outage = reason in ENDPOINT_REASONS and not (isinstance(status, int) and 400 <= status < 429)
        return HarnessEnd(detail, endpoint_failed=outage)


def _last_result(output: Path) -> dict:
    for line in reversed(output.read_text(errors="replace").splitlines()):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("type") == "result":
            return event
    return {}
