"""One model call from its canonical form to a recorded answer: match, render what is new, generate, parse, record.

No lock is held around generation, so the agents of one execution run concurrently. Calls with the same agent and body share one generation
while it is open, and a recorded answer that never arrived is handed out again: a retry is not a second turn.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import orjson

from gyre_lib.engines.generation import Generated, Sampling
from gyre_lib.trajectories import classes, history
from gyre_lib.trajectories.history import EchoedCall, Message, Reply, Supplied
from gyre_lib.trajectories.tito_record import RequestRecord
from gyre_lib.trajectories.trajectory_tree import TAIL_TOKENS, Node, WalkState, branch_reason, empty_path
from proxy_app import calls
from proxy_app.calls import Answer, AnswerCall, ApiError, Call, PromptTooLong
from proxy_app.generating import Counters, Generator, Sampled
from proxy_app.recording import Recorder
from proxy_app.rendering import Rendering, RenderingRefused
from proxy_app.routing import ExecutionRoute
from proxy_app.sessions import Execution, Flight, prompt_tail

LONG_TEXT = 16_384
"""Characters of new text from which rendering leaves the event loop."""
TASK_TEXT = 16
"""Shortest call argument that may be a sub-agent's task."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A call with its place in the tree."""

    call: Call
    state: WalkState
    agent_id: str
    parent_agent_id: str
    sub_agent: bool
    request_digest: str

    @property
    def rest(self) -> list[Message]:
        """Messages that the path does not hold yet."""
        return self.call.messages[self.state.consumed :]


