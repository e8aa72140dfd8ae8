"""The classifier behind HTTP: /predict as text-embeddings-inference has it, /classify as vLLM has.

    POST /predict   {"inputs": "text" | ["a", "b"] | [["a", "its pair"], ...]}
    POST /classify  {"input": "text" | ["a", "b"]}
    GET  /health  /info  /metrics  /docs

A client written for text-embeddings-inference works unchanged. POST / answers Hugging Face's
own clients, which read a list of lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field

from memfit._version import __version__
from memfit.errors import MemfitError
from memfit.records.evaluation import probabilities
from memfit.records.scoring import Array, Scoring, answers
from memfit.run.inference import Classifier, Text
from memfit.serve.batching import Answer, Batcher, QueueFullError, TooLongError
from memfit.serve.protection import BodyTooLargeError

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Seconds: the upper ends of the histogram of /metrics."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one server takes at most."""

    batch_tokens: int
    texts: int = 256
    """Texts of one request."""
    waiting_texts: int = 2048
    """Texts that wait; one more is answered with 429."""
    seconds: float = 60.0
    """After this long a request is answered with 504."""


class Predict(BaseModel):
    """The body of POST /predict."""

    inputs: str | list[str] | list[list[str]]
    truncate: bool = True
    raw_scores: bool = False
    top_k: int | None = Field(default=None, ge=1)
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Where Hugging Face's clients put `top_k`."""


class Classify(BaseModel):
    """The body of POST /classify."""

    input: str | list[str]
    model: str = ""


@dataclass
class Figures:
    """What /metrics shows of requests; the batcher counts texts."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: Counter[float] = field(default_factory=Counter)
    total_seconds: float = 0.0

    def add(self, path: str, status: int, seconds: float) -> None:
        """Counts one request."""
        self.requests[path, status] += 1
        self.total_seconds += seconds
        for bucket in BUCKETS:
            if seconds <= bucket:
                self.seconds[bucket] += 1

    def lines(self, batcher: Batcher) -> list[str]:
        """Returns the lines of Prometheus' text format."""
        count = sum(self.requests.values())
        found = ["# TYPE memfit_requests_total counter"]
        for (path, status), times in sorted(self.requests.items()):
            found.append(f'memfit_requests_total{{path="{path}",status="{status}"}} {times}')
        found.append("# TYPE memfit_request_seconds histogram")
        for bucket in BUCKETS:
            found.append(f'memfit_request_seconds_bucket{{le="{bucket}"}} {self.seconds[bucket]}')
        found += [
            f'memfit_request_seconds_bucket{{le="+Inf"}} {count}',
            f"memfit_request_seconds_sum {self.total_seconds:.6f}",
            f"memfit_request_seconds_count {count}",
        ]
        done = batcher.counts
        for name, kind, value in (
            ("texts_total", "counter", done.texts),
            ("tokens_total", "counter", done.tokens),
            ("batches_total", "counter", done.batches),
            ("waiting_texts", "gauge", done.waiting_texts),
        ):
            found += [f"# TYPE memfit_{name} {kind}", f"memfit_{name} {value}"]
        return found


