"""A tool server over stdio for the CLI: one tool, `zap`, that says what it was called with."""

import json
import sys

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}

for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    method = message["method"]
    result = {}
    if method == "initialize":
        version = message["params"]["protocolVersion"]
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": [{"name": "zap", "description": "zaps", "inputSchema": SCHEMA}]}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": "zapped " + json.dumps(message["params"]["arguments"])}]}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