class Turns:
    """Answers calls of all executions of this proxy."""

    def __init__(self, run_id: str, rendering: Rendering, generator: Generator, recorder: Recorder, counters: Counters) -> None:
        self._run_id = run_id
        self._rendering = rendering
        self._generator = generator
        self._recorder = recorder
        self._counters = counters
        self._executions: dict[str, Execution] = {}

    async def execution(self, execution_id: str) -> Execution:
        """The state of an execution, rebuilt from its records if an earlier process wrote some."""
        found = self._executions.get(execution_id)
        if found is None:
            found = self._executions[execution_id] = Execution(execution_id)
        if not found.loaded:
            async with found.loading:
                if not found.loaded:
                    if self._recorder.has_earlier(execution_id):
                        records = await asyncio.get_running_loop().run_in_executor(None, self._recorder.read, execution_id)
                        found.restore(records, [orjson.loads(record.metadata) for record in records])
                    found.loaded = True
        return found

    async def close(self, execution_id: str) -> dict[str, int]:
        """End an execution: its open calls are cancelled, what is recorded is durable. Returns what it used at this proxy."""
        if self._recorder.has_earlier_own(execution_id):
            await self.execution(execution_id)
        return await self.drop(execution_id)

    async def drop(self, execution_id: str) -> dict[str, int]:
        """The same for what this process holds of an execution, without reading what earlier ones left."""
        found = self._executions.get(execution_id)
        if found is None:
            return {"requests": 0, "output_tokens": 0}
        flights = list(found.flights.values())
        for flight in flights:
            flight.task.cancel()
        await asyncio.gather(*(flight.task for flight in flights), return_exceptions=True)
        while found.committing:
            await asyncio.gather(*found.committing, return_exceptions=True)
        self._executions.pop(execution_id, None)
        return {"requests": len(found.tree.nodes), "output_tokens": found.output_tokens}

    async def close_all(self) -> None:
        """Cancel every open call and wait for what is being recorded (the process ends)."""
        for execution_id in list(self._executions):
            await self.drop(execution_id)

    @property
    def open_calls(self) -> int:
        return sum(len(execution.flights) for execution in self._executions.values())

    def place(self, call: Call, state: WalkState, execution: Execution) -> Placed:
        """Settle whose call this is. Raises ApiError for a conversation that ends with an assistant message."""
        if isinstance(call.messages[-1], Reply):
            raise ApiError(calls.BAD_REQUEST, "messages: the conversation must end with a user or tool message; prefill is not supported")
        agent_id, parent_agent_id, sub_agent = call.agent_id, call.parent_agent_id, call.sub_agent
        if not agent_id and not call.names_agents:
            agent_id, parent_agent_id = _agent_from_tree(call, state, execution)
            sub_agent = bool(agent_id)
        limits = orjson.dumps([call.max_tokens, call.stop])
        request = history.digest(agent_id.encode(), state.key, limits).hex()
        return Placed(call, state, agent_id, parent_agent_id, sub_agent, request)

    def join(self, placed: Placed, route: ExecutionRoute, execution: Execution) -> Flight:
        """The flight that answers this call: a new one, or the open one of the same call."""
        flight = execution.flights.get(placed.request_digest)
        if flight is not None:
            self._counters.joined += 1
            return flight
        task = asyncio.get_running_loop().create_task(self._answer(placed, route, execution))
        flight = execution.flights[placed.request_digest] = Flight(task)

        task.add_done_callback(lambda _: _forget(flight, placed, execution))
        return flight

    def abandon(self, flight: Flight, placed: Placed, execution: Execution) -> None:
        """Nobody waits for this flight any more: cancel it. The same call, coming again, starts anew."""
        _forget(flight, placed, execution)
        flight.task.cancel()

    async def prompt_ids(self, placed: Placed, execution: Execution) -> list[int]:
        """The ids that this call adds to its parent's path. Raises ApiError."""
        rest = placed.rest
        size = sum(len(part.text) for message in rest if isinstance(message, Supplied) for part in message.parts)
        try:
            if placed.state.node is None or size > LONG_TEXT:
                return await asyncio.get_running_loop().run_in_executor(None, self._render, placed, execution)
            return self._render(placed, execution)
        except RenderingRefused as error:
            raise ApiError(calls.BAD_REQUEST, str(error)) from error
        except RecursionError as error:
            raise ApiError(calls.BAD_REQUEST, "body: nested too deeply") from error

    def _render(self, placed: Placed, execution: Execution) -> list[int]:
        """New ids: supplied messages through the template; turns that stand here as plain history with their sampled ids if we know them."""
        rendering, parent, rest = self._rendering, placed.state.node, placed.rest
        if not rendering.bridges:
            return rendering.full(placed.call.head.system, placed.call.head.tools, placed.call.messages)
        group, position = _leading(rest, 0)
        ids: list[int]
        if parent is None:
            ids = rendering.head(placed.call.head.system, placed.call.head.tools, group)
            open_turn = True
        elif group:
            ids = rendering.follow(parent.tail, list(parent.output_ids), group)
            open_turn = True
        else:
            ids = rendering.closed(parent.tail, list(parent.output_ids))
            open_turn = False
        while position < len(rest):
            message = rest[position]
            assert isinstance(message, Reply)
            group, position = _leading(rest, position + 1)
            issued = execution.tree.issued(message)
            if issued is not None:
                if not open_turn:
                    ids += rendering.generation_prompt
                tail, turn = ids[-TAIL_TOKENS:], list(issued.output_ids)
                ids = ids + turn
            else:
                if open_turn:
                    ids = rendering.without_generation_prompt(ids)
                turn = rendering.quoted(_restored(message, execution))
                tail, turn, ids = (ids + turn[:-1])[-TAIL_TOKENS:], turn[-1:], ids + turn
            if group:
                ids += rendering.follow(tail, turn, group)
                open_turn = True
            else:
                ids += rendering.closed(tail, turn)
                open_turn = False
        return ids

    async def _answer(self, placed: Placed, route: ExecutionRoute, execution: Execution) -> tuple[Answer, Node]:
        replayed = self._undelivered(placed, execution)
        if replayed is not None:
            self._counters.replayed += 1
            return replayed
        call, parent = placed.call, placed.state.node
        new_ids = await self.prompt_ids(placed, execution)
        if not self._rendering.bridges:
            parent, new_ids = _exact_extension(parent, new_ids)
        prompt_tokens = (parent.total_tokens if parent else 0) + len(new_ids)
        room = route.max_context_tokens - prompt_tokens
        if room < 1:
            raise PromptTooLong(prompt_tokens, route.max_context_tokens - 1)
        sampling = Sampling(
            min(call.max_tokens or route.max_output_tokens, route.max_output_tokens, room),
            route.temperature,
            self._rendering.stop_token_ids,
            call.stop,
        )
        path = (parent.token_path() if parent else empty_path()).extended(new_ids)
        sampled = await self._generator.sample(execution.execution_id, path.as_json(), sampling)
        tail = prompt_tail(parent, new_ids)
        request_id = uuid4().hex
        answer, statuses = self._read_turn(placed, tail, sampled.generated, request_id, prompt_tokens)
        node = Node(
            request_id=request_id,
            sequence=-1,
            parent=parent,
            agent_id=placed.agent_id,
            prompt_key=placed.state.key,
            call_ids=frozenset(item.call_id for item in answer.calls),
            text_digest=history.turn_text_digest(answer.text),
            thinking_digest=history.thinking_digest(answer.thinking),
            input_ids=new_ids,
            output_ids=sampled.generated.ids,
            total_tokens=prompt_tokens + len(sampled.generated.ids),
            request_digest=placed.request_digest,
            tail=tail,
            path=path.extended(sampled.generated.ids),
            delivered=False,
        )
        work = asyncio.get_running_loop().create_task(self._commit(placed, route, execution, node, sampled, answer, statuses))
        execution.committing.add(work)
        work.add_done_callback(execution.committing.discard)
        await asyncio.shield(work)
        return answer, node

    def _undelivered(self, placed: Placed, execution: Execution) -> tuple[Answer, Node] | None:
        """A recorded answer to the very same call that the harness never had."""
        for node in reversed(execution.tree.by_request.get(placed.request_digest, ())):
            if node.delivered or node.children:
                continue
            answer = execution.undelivered.get(node.request_id)
            if answer is None:
                finish = execution.restored_finish.get(node.request_id, "stop")
                generated = Generated(list(node.output_ids), [], [], "length" if finish == "length" else "stop")
                answer, _ = self._read_turn(placed, node.tail, generated, node.request_id, node.prompt_tokens)
            return answer, node
        return None

    def _read_turn(
        self, placed: Placed, tail: list[int], generated: Generated, request_id: str, prompt_tokens: int
    ) -> tuple[Answer, tuple[str, ...]]:
        call = placed.call
        turn = self._rendering.parse(tail, generated.ids, call.head.tools)
        text = turn.text
        if generated.matched and generated.matched in text:
            text = text[: text.rindex(generated.matched)]
        found = tuple(
            AnswerCall(calls.call_id(call.api, request_id, index), item.name, item.arguments) for index, item in enumerate(turn.calls)
        )
        finish = "length" if generated.finish == "length" else "tool_calls" if found else "stop"
        answer = Answer(request_id, text, turn.thinking, found, finish, generated.matched, prompt_tokens, len(generated.ids), call.model)
        return answer, turn.statuses

    async def _commit(
        self,
        placed: Placed,
        route: ExecutionRoute,
        execution: Execution,
        node: Node,
        sampled: Sampled,
        answer: Answer,
        statuses: tuple[str, ...],
    ) -> None:
        """Make the record durable, then let later calls find the node."""
        call, generated = placed.call, sampled.generated
        summary = not call.side and classes.is_summary_request(call.messages)
        role = classes.SIDE if call.side else classes.role_class(placed.sub_agent, summary)
        reason = _untrainable(route, role, generated)
        note: dict[str, Any] = {
            **call.metadata,
            "calls": [item.call_id for item in answer.calls],
            "text": node.text_digest.hex(),
            "thinking": node.thinking_digest.hex(),
        }
        if statuses:
            note["statuses"] = statuses
        if placed.state.ambiguous:
            note["ambiguous"] = sorted(set(placed.state.ambiguous))
        if answer.stop_sequence:
            note["stop_sequence"] = answer.stop_sequence
        repeated = bool(execution.tree.by_request.get(placed.request_digest))
        node.sequence, execution.next_sequence = execution.next_sequence, execution.next_sequence + 1
        record = RequestRecord(
            run_id=self._run_id,
            execution_id=execution.execution_id,
            request_id=node.request_id,
            sequence=node.sequence,
            parent_id=node.parent.request_id if node.parent else "",
            agent_id=placed.agent_id,
            parent_agent_id=placed.parent_agent_id,
            role_class=role,
            branch_reason=branch_reason(node.parent, placed.agent_id, summary, repeated),
            input_ids=list(node.input_ids),
            output_ids=generated.ids,
            output_logprobs=generated.logprobs,
            version_spans=generated.spans,
            trainable=not reason,
            untrainable_reason=reason,
            request_digest=placed.request_digest,
            history_key=node.prompt_key.hex(),
            finish_reason=answer.finish,
            temperature=route.temperature,
            engine_ids=sampled.engine_ids,
            attempts=sampled.attempts,
            reroutes=sampled.reroutes,
            cached_tokens=generated.cached_tokens,
            started_s=call.arrived_s,
            ended_s=time.time(),
            api=call.api,
            model_requested=call.model,
            stream=call.stream,
            metadata=orjson.dumps(note).decode(),
        )
        await self._recorder.append(record)
        node.pack()
        execution.tree.add(node)
        execution.undelivered[node.request_id] = answer
        execution.output_tokens += len(generated.ids)
        for item in answer.calls:
            execution.payloads[item.call_id] = (item.name, item.arguments)
            for value in item.arguments.values():
                if isinstance(value, str) and len(value) >= TASK_TEXT:
                    execution.task_texts[history.turn_text_digest(value)] = placed.agent_id


