"""A server that decodes nothing: answers, rounds, times and faults as a test orders them, in the shapes that vLLM,
SGLang, llama.cpp and plain OpenAI-compatible servers use. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import accumulate
from typing import Any

from helpers.servers import tensorrt_llm_fields
from helpers.servers.fake_words import END, FAULTS, MODEL, Behaviour, Count, Said, text_of, tokens_of

__all__ = ["END", "FAULTS", "MODEL", "Behaviour", "Count", "FakeServer", "text_of", "tokens_of"]


class FakeServer(AbstractContextManager["FakeServer"]):
    """On a port of its own, in a thread of its own. `asked` are the paths, bodies and headers of all requests."""

    def __init__(self, behaviour: Behaviour | None = None, **changes: Any) -> None:
        self.does = behaviour or Behaviour(**changes)
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.num_answers, self.num_at_once, self.most_at_once, self.num_flushes = 0, 0, 0, 0
        self.askers: set[str] = set()
        """The addresses of all clients."""
        self.count = Count()
        self.cached: set[str] = set()

    def __enter__(self) -> FakeServer:
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.stopping.set)
        self.thread.join(10)

    def _run(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve(ready))

    async def _serve(self, ready: threading.Event) -> None:
        self.stopping = asyncio.Event()
        server = await asyncio.start_server(self._connected, self.does.host, self.does.port, backlog=2048)
        self.url = f"http://{self.does.host}:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self.stopping.wait()
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.askers.add(writer.get_extra_info("peername")[0])
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._answer_one(reader, writer):
                pass
        writer.close()

    async def _answer_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        line = (await reader.readline()).decode()
        if not line:
            return False
        method, path, _ = line.split()
        headers = {}
        while (line := (await reader.readline()).decode().strip()) != "":
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        self.asked.append((path, body, headers))
        if (raw := self.does.raw(path)) is not None:
            for piece in raw:
                writer.write(piece)
                await writer.drain()
                if not piece:
                    await asyncio.sleep(0.05)
            return False
        if path in ("/v1/completions", "/v1/chat/completions", "/generate", "/completion"):
            return await self._generate(path, body, writer)
        status, page = self._page(method, path, headers)
        await _respond(writer, status, page)
        return True

    def _page(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, Any]:
        does = self.does
        if does.is_loading:
            return 503, {"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}
        if does.key is not None and headers.get("authorization") != f"Bearer {does.key}":
            return 401, {"error": f"no such key: {headers.get('authorization')}"}
        owner = "me" if does.dialect in ("openai", "mlx") else does.dialect
        pages: dict[tuple[str, str], Any] = {
            ("GET", "/v1/models"): {"object": "list", "data": [{"id": name, "owned_by": owner} for name in does.models]}
        }
        if does.dialect in ("vllm", "sglang", "llamacpp", "lmdeploy"):
            pages["GET", "/health"] = {"status": "ok"}
        if does.has_metrics and does.dialect in ("vllm", "llamacpp", "lmdeploy"):
            pages["GET", "/metrics"] = self._metrics()
        if does.dialect in ("vllm", "tensorrt_llm"):
            pages["GET", "/version"] = {"version": "0.32.0"}
        if does.dialect == "vllm":
            if does.resets_cache:
                pages["POST", "/reset_prefix_cache"] = ""
        elif does.dialect == "sglang":
            pages["GET", "/server_info"] = {
                "model_path": "org/fake",
                "dtype": "float32",
                "version": "0.5.9",
                "internal_states": [{}],
                "speculative_num_draft_tokens": does.block + 1 if does.block else None,
            }
            pages["POST", "/flush_cache"] = "Cache flushed.\n"
        elif does.dialect == "llamacpp":
            pages["GET", "/props"] = {"default_generation_settings": {}, "build_info": "b9-abc", "total_slots": 1}
        if (method, path) not in pages:
            return 404, {"detail": "Not Found"}
        if method == "POST":
            self.num_flushes += 1
            self.cached.clear()
        return 200, pages[method, path]

    def _metrics(self) -> str:
        prefix = self.does.dialect
        count = self.count
        of = {
            "spec_decode_num_drafts": count.drafts,
            "spec_decode_num_draft_tokens": count.drafted,
            "spec_decode_num_accepted_tokens": count.accepted,
            "tokens_predicted" if prefix == "llamacpp" else "generation_tokens": count.tokens,
        }
        lines = ["# HELP process_start_time_seconds Start time", "process_start_time_seconds 1.7e+09"]
        for name, value in of.items():
            # vLLM with several engines: a line for each, and the time at which each was created.
            lines += [f"# TYPE {prefix}:{name}_total counter"]
            lines += [f'{prefix}:{name}_total{{engine="0",model_name="m"}} {float(value)}']
            lines += [f'{prefix}:{name}_total{{engine="1",model_name="m"}} 0.0']
            lines += [f'{prefix}:{name}_created{{engine="0",model_name="m"}} 1.7e+09']
        if self.does.counts_positions:
            name = f"{prefix}:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{name}{{engine="0",position="{place}"}} {float(num)}' for place, num in enumerate(count.at)]
        return "\n".join(lines) + "\n"

    async def _generate(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        options = body.get("stream_options", {})
        # The empty name is the option that is not in the specification, refused without a name.
        given = {*body, *options} | ({""} if "continuous_usage_stats" in options else set())
        if refused := given.intersection(self.does.refuses):
            hint = "; use max_completion_tokens" if "max_tokens" in refused else ""
            await _respond(writer, 422, {"detail": f"Unsupported fields in the request: {refused}{hint}"})
            return True
        if self.does.dialect == "tensorrt_llm" and (refused := tensorrt_llm_fields.forbidden(path, body)):
            await _respond(writer, 400, {"error": f"Extra inputs are not permitted: {refused}"})
            return True
        if self.does.key is not None and self.asked[-1][2].get("authorization") != f"Bearer {self.does.key}":
            await _respond(writer, 401, {"error": "no such key"})
            return True
        fault = self.does.faults.get(self.num_answers, "")
        self.num_answers += 1
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            return await self._with_fault(fault, path, body, writer)
        finally:
            self.num_at_once -= 1

    async def _with_fault(self, fault: str, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if fault == "hangup":
            return False
        if fault in ("429", "500", "503"):
            await _respond(writer, int(fault), {"error": {"message": f"fault {fault}"}})
            return True
        if fault == "redirect":
            writer.write(b"HTTP/1.1 307 Elsewhere\r\nLocation: http://127.0.0.1:9/secret\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return True
        if fault == "one_piece":
            await _respond(writer, 200, {"choices": [{"text": "all of it", "finish_reason": "stop"}]})
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        number = 0
        async for event in self._events(fault, path, body):
            said = event if isinstance(event, bytes) else self.does.bent(event)
            data = said if isinstance(said, bytes) else b"data: " + json.dumps(said).encode() + b"\n\n"
            if number == 2 and self.does.between:
                await _chunk(writer, self.does.between)
            if fault == "slow":
                while not self.stopping.is_set():
                    await _chunk(writer, b":")
                    await asyncio.sleep(0.05)
            if number == 2 and fault in ("reset", "cut", "bad_json", "bad_utf8", "no_object", "error_event", "bad_ids"):
                return await self._broken(fault, writer)
            await _chunk(writer, data)
            if number == 1 and fault == "duplicate":
                await _chunk(writer, data)
            number += 1
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _broken(self, fault: str, writer: asyncio.StreamWriter) -> bool:
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
            return False
        if fault != "cut":
            ids: dict[str, Any] = {"choices": [{"text": "x", "token_ids": ["1"]}], "output_ids": ["1"], "tokens": ["1"]}
            broken = {
                "bad_json": b'data: {"choices": [\n\n',
                "bad_utf8": b'data: {"text": "\xff\xfe"}\n\n',
                "no_object": b"data: [1, 2]\n\n",
                "error_event": b'data: {"error": {"message": "out of blocks"}}\n\n',
                "bad_ids": b"data: " + json.dumps(ids).encode() + b"\n\n",
            }
            await _chunk(writer, broken[fault])
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _events(self, fault: str, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        does = self.does
        prompt = json.dumps(body.get("prompt") or body.get("input_ids") or body.get("messages"))
        limits = ("max_tokens", "max_completion_tokens", "n_predict")
        named = next((body[name] for name in limits if name in body), None)
        most = named or body["sampling_params"]["max_new_tokens"]
        tokens = list(does.answer(prompt, most))
        hits = len(prompt) if does.keeps_prompts and prompt in self.cached and "cache_salt" not in body else 0
        self.cached.add(prompt)
        rounds = self._rounds(len(tokens)) if does.rounds is None else list(does.rounds(prompt))
        ends = list(accumulate((kept + 1 for kept in rounds), initial=1))
        pieces = [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        finish = "stop" if tokens[-1:] and tokens[-1] in does.ends else "length"
        count = self._count(prompt, rounds, len(tokens), most)
        finish = finish if fault != "odd_finish" else "abort"
        said = Said(
            does,
            path,
            tokens,
            count,
            hits,
            len(prompt),
            finish,
            body.get("detokenize") is False,
            "continuous_usage_stats" in body.get("stream_options", ()) or body.get("timings_per_token", False),
        )
        while self.most_at_once < does.waits_for:
            await asyncio.sleep(0.01)
        await asyncio.sleep(does.ttft_s)
        if fault == "endless":
            while True:
                yield said.piece([7], 1)
                await asyncio.sleep(0)
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(does.round_s)
            if number == len(pieces) - 1:
                self._counted(fault, len(tokens), count)
            yield said.piece(piece, min(ends[number], len(tokens)), is_last=number == len(pieces) - 1)
        for event in said.end(fault):
            yield event

    def _rounds(self, num_tokens: int) -> list[int]:
        """Tokens accepted per round until the answer is full; the last round may accept more than fit."""
        rounds: list[int] = []
        accepts = self.does.accepts
        while 1 + sum(kept + 1 for kept in rounds) < num_tokens:
            rounds.append(accepts[len(rounds) % len(accepts)])
        return rounds

    def _count(self, prompt: str, rounds: Sequence[int], num_tokens: int, most: int) -> Count:
        if self.does.counts is not None:
            return self.does.counts(prompt)
        block = self.does.block
        if not block:
            return Count()
        drafted, kept = len(rounds) * block, list(rounds)
        if self.does.dialect == "llamacpp":
            drafted, kept = _as_llamacpp(rounds, block, num_tokens, most)
        at = [sum(number > place for number in kept) for place in range(block)]
        return Count(len(kept), drafted, sum(kept), at, in_order=list(kept))

    def _counted(self, fault: str, num_tokens: int, answer: Count) -> None:
        count = self.count
        count.add(answer)
        count.tokens += num_tokens
        if fault == "counters_back":
            self.count = Count()
        if fault == "others":
            count.tokens += 100


def _as_llamacpp(rounds: Sequence[int], block: int, num_tokens: int, most: int) -> tuple[int, list[int]]:
    """It drafts what there is room for besides a bonus token, and the end of the answer is such a token, unless the
    draft ends there."""
    done, drafted, kept = 1, 0, []
    for number in rounds:
        room, emitted = min(block, most - done - 1), min(number + 1, num_tokens - done)
        if room > 0:
            drafted += room
            kept.append(emitted if number >= emitted == room else emitted - 1)
        done += emitted
    return drafted, kept


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def _respond(writer: asyncio.StreamWriter, status: int, page: Any) -> None:
    body = page.encode() if isinstance(page, str) else json.dumps(page).encode()
    kind = "text/plain" if isinstance(page, str) else "application/json"
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
