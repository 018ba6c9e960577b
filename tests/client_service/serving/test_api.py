"""The client's own API: predictions from the current prompts, refusals, and who may call it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.monitor import Monitor, Status
from promptfed.client_service.serving import image_bodies, prediction, server
from promptfed.client_service.serving.api import create_app
from promptfed.client_service.serving.prediction import Predictor, read_image
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from promptfed.shared.data import Source
from promptfed.shared.service import http_connection
from tests.client_service.conftest import Make
from tests.support.far_device import far_device
from tests.support.own_images import tiff_with_a_fraction_as_an_offset


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def call(worker: Worker, verb: str, path: str, token: str | None = None, base: str = "127.0.0.1", **request: Any):  # type: ignore[no-untyped-def]
    app = create_app(worker.monitor, worker.predictor, token, "127.0.0.1" if token is None else "0.0.0.0")

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{base}") as http:
            typed = {"Content-Type": "application/octet-stream"} if "content" in request else {}
            return await http.request(verb, path, **{**request, "headers": {**typed, **request.get("headers", {})}})

    return asyncio.run(send())


@pytest.fixture
def idle() -> Worker:
    worker = Worker.__new__(Worker)
    worker.monitor = Monitor(Status("a", "trainer", "pets", "http://127.0.0.1:1"))
    worker.predictor = Predictor()
    return worker


@pytest.mark.parametrize("method", ["promptfl", "coop"])
def test_predictions_are_those_of_the_last_prompts_with_the_private_part(
    make: Make, backbone: Backbone, source: Source, method: str
) -> None:
    coordinator = make.coordinator(rounds=2, method={"name": method, "m": 4})
    worker = make.worker(coordinator)
    assert asyncio.run(worker.run()) is Exit.OK
    image = source.test.image(5)

    answer = call(worker, "POST", "/v1/predict", content=png(image))

    assert answer.status_code == 200
    found = answer.json()
    context = coordinator.global_state.get("context")
    if context is None:
        context = torch.empty(4, backbone.d_t)
        private = (worker.settings.state_dir / "committed.safetensors").read_bytes()
        context = torch.frombuffer(bytearray(private[-4 * 4 * backbone.d_t :]), dtype=torch.float32).view(4, -1)
    names = list(source.class_names)
    feature = backbone.encode_images(backbone.preprocess(image).unsqueeze(0))
    text = backbone.encode_prompts(context, backbone.class_prompts(names, 4), path="plain")
    template = backbone.encode_text([f"a photo of a {name}." for name in names])
    for key, against in (("probability", text), ("zero_shot", template)):
        expected = (backbone.logit_scale * feature @ against.T).softmax(-1)[0]
        given = {row["name"]: row[key] for row in found["classes"]}
        assert torch.allclose(torch.tensor([given[name] for name in names]), expected, atol=1e-5)
    probabilities = [row["probability"] for row in found["classes"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1)
    assert found["class_name"] == found["classes"][0]["name"]
    assert (found["method"], found["round"]) == (method, 2)


def test_predictions_survive_a_restart_after_the_end(make: Make, settings: Settings, source: Source) -> None:
    coordinator = make.coordinator(rounds=1)
    first = make.worker(coordinator)
    asyncio.run(first.run())
    body = png(source.test.image(0))
    before = call(first, "POST", "/v1/predict", content=body).json()
    coordinator.state = "finished"
    again = make.worker(coordinator, settings=settings.model_copy(update={"serve": True}))
    assert asyncio.run(again.run()) is Exit.OK
    assert call(again, "POST", "/v1/predict", content=body).json() == before


def test_before_the_first_evaluation_there_is_nothing_to_predict_with(idle: Worker, source: Source) -> None:
    answer = call(idle, "POST", "/v1/predict", content=png(source.test.image(0)))
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["retry-after"] == "5"
    assert answer.json()["type"].endswith("/no-prompts")
    assert "first evaluation" in answer.json()["detail"]


@pytest.fixture
def serving(make: Make) -> Worker:
    worker = make.worker(make.coordinator(rounds=0))
    asyncio.run(worker.run())
    return worker


@pytest.mark.parametrize("body", [b"", b"GIF89a", b"no image", b"\x89PNG\r\n\x1a\n" + b"\0" * 50, b"<svg/>"])
def test_what_is_no_image_is_refused(serving: Worker, body: bytes) -> None:
    answer = call(serving, "POST", "/v1/predict", content=body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["type"].endswith("/bad-image")


def test_a_damaged_tiff_is_refused(serving: Worker) -> None:
    assert call(serving, "POST", "/v1/predict", content=tiff_with_a_fraction_as_an_offset()).status_code == 422


@pytest.mark.parametrize("size", [(1, 1_000_000), (1_000_000, 1), (60_000, 200)])
def test_a_line_of_a_million_pixels_takes_no_more_memory_than_a_picture(serving: Worker, size: tuple[int, int]) -> None:
    """Preprocessing scales the shorter side to that of the tower: the longer one would have tens of millions."""
    resize, most = Image.Image.resize, 100 * 48 * 48

    def watched(image: Image.Image, size: tuple[int, int], *given: Any, **options: Any) -> Image.Image:
        assert size[0] * size[1] <= most
        return resize(image, size, *given, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Image.Image, "resize", watched)
        assert call(serving, "POST", "/v1/predict", content=png(Image.new("RGB", size))).status_code == 200


def test_a_truncated_image_is_refused(serving: Worker) -> None:
    whole = png(Image.effect_noise((64, 64), 50))
    assert call(serving, "POST", "/v1/predict", content=whole[: len(whole) // 2]).status_code == 422
    assert call(serving, "POST", "/v1/predict", content=whole).status_code == 200


def test_a_body_that_is_too_large_is_refused(serving: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_bodies, "MAX_IMAGE_BYTES", 1000)
    answer = call(serving, "POST", "/v1/predict", content=b"x" * 1001)
    assert answer.status_code == 413
    assert answer.json()["type"].endswith("/too-large")


@pytest.mark.parametrize("size", [(5_000, 4_000), (10_000, 7_000), (60_000, 60_000)])
def test_a_small_file_of_too_many_pixels_is_refused(serving: Worker, size: tuple[int, int]) -> None:
    header = png(Image.new("1", (1, 1)))
    body = bytearray(header)
    body[16:24] = size[0].to_bytes(4, "big") + size[1].to_bytes(4, "big")
    import zlib

    body[29:33] = zlib.crc32(bytes(body[12:29])).to_bytes(4, "big")
    answer = call(serving, "POST", "/v1/predict", content=bytes(body))
    assert answer.status_code == 413
    assert "pixels" in answer.json()["detail"]


def test_status_and_metrics_tell_the_course(serving: Worker) -> None:
    status = call(serving, "GET", "/status").json()
    assert (status["stage"], status["evaluated"], status["name"]) == ("ended", 1, "hospital-a")
    assert status["zero_shot"] is not None
    text = call(serving, "GET", "/metrics").text
    assert 'promptfed_client_events_total{event="evaluated"} 1.0' in text
    assert 'promptfed_client_accuracy{prompts="template"}' in text
    assert "hospital-a" not in text


def test_elsewhere_than_on_loopback_a_token_is_needed(idle: Worker) -> None:
    assert call(idle, "GET", "/healthz", token="t").json() == {"status": "ok"}
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Basic t"}, {"Authorization": "Bearer é"}):
        encoded = {key: value.encode() for key, value in headers.items()}
        for verb, path in (("GET", "/status"), ("GET", "/metrics"), ("POST", "/v1/predict")):
            answer = call(idle, verb, path, token="t", headers=encoded)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
    assert call(idle, "GET", "/status", token="t", headers={"Authorization": "Bearer t"}).status_code == 200


def test_a_page_under_another_name_cannot_reach_the_open_api(idle: Worker) -> None:
    assert call(idle, "GET", "/status", base="rebound.example").status_code == 400
    assert call(idle, "GET", "/status", base="localhost:8123").status_code == 200


@pytest.mark.parametrize("listening", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_only_addresses_of_this_machine_name_the_open_api(idle: Worker, listening: str) -> None:
    """A page that rebinds its name to ``::1`` or 127.0.0.2 is as much elsewhere as one that rebinds to 127.0.0.1."""
    app = create_app(idle.monitor, idle.predictor, None, listening)

    async def status(host: str) -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            return (await http.get("/status", headers={"Host": host})).status_code

    for host in ("127.0.0.1", "127.0.0.1:8123", "[::1]:8123", "localhost", "127.9.9.9:1"):
        assert asyncio.run(status(host)) == 200, host
    for host in ("evil.example", "evil.example:8123", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1",
                 "evil@127.0.0.1", "127.0.0.1/evil", "[::1", "", "127.0.0.1:x"):  # fmt: skip
        assert asyncio.run(status(host)) == 400, host


@pytest.mark.parametrize(("headers", "status"), [
    ({"Origin": "http://127.0.0.1:8123"}, 200),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "http://127.0.0.1:9999"}, 403),
    ({"Origin": "null"}, 403),
    ({"Sec-Fetch-Site": "same-origin"}, 200),
    ({"Sec-Fetch-Site": "none"}, 200),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, 403),
])  # fmt: skip
def test_other_pages_cannot_call(idle: Worker, headers: dict[str, str], status: int) -> None:
    assert call(idle, "GET", "/status", base="127.0.0.1:8123", headers=headers).status_code == status
    with_token = {**headers, "Authorization": "Bearer t"}
    assert call(idle, "GET", "/status", token="t", base="127.0.0.1:8123", headers=with_token).status_code == status


def test_a_link_from_elsewhere_opens_the_page(idle: Worker) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert call(idle, "GET", "/", headers=link).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "image/png", "application/x-www-form-urlencoded", ""])
def test_an_image_comes_as_bytes_and_as_nothing_else(serving: Worker, source: Source, kind: str) -> None:
    body = png(source.test.image(0))
    assert call(serving, "POST", "/v1/predict", content=body, headers={"Content-Type": kind}).status_code == 415


@pytest.mark.parametrize("kind", ["PCX", "TGA", "ICO", "PDF", "EPS"])
def test_decoders_that_no_data_source_takes_are_not_run(serving: Worker, kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, kind)
    assert call(serving, "POST", "/v1/predict", content=file.getvalue()).status_code == 422


def test_a_large_photograph_is_decoded_small() -> None:
    file = io.BytesIO()
    Image.new("RGB", (4600, 3400), (200, 30, 30)).save(file, "JPEG")
    assert read_image(file.getvalue()).size == (2300, 1700)
    small = io.BytesIO()
    Image.new("RGB", (640, 480)).save(small, "JPEG")
    assert read_image(small.getvalue()).size == (640, 480)


def test_one_image_at_a_time_is_decoded(serving: Worker, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = most = 0
    lock = threading.Lock()
    real = prediction.read_image

    def counting(content: bytes, grey: str | None = None) -> Image.Image:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        try:
            return real(content, grey)
        finally:
            with lock:
                at_once -= 1

    monkeypatch.setattr(prediction, "read_image", counting)
    body = png(source.test.image(0))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: serving.predictor.predict(body), range(8)))
    assert most == 1


def test_the_api_is_described(idle: Worker) -> None:
    paths = call(idle, "GET", "/openapi.json").json()["paths"]
    assert set(paths) == {"/healthz", "/status", "/metrics", "/v1/predict"}
    assert {"200", "401", "413", "422", "503"} <= set(paths["/v1/predict"]["post"]["responses"])


def test_an_open_address_without_a_token_is_refused(settings: Settings) -> None:
    given = settings.model_dump() | {"api_host": "0.0.0.0"}
    with pytest.raises(ClientError, match="--api-token-file") as refusal:
        make_settings(**given)
    assert refusal.value.exit is Exit.USAGE


def test_what_the_coordinator_s_connections_refuse_this_api_s_refuse_too(
    idle: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_connection, "HEAD_SECONDS", 0.3)
    app = create_app(idle.monitor, idle.predictor, None, "127.0.0.1")

    async def said(port: int, sent: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        try:
            return await asyncio.wait_for(reader.read(), 60)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def main() -> list[bytes]:
        async with server.running_api(app, "127.0.0.1", 0) as address:
            port = int(address.rsplit(":", 1)[1])
            socket.create_connection(("127.0.0.1", port)).close()  # at once: nobody who is told it is refused
            host = f"Host: 127.0.0.1:{port}\r\n".encode()
            begin = b"GET /healthz HTTP/1.1\r\n" + host
            ends = (b"Connection: close\r\n\r\n", host + b"\r\n", b"A: b\r\n")
            return [await said(port, begin + end) for end in ends]

    good, twice, half = asyncio.run(main())
    assert good.startswith(b"HTTP/1.1 200 ")
    assert twice.startswith(b"HTTP/1.1 400 ")
    assert half == b""


class Counted(Predictor):
    """Answers with how many images came before, each after a moment."""

    seen = 0

    def predict(self, content: bytes) -> dict[str, Any]:
        time.sleep(0.01)
        self.seen += 1
        row = {"name": content.decode(), "probability": 1.0}
        return {"method": "m", "round": self.seen, "class_name": content.decode(), "classes": [row]}


@contextlib.asynccontextmanager
async def opened(worker: Worker) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    app = create_app(worker.monitor, worker.predictor, None, "127.0.0.1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        yield http, app


KIND = image_bodies.IMAGE_TYPE
ONE = {"Content-Type": KIND}


async def slowly(parts: int, seconds: float) -> AsyncIterator[bytes]:
    for _ in range(parts):
        yield b"x" * 1000
        await asyncio.sleep(seconds)


def test_bodies_have_a_deadline_and_one_maximum_together(idle: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    idle.predictor = Counted()
    monkeypatch.setattr(image_bodies, "BODY_SECONDS", 0.4)
    monkeypatch.setattr(image_bodies, "HELD_BYTES", 5000)

    async def play() -> None:
        async with opened(idle) as (http, app):
            held = app.state.held
            posts = (http.post("/v1/predict", content=slowly(50, 0.09), headers=ONE) for _ in range(4))
            answers = await asyncio.gather(*posts)
            assert {answer.status_code for answer in answers} == {408, 503}
            assert {answer.json()["type"].rsplit("/", 1)[-1] for answer in answers} == {"too-slow", "busy"}
            assert held.bytes == 0

    asyncio.run(play())


def test_who_hangs_up_is_one_line_and_keeps_the_model_no_longer(idle: Worker, caplog: pytest.LogCaptureFixture) -> None:
    idle.predictor = Counted()

    async def play() -> None:
        app = create_app(idle.monitor, idle.predictor, None, "127.0.0.1")
        async with server.running_api(app, "127.0.0.1", 0) as url:
            host, port = url.removeprefix("http://").split(":")
            async with app.state.turn:  # which another image has
                for body in (b"x" * 40, b"x" * 10):
                    head = f"POST /v1/predict HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: {KIND}\r\n"
                    _, writer = await asyncio.open_connection(host, int(port))
                    writer.write(f"{head}Content-Length: 40\r\n\r\n".encode() + body)
                    await writer.drain()
                    await asyncio.sleep(0.1)
                    writer.close()
            await asyncio.sleep(0.2)

    with caplog.at_level("WARNING"):
        asyncio.run(play())
    assert idle.predictor.seen == 0
    assert [record.getMessage() for record in caplog.records] == [
        "/v1/predict: the caller hung up before it was answered"
    ] * 2


@pytest.mark.extended
def test_a_client_on_a_gpu_answers_what_it_answers_on_the_cpu(
    make: Make, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--device cuda`` on the tests' stand-in for a GPU: joined, trained, evaluated and asked for a picture."""
    inexact: list[bool] = []
    encode = FeatureCache.encode

    def noted(self: FeatureCache, backbone: Backbone, images: torch.Tensor) -> torch.Tensor:
        inexact.append(torch.backends.cudnn.allow_tf32)
        return encode(self, backbone, images)

    monkeypatch.setattr(FeatureCache, "encode", noted)
    answers = []
    for device in ("cpu", "cuda"):
        with far_device():
            there = load_backbone("promptfed-tiny", None, device=device)
            assert there.device.type == device
            coordinator = make.coordinator(rounds=2, method={"name": "fedpgp", "m": 4})
            own = make.settings.model_copy(update={"state_dir": tmp_path / device, "device": device})
            cache = FeatureCache(tmp_path / f"features-{device}")
            monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)  # as torch begins
            inexact.clear()
            worker = make.worker(coordinator, settings=own, backbone=there, features=cache)
            assert asyncio.run(worker.run()) is Exit.OK
            answers.append(call(worker, "POST", "/v1/predict", content=png(source.test.image(5))).json())
    assert inexact, "features are computed on the device"
    assert not any(inexact), "features as the spec asks for, not as torch begins"
    cpu, gpu = ({one["name"]: one["probability"] for one in answer["classes"]} for answer in answers)
    assert gpu == pytest.approx(cpu, abs=1e-5)
