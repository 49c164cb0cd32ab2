"""One SGLang server over HTTP: what it can do, and its answers as checked records."""

from __future__ import annotations

import asyncio
import base64
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
    on). most_kept: tokens of the largest kept set that it returns, 0 where it returns none. experts: numbers that it
    reports of a token's experts (layers x top_k), 0 where it reports none."""

    version: str
    version_spans: bool
    salted_cache: bool
    prefix_cache: bool
    bracketed_updates: bool
    fp32_head: bool
    tensor_parallel: int
    most_kept: int
    experts: int


@dataclass(frozen=True)
class Answer:
    """T tokens that one request sampled. tokens, versions: int32 [T]; logprobs: float32 [T], renormalised over the
    kept sets where these were asked for.

    reason: why it ended; after `abort` the completion isn't finished. cached: prompt tokens whose keys and values the
    server had already. kept: T sets, int32 each. experts: int32 [rows, layers x top_k] of prompt and completion, from
    the position that was asked for to the last token but one."""

    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    reason: str
    cached: int
    kept: tuple[np.ndarray, ...] | None = None
    experts: np.ndarray | None = None


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
            probe = _probe(experts=bool(info.get("enable_return_routed_experts")))
            meta = (await self.post("/generate", probe, limit=limit))["meta_info"]
            return Features(
                version=str(info["version"]),
                version_spans="weight_versions" in meta,
                salted_cache="extra_key" in fields,
                prefix_cache=not info["disable_radix_cache"],
                bracketed_updates="/begin_weight_update" in described["paths"],
                fp32_head=bool(info.get("enable_fp32_lm_head")),
                tensor_parallel=int(info["tp_size"]),
                most_kept=int(info.get("sampling_mask_max_tokens") or 0) if "return_sampling_mask" in fields else 0,
                experts=_flat_experts(meta).size,
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
        return read_answer(answer, f"{self.url}/generate", body)

    async def prefill_logprobs(self, ids: Sequence[int], n: int, salt: str | None) -> list[float]:
        """The log-probabilities of the last n tokens after a prefill of those before each, at temperature 1. salt: as
        of `Flight.body`."""
        body: dict[str, Any] = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": len(ids) - n - 1,  # the first of those asked for has none
        }
        if salt is not None:
            body["extra_key"] = salt
        answer = await self.post("/generate", body)
        try:
            _, *found = answer["meta_info"]["input_token_logprobs"]  # the vocabulary's last id reads 0 there
            if len(found) != n:
                raise ValueError(f"{len(found)} for {n} tokens")
            return [float(logprob) for logprob, *_ in found]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerFault(f"{self.url}/generate answers no log-probability ({error!r})") from None


def _probe(*, experts: bool) -> dict[str, Any]:
    """One token after one: the experts are those of a single position."""
    probe: dict[str, Any] = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1}}
    return probe | {"return_routed_experts": True} if experts else probe


def _json(response: httpx.Response, where: str) -> Any:
    if not response.content or not response.headers.get("content-type", "").startswith("application/json"):
        return response.text
    try:
        return response.json()
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise ServerFault(f"{where} answers something that is no JSON: {response.text[:80]!r}") from None


def read_answer(answer: Any, where: str, asked: Mapping[str, Any]) -> Answer:
    """The answer of /generate to the body `asked` as a record. Raises ServerFault where it is malformed."""
    try:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]["type"]
        tokens = np.asarray(answer["output_ids"], np.int32)
        entries = meta.get("output_token_logprobs") or []
        logprobs = np.array([entry[0] for entry in entries], np.float32)
        if [entry[1] for entry in entries] != tokens.tolist():
            raise ValueError("its tokens and their log-probabilities differ")
        kept = None
        if asked.get("return_sampling_mask"):
            kept, logprobs = _kept_sets(meta, tokens)
        if not np.isfinite(logprobs).all():
            raise ValueError("a log-probability is not finite")
        experts = _experts(meta, asked, len(tokens)) if asked.get("return_routed_experts") else None
        versions = _versions(meta, len(tokens))
        return Answer(tokens, logprobs, versions, reason, int(meta.get("cached_tokens") or 0), kept, experts)
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


def _kept_sets(meta: Mapping[str, Any], tokens: np.ndarray) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The set that each token was drawn from, and its log-probability there, float32 [T]."""
    kept = tuple(np.asarray(ids, np.int32) for ids in meta.get("output_token_sampling_mask") or ())
    logprobs = np.asarray(meta.get("output_token_sampling_logprobs") or (), np.float32)
    if not len(kept) == len(logprobs) == len(tokens):
        raise ValueError(f"{len(kept)} kept sets and {len(logprobs)} log-probabilities for {len(tokens)} tokens")
    if not all(token in ids for token, ids in zip(tokens, kept, strict=True)):
        raise ValueError("a token is not in its kept set")
    return kept, logprobs


def _experts(meta: Mapping[str, Any], asked: Mapping[str, Any], n: int) -> np.ndarray | None:
    """int32 [rows, layers x top_k]; None where nothing was sampled."""
    if not n:
        return None
    flat, rows = _flat_experts(meta), len(asked["input_ids"]) + n - 1 - asked["routed_experts_start_len"]
    if not flat.size or flat.size % rows:
        raise ValueError(f"{flat.size} numbers of experts for {rows} tokens")
    return flat.reshape(rows, -1)


def _flat_experts(meta: Mapping[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), np.int32)