def _forget(flight: Flight, placed: Placed, execution: Execution) -> None:
    if execution.flights.get(placed.request_digest) is flight:
        del execution.flights[placed.request_digest]


def _agent_from_tree(call: Call, state: WalkState, execution: Execution) -> tuple[str, str]:
    """Without a header: the agent of the path, or a sub-agent's first call, known by its task text."""
    if state.node is not None:
        agent_id = state.node.agent_id
        return agent_id, execution.parent_agents.get(agent_id, "")
    known = execution.agents_by_head.get(state.key)
    if known is not None:
        return known
    first = call.messages[0]
    texts = [part.text for part in first.parts if part.role == "user"] if isinstance(first, Supplied) else []
    for text in texts:
        issuer = execution.task_texts.get(history.turn_text_digest(text))
        if issuer is not None:
            agent = (f"unnamed-{state.key.hex()[:16]}", issuer)
            execution.agents_by_head[state.key] = agent
            execution.parent_agents[agent[0]] = issuer
            return agent
    return "", ""


def _leading(messages: list[Message], start: int) -> tuple[list[Supplied], int]:
    """The supplied messages from `start` up to the next reply, and where that is."""
    group: list[Supplied] = []
    position = start
    while position < len(messages):
        message = messages[position]
        if isinstance(message, Reply):
            break
        group.append(message)
        position += 1
    return group, position


def _restored(message: Reply, execution: Execution) -> Reply:
    """The same turn with the original payload under each call id that we issued."""
    if not any(call.call_id in execution.payloads for call in message.calls):
        return message
    original = []
    for call in message.calls:
        name, arguments = execution.payloads.get(call.call_id, (call.name, call.arguments))
        original.append(EchoedCall(call.call_id, name, arguments))
    return Reply(message.text, message.thinking, tuple(original), message.digest)


def _exact_extension(parent: Node | None, ids: list[int]) -> tuple[Node | None, list[int]]:
    """For templates that cannot be bridged: the parent stays one only if the full render begins with its path."""
    if parent is not None and ids[: parent.total_tokens] == parent.token_path().ids() and len(ids) > parent.total_tokens:
        return parent, ids[parent.total_tokens :]
    return None, ids


def _untrainable(route: ExecutionRoute, role: str, generated: Generated) -> str:
    if not route.train:
        return "evaluation"
    if role == classes.SIDE:
        return "side request"
    if not generated.ids:
        return "empty output"
    return ""
