"""A small agent program: it knows a base URL and a key, nothing else of the system that trains the model behind them.

Stand-alone (standard library only, no package import), so that it starts in a few milliseconds inside a sandbox:

    ANTHROPIC_BASE_URL=http://127.0.0.1:8484 ANTHROPIC_API_KEY=… python builtin_agent.py --instruction FILE --max-turns 6 …

It loops over model calls (Anthropic Messages API, not streaming) and the tool calls they ask for (shell, read, write) until the model
answers without a tool call. Exit codes: 0 finished, 2 bad usage, 3 the model endpoint failed for good, 4 stopped after --max-turns.
"""

import argparse
import http.client
import json
import os
import subprocess
import sys
import time

SYSTEM_PROMPT = "You are an agent in the folder /app. Use the tools to do the task."

DESCRIPTIONS = {"shell": "Run a command.", "read": "Read a file.", "write": "Write a file."}
ARGUMENTS = {"shell": ("command",), "read": ("path",), "write": ("path", "content")}
"""Every argument is a text and required."""
TOOLS = [
    {
        "name": name,
        "description": description,
        "input_schema": {
            "type": "object",
            "properties": {argument: {"type": "string"} for argument in ARGUMENTS[name]},
            "required": list(ARGUMENTS[name]),
        },
    }
    for name, description in DESCRIPTIONS.items()
]

FINISHED, BAD_USAGE, ENDPOINT_FAILED, TURNS_USED_UP = 0, 2, 3, 4
RETRIED_STATUS = frozenset({408, 409, 429, 500, 502, 503, 504, 529})
NO_OUTPUT = "(no output)"


class EndpointFailed(Exception):
    """The model endpoint refused, or kept failing after all retries."""


class Endpoint:
    """The Messages API behind a base URL. One connection, reopened when it breaks."""

    def __init__(self, base_url: str, key: str, timeout_s: float, retries: int) -> None:
        scheme, _, rest = base_url.partition("://")
        if scheme != "http" or not rest:
            raise ValueError(f"ANTHROPIC_BASE_URL: an http:// address is needed, got {base_url!r}")
        self._address, _, path = rest.partition("/")
        self._path = f"/{path.rstrip('/')}/v1/messages" if path else "/v1/messages"
        self._key = key
        self._timeout_s = timeout_s
        self._retries = retries
        self._connection: http.client.HTTPConnection | None = None

    def create_message(self, body: dict) -> dict:
        """The reply as a dict; raises EndpointFailed with the last error's text."""
        data = json.dumps(body).encode()
        for attempt in range(self._retries + 1):
            try:
                status, retry_after, text = self._post(data)
            except (OSError, http.client.HTTPException) as error:
                self._connection = None
                status, retry_after, text = 0, "", f"{type(error).__name__}: {error}"
            if status == 200:
                return json.loads(text)
            if status and status not in RETRIED_STATUS:
                break
            if attempt < self._retries:
                time.sleep(_retry_delay_s(attempt, retry_after))
        raise EndpointFailed(f"status {status}: {text[:400]}")

    def _post(self, data: bytes) -> tuple[int, str, str]:
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._address, timeout=self._timeout_s)
        headers = {"content-type": "application/json", "x-api-key": self._key, "anthropic-version": "2023-06-01"}
        self._connection.request("POST", self._path, data, headers)
        reply = self._connection.getresponse()
        return reply.status, reply.headers.get("retry-after", ""), reply.read().decode("utf-8", "replace")


def _retry_delay_s(attempt: int, retry_after: str) -> float:
    try:
        return min(30.0, float(retry_after))
    except ValueError:
        return min(8.0, 0.5 * 2**attempt)


def run_tool(name: str, arguments: object, timeout_s: float, output_limit: int) -> tuple[str, bool]:
    """(text for the model, is it an error). Whatever the model asks for, this returns: a wrong call is answered, not raised."""
    if not isinstance(arguments, dict):
        return "arguments must be an object", True
    if name not in ARGUMENTS:
        return f"unknown tool {name}", True
    values: list[str] = []
    for key in ARGUMENTS[name]:
        value = arguments.get(key)
        if not isinstance(value, str):
            return f"{name} needs a text argument {key}", True
        values.append(value)
    try:
        if name == "shell":
            return _shell(values[0], timeout_s, output_limit)
        if name == "read":
            with open(values[0], encoding="utf-8", errors="replace") as file:
                return _shortened(file.read(output_limit + 1), output_limit) or NO_OUTPUT, False
        with open(values[0], "w", encoding="utf-8") as file:
            file.write(values[1])
        return NO_OUTPUT, False
    except (OSError, ValueError) as error:
        return str(error), True


def _shell(command: str, timeout_s: float, output_limit: int) -> tuple[str, bool]:
    process = subprocess.Popen(
        ["/bin/bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"stopped after {timeout_s:g} s", True
    text = _shortened(output.decode("utf-8", "replace").rstrip("\n"), output_limit)
    if process.returncode:
        return f"{text}\n[exit {process.returncode}]".lstrip("\n"), True
    return text or NO_OUTPUT, False


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n[cut]"


def run_agent(endpoint: Endpoint, instruction: str, options: argparse.Namespace) -> int:
    """The loop: model call, its tool calls, their results, again; returns the exit code."""
    messages: list[dict] = [{"role": "user", "content": instruction}]
    for _ in range(options.max_turns):
        reply = endpoint.create_message(
            {
                "model": options.model,
                "max_tokens": options.max_tokens,
                "system": SYSTEM_PROMPT,
                "tools": TOOLS,
                "messages": messages,
            }
        )
        blocks = reply.get("content") or []
        calls = [block for block in blocks if block.get("type") == "tool_use"]
        print(json.dumps({"reply": blocks, "stop_reason": reply.get("stop_reason")}), flush=True)
        if not calls:
            return FINISHED
        messages.append({"role": "assistant", "content": blocks})
        results = []
        for call in calls:
            text, is_error = run_tool(str(call.get("name")), call.get("input"), options.tool_timeout, options.tool_output)
            print(json.dumps({"tool": call.get("name"), "result": text}), flush=True)
            results.append({"type": "tool_result", "tool_use_id": call.get("id"), "content": text, "is_error": is_error})
        messages.append({"role": "user", "content": results})
    return TURNS_USED_UP


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instruction", required=True, help="file that holds the task's instruction")
    parser.add_argument("--model", default="policy")
    parser.add_argument("--max-turns", type=int, default=8, help="model calls")
    parser.add_argument("--max-tokens", type=int, default=256, help="output tokens of one model call")
    parser.add_argument("--request-timeout", type=float, default=600.0, help="seconds for one model call")
    parser.add_argument("--request-retries", type=int, default=4)
    parser.add_argument("--tool-timeout", type=float, default=30.0, help="seconds for one shell command")
    parser.add_argument("--tool-output", type=int, default=2000, help="characters of a tool's output that the model sees")
    options = parser.parse_args()
    try:
        with open(options.instruction, encoding="utf-8") as file:
            instruction = file.read().strip()
        endpoint = Endpoint(
            os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_API_KEY"], options.request_timeout, options.request_retries
        )
    except KeyError as error:
        print(f"environment variable {error.args[0]} is not set", file=sys.stderr)
        return BAD_USAGE
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return BAD_USAGE
    try:
        return run_agent(endpoint, instruction, options)
    except EndpointFailed as error:
        print(f"model endpoint failed: {error}", file=sys.stderr)
        return ENDPOINT_FAILED


if __name__ == "__main__":
    sys.exit(main())
