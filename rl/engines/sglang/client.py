"""One SGLang server over HTTP: what it can do, and its answers as checked records."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

_WORDS = 500  # characters of a server's own words that an error quotes


class ServerFault(Exception):
    """The server can't be reached, broke off, or answered with something that is no answer of SGLang's."""


class ConnectionBroken(ServerFault):
    """The connection ended in the middle."""


class ServerRefusal(Exception):
    """The server understood and said no; the message holds its own words."""


@dataclass(frozen=True)
class Features:
    """What a server's version can do, read from its own description.

    version_spans: it says which weight version sampled which token (from 0.5.19 on). salted_cache: its prefix cache
    can be kept apart by weight version. bracketed_updates: distributed updates are announced and ended (from 0.5.21
    on)."""

    version: str
    version_spans: bool
    salted_cache: bool
    prefix_cache: bool
    bracketed_updates: bool
    fp32_head: bool
    tensor_parallel: int


@dataclass(frozen=True)
class Answer:
    """T tokens that one request sampled. tokens, versions: int32 [T]; logprobs: float32 [T].

    reason: why it ended; after `abort` the completion isn't finished. cached: prompt tokens whose keys and values the
    server had already."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reason: str
    cached: int


class Client:
    """Raises ServerFault where the server is at fault, ServerRefusal where it refuses; never anything of httpx's."""

    def __init__(self, url: str, concurrency: int) -> None:
        self.url = url.rstrip("/")
        # A generation takes as long as it takes; a server that stalls is found by its silence on /health_generate.
        timeout = httpx.Timeout(None, connect=10.0)
        # The server closes a connection that was idle for 5 s, and one that it is just closing must not be used.
        limits = httpx.Limits(
            max_connections=concurrency + 8, max_keepalive_connections=concurrency + 8, keepalive_expiry=2.0
        )
        # A proxy of the environment's has no business between trainer and generator.
        self._http = httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    async def post(self, path: str, body: Mapping[str, Any], *, limit: float | None = None) -> Any:
        """POST of JSON; the answer's JSON. `limit`: seconds after which the server counts as at fault."""
        return await self._request("POST", path, limit, json=dict(body))

    async def get(self, path: str, *, limit: float | None = None) -> Any:
        return await self._request("GET", path, limit)

    async def _request(self, method: str, path: str, limit: float | None, **given: Any) -> Any:
        try:
            async with asyncio.timeout(limit):
                response = await self._http.request(method, path, **given)
        except TimeoutError:
            raise ServerFault(f"{self.url}{path}: no answer within {limit:g} s") from None
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
            raise ConnectionBroken(f"{self.url}{path}: {str(error) or type(error).__name__}") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerFault(f"{self.url}{path}: {str(error) or type(error).__name__}") from None
        if response.is_success:
            return _json(response, self.url + path)
        words = f"{self.url}{path} answers {response.status_code}: {response.text[:_WORDS]}"
        raise ServerRefusal(words) if response.is_client_error else ServerFault(words)

    async def wait_until_ready(self, limit: float, alive: Any = lambda: True) -> None:
        """Returns once the server can generate. Raises ServerFault after `limit` seconds or when not `alive()`."""
        end, said = time.monotonic() + limit, f"{self.url}: no answer"
        while time.monotonic() < end and alive():
            try:
                async with asyncio.timeout(min(20.0, limit)):
                    response = await self._http.get("/health_generate")
                if response.is_success:
                    return
                said = f"{self.url} answers {response.status_code}: {response.text[:_WORDS]}"
            except TimeoutError:
                pass
            except httpx.HTTPError as error:
                said = f"{self.url}: {str(error) or type(error).__name__}"
            await asyncio.sleep(min(0.5, limit / 10))
        raise ServerFault(said)

    async def features(self, limit: float) -> Features:
        """Reads the server's description of itself. Raises ServerFault where it is no SGLang server."""
        described = await self.get("/openapi.json", limit=limit)
        info = await self.get("/server_info", limit=limit)
        try:
            fields = described["components"]["schemas"]["GenerateReqInput"]["properties"]
            probe = await self.post("/generate", _probe(), limit=limit)
            return Features(
                version=str(info["version"]),
                version_spans="weight_versions" in probe["meta_info"],
                salted_cache="extra_key" in fields,
                prefix_cache=not info["disable_radix_cache"],
                bracketed_updates="/begin_weight_update" in described["paths"],
                fp32_head=bool(info.get("enable_fp32_lm_head")),
                tensor_parallel=int(info["tp_size"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(f"{self.url} is no SGLang server that is known here: {error!r} is missing") from None

    async def generate(self, body: Mapping[str, Any]) -> Answer:
        """POST /generate of one prompt's `input_ids` with `return_logprob`. A connection that breaks is tried again:
        only one that can't be had, or breaks twice, says something about the server."""
        try:
            answer = await self.post("/generate", body)
        except ConnectionBroken:
            answer = await self.post("/generate", body)
        return read_answer(answer, f"{self.url}/generate")


def _probe() -> dict[str, Any]:
    return {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}


def _json(response: httpx.Response, where: str) -> Any:
    if not response.content or not response.headers.get("content-type", "").startswith("application/json"):
        return response.text
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ServerFault(f"{where} answers something that is no JSON: {response.text[:80]!r}") from None


def read_answer(answer: Any, where: str) -> Answer:
    """The answer of /generate as a record. Raises ServerFault where it is malformed."""
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        tokens = np.asarray(answer["output_ids"], np.int32)
        entries = meta.get("output_token_logprobs") or []
        logprobs = np.array([entry[0] for entry in entries], np.float32)
        if [entry[1] for entry in entries] != tokens.tolist():
            raise ValueError("its tokens and their log-probabilities differ")
        if not np.isfinite(logprobs).all():
            raise ValueError("a log-probability is not finite")
        versions = _versions(meta, len(tokens))
        return Answer(tokens, logprobs, versions, reason, int(meta.get("cached_tokens") or 0))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ServerFault(f"{where} answers something that is no completion ({error!r}): {str(answer)[:80]}") from None


def _versions(meta: Mapping[str, Any], n: int) -> np.ndarray:
    """int32 [n] from half-open spans over the output, or, of a server without them, from the one version at the end."""
    spans: Sequence[Mapping[str, Any]] = meta.get("weight_versions") or (
        {"version": meta["weight_version"], "start": 0, "end": n},
    )
    versions, end = np.zeros(n, np.int32), 0
    for span in spans:
        if span["start"] != end:
            raise ValueError("its weight versions leave a gap")
        end = span["end"]
        versions[span["start"] : end] = int(span["version"])
    if end != n:
        raise ValueError(f"its weight versions cover {end} of {n} tokens")
    return versions
