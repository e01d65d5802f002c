"""One client for everything an SGLang engine is told outside of generation: health, pause, weights, memory, aborts. Synchronous."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import httpx

MEMORY_TAGS = ("weights", "kv_cache")


class EngineError(RuntimeError):
    """The engine refused, or could not be reached; the message names its address and its answer."""


class EngineControl:
    """Control endpoints of the engine at `url`. Methods raise EngineError when the engine refuses or does not answer in `timeout_s`."""

    def __init__(self, url: str, timeout_s: float = 120.0) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=timeout_s, trust_env=False)

    def __enter__(self) -> "EngineControl":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def ready(self) -> bool:
        """Whether the engine takes requests; says nothing about a paused one. Never raises."""
        try:
            return self._client.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def prove_health(self) -> None:
        """Generate one token. Only for an engine that is not paused: a paused one answers no generation."""
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        answer = self._post("/generate", body).json()
        if len(answer["output_ids"]) != 1:
            raise EngineError(f"{self.url}: asked for one token, got {len(answer['output_ids'])}")

    def weight_version(self) -> int:
        """The version this engine serves and reports in its responses. An engine started without one counts as -1."""
        version = self._get("/model_info").json()["weight_version"]
        return int(version) if str(version).isdigit() else -1

    def life(self) -> str:
        """Differs between any two starts of engines: the seed that each was given at random."""
        return str(self._get("/server_info").json()["random_seed"])

    def pause(self, mode: Literal["retract", "in_place", "abort"] = "retract") -> None:
        """Stop generating until `resume`. retract: running requests go back to the queue with their tokens, and lose their KV; new ones wait."""
        self._post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Go on after a pause."""
        self._post("/continue_generation", {})

    def flush(self) -> None:
        """Drop the prefix cache; refused while requests run."""
        self._post("/flush_cache", None)

    def abort(self, request_id: str) -> None:
        """End one request; the engine matches by prefix, so ids have one fixed length. Unknown ids are ignored."""
        self._post("/abort_request", {"rid": request_id})

    def load(self) -> dict[str, int]:
        """Requests running and waiting, tokens in the KV cache (a snapshot that may be a few scheduler passes old)."""
        loads = self._get("/v1/loads").json()["loads"]
        names = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "cached_tokens": "num_used_tokens"}
        return {ours: sum(int(rank.get(theirs, 0)) for rank in loads) for ours, theirs in names.items()}

    def release_memory(self, tags: Iterable[str] = MEMORY_TAGS) -> None:
        """Give the memory of weights and KV cache away. The engine must be idle. Nothing happens on CPU, where there is no memory saver."""
        self._post("/release_memory_occupation", {"tags": list(tags)})

    def resume_memory(self, tags: Iterable[str] = MEMORY_TAGS) -> None:
        """Take it back. Only after `release_memory` of the same tags: SGLang's scheduler dies of a resume that was not released."""
        self._post("/resume_memory_occupation", {"tags": list(tags)})

    def load_folder(self, folder: Path, version: int) -> None:
        """Replace all weights by those of a model folder on a file system that the engine sees, and drop what was cached under the old ones.

        A folder that cannot be read changes nothing. An engine that is not paused first finishes every request it has.
        """
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        self._post("/update_weights_from_disk", body)

    def _get(self, path: str) -> httpx.Response:
        return self._checked(path, lambda: self._client.get(path))

    def _post(self, path: str, body: dict[str, Any] | None) -> httpx.Response:
        return self._checked(path, lambda: self._client.post(path, json=body))

    def _checked(self, path: str, call: Any) -> httpx.Response:
        try:
            response = call()
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        if response.status_code != 200:
            raise EngineError(f"{self.url}{path}: answered {response.status_code}: {response.text[:300]}")
        return response