def make_app(classifier: Classifier, name: str, backend: str, limits: Limits) -> FastAPI:
    """Returns the application; its batcher lives as long as it is served."""
    batcher = Batcher(
        classifier, batch_tokens=limits.batch_tokens, most_waiting=limits.waiting_texts
    )
    figures = Figures()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await asyncio.to_thread(batcher.close)

    app = FastAPI(title="memfit", version=__version__, lifespan=lifespan)

    @app.middleware("http")
    async def counted(request: Request, call: Any) -> Any:
        began = time.perf_counter()
        try:
            answer = await call(request)
        except BodyTooLargeError:
            answer = _error(413, "the body is too large", "validation")
        known = request.scope.get("route")
        path = getattr(known, "path", "other")
        figures.add(path, answer.status_code, time.perf_counter() - began)
        return answer

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, str(error.detail), "refused")

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Without `input`: a text of the user's is not sent back or logged.
        fields = [{"loc": one["loc"], "msg": one["msg"]} for one in error.errors()]
        return JSONResponse({"error": "the body is not valid", "error_type": "validation",
                             "detail": fields}, status_code=422)  # fmt: skip

    async def answered(texts: Sequence[Text], *, cut: bool = True) -> Answer:
        if not texts:
            raise HTTPException(422, "inputs is empty")
        if len(texts) > limits.texts:
            raise HTTPException(413, f"{len(texts):,} texts; at most {limits.texts:,} a request")
        try:
            future = batcher.submit(texts, cut=cut)
        except QueueFullError:
            raise HTTPException(429, "too many texts wait; try again later") from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limits.seconds)
        except TimeoutError:
            raise HTTPException(504, f"no answer within {limits.seconds:g} s") from None
        except TooLongError:
            most = classifier.max_length
            raise HTTPException(413, f"a text has more than {most:,} tokens") from None
        except MemfitError as error:
            raise HTTPException(422, str(error)) from None

    @app.post("/", include_in_schema=False)
    async def predict_for_clients(body: Predict) -> Any:
        # Hugging Face's clients read a list of lists, also for a single text.
        rows, _ = await ranked(body)
        return rows

    @app.post("/predict")
    async def predict(body: Predict) -> Any:
        rows, single = await ranked(body)
        return rows[0] if single else rows

    async def ranked(body: Predict) -> tuple[list[list[dict[str, Any]]], bool]:
        texts, single = _texts(body.inputs, classifier.pairs)
        found = await answered(texts, cut=body.truncate)
        top_k = body.top_k or body.parameters.get("top_k")
        scores = found.logits if body.raw_scores else probabilities(
            found.logits, classifier.labels.task)  # fmt: skip
        return [_ranked(row, classifier.labels.names, top_k) for row in scores], single

    @app.post("/classify")
    async def classify(body: Classify) -> Any:
        texts, _ = _texts(body.input, pairs=None)
        found = await answered(texts)
        scores = probabilities(found.logits, classifier.labels.task)
        usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens,
                 "completion_tokens": 0}  # fmt: skip
        return {
            "id": f"classify-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": _classified(scores, classifier),
            "usage": usage,
        }

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/info")
    async def info() -> dict[str, Any]:
        names = classifier.labels.names
        return {
            "model_id": name,
            "model_type": {"classifier": {
                "id2label": dict(enumerate(names)),
                "label2id": {label: index for index, label in enumerate(names)},
            }},
            "task": classifier.labels.task,
            "backend": backend,
            "pairs": classifier.pairs,
            "max_input_length": classifier.max_length,
            "max_batch_tokens": batcher.batch_tokens,
            "max_client_batch_size": limits.texts,
            "max_waiting_texts": limits.waiting_texts,
            "version": __version__,
        }  # fmt: skip

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse("\n".join(figures.lines(batcher)) + "\n")

    return app


def _texts(
    inputs: str | list[str] | list[list[str]], pairs: bool | None
) -> tuple[list[Text], bool]:
    """Returns the texts, and whether a single one was asked for.

    Two strings are two texts; for a model of pairs they are one pair, as TEI takes them.
    """
    if isinstance(inputs, str):
        return [inputs], True
    flat = [one for one in inputs if isinstance(one, str)]
    if flat and pairs and len(flat) == 2:
        return [(flat[0], flat[1])], True
    if flat:
        return list(flat), False
    texts: list[Text] = []
    for index, parts in enumerate(inputs):
        if len(parts) not in (1, 2):
            raise HTTPException(422, f"inputs.{index} has {len(parts)} texts; give one or two")
        texts.append(parts[0] if len(parts) == 1 else (parts[0], parts[1]))
    return texts, False


def _ranked(row: Array, names: Sequence[str], top_k: int | None) -> list[dict[str, Any]]:
    """Returns labels and scores, the highest first."""
    order = np.argsort(-row, kind="stable")[:top_k]
    return [{"label": names[index], "score": float(row[index])} for index in order]


def _classified(scores: Array, classifier: Classifier) -> list[dict[str, Any]]:
    space = classifier.labels
    if space.task == "single_label":
        said = [space.names[index]
                for index in answers(scores, space, classifier.scoring or Scoring())]  # fmt: skip
    else:
        said = [space.names[index] for index in scores.argmax(axis=1)]
    return [
        {"index": index, "label": label, "probs": row.tolist(), "num_classes": len(row)}
        for index, (label, row) in enumerate(zip(said, scores, strict=True))
    ]


def _error(status: int, reason: str, kind: str) -> JSONResponse:
    return JSONResponse({"error": reason, "error_type": kind}, status_code=status)
