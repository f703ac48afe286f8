"""Whatever arrives on the socket costs its sender an error and the server nothing."""

from __future__ import annotations

import os
import socket
import time

import pytest
import zmq
from support.hostile_frames import HostileFrames, foreign_process
from support.server_nursery import Nursery
from support.server_pools import TestPool, first, prompt
from support.server_thread import free_port, register, running_server

from hma_triton import messages as m
from hma_triton.client import HmaClient
from hma_triton.errors import ServerUnavailableError
from hma_triton.process_identity import this_process
from hma_triton.server.socket_guard import SocketGuard
from hma_triton.tensor_ipc import share_storage

_BATCH = 2000


class RawPeer:
    """A DEALER that sends bytes and reads whatever comes back."""

    def __init__(self, context: zmq.Context, url: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(url)
        self.replies = 0
        self.decoder = m.ReplyDecoder()

    def send(self, *frames: bytes) -> None:
        while True:
            try:
                self.socket.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                self.drain(1)

    def drain(self, patience_ms: int) -> None:
        """Read what is there; every reply must be one of the protocol's."""
        while self.socket.poll(patience_ms):
            self.decoder.decode(self.socket.recv_multipart()[-1])
            self.replies += 1
            patience_ms = 0

    def ask(self, request: m.Request, timeout_ms: int = 20_000) -> m.Reply:
        self.send(m.encode(request))
        while True:
            assert self.socket.poll(timeout_ms), f"no answer to {request}"
            reply = self.decoder.decode(self.socket.recv_multipart()[-1])
            if reply.seq == request.seq:
                return reply

    def greet(self) -> None:
        hello = m.Hello(seq=2**62, version=m.PROTOCOL_VERSION, process=this_process())
        assert isinstance(self.ask(hello), m.HelloReply)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(200_000, id="200k"),
        pytest.param(5_000_000, id="5M", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_fuzzed_frames_cost_the_server_nothing(processes: Nursery, url: str, count: int) -> None:
    server = processes.start("server", url=url, host_bytes=2 << 20, max_registrations=4)
    server.call("ready")
    stranger_frames = HostileFrames(1, TestPool(), "stranger")
    known_frames = HostileFrames(2, TestPool(), "known")
    with zmq.Context() as context:
        stranger, known = RawPeer(context, url), RawPeer(context, url)
        known.greet()
        settled = None
        for batch in range(count // (2 * _BATCH)):
            for _ in range(_BATCH):
                stranger.send(stranger_frames.frame())
                known.send(known_frames.frame())
            stranger.drain(0)
            known.drain(0)
            if batch == count // (8 * _BATCH):
                settled = server.call("facts", timeout_s=120)
        after = server.call("facts", timeout_s=120)
        assert known.ask(m.Ping(seq=2**61)).seq == 2**61
        assert settled is not None
        growth = after["resident_bytes"] - settled["resident_bytes"]
        assert growth < 24 << 20, f"{growth} bytes more"
        assert after["descriptors"] - settled["descriptors"] <= 16, "pools of one registration"
        assert stranger.replies > count // 8 and known.replies > count // 8
        for peer in (stranger, known):
            # both may have registered pools by chance, under four names at most
            peer.greet()
            assert isinstance(peer.ask(m.Goodbye(seq=2**60)), m.Done)
            peer.socket.close()
    with HmaClient(url) as client:
        client.connect(20)
        pool = TestPool()
        register(client, pool, "honest", namespace="honest")
        digests, ids = prompt(5, 3), pool.all_ids(3)
        pool.write(digests, ids)
        assert client.store("honest", 0, 0, digests, b"", ids).stored == 9
        assert client.lookup("honest", "r", digests, 96).tokens == 96
        target = pool.load_ids(96, first=3)
        assert client.retrieve("honest", 0, "r", digests, 0, target).ok
        assert pool.wrong(digests, target) == []


def test_every_kind_of_bad_frame_gets_its_error() -> None:
    with running_server() as server, zmq.Context() as context:
        peer = RawPeer(context, server.url)
        try:
            ping = m.encode(m.Ping(seq=5))
            for frames, code in (
                ((b"",), "malformed"),
                ((b"\xc1",), "malformed"),
                ((ping[:-1],), "malformed"),
                ((ping, ping), "malformed"),
                ((b"", ping), "malformed"),
                ((b"\x82\xa2op\xa8dethrone\xa3seq\x07",), "unknown_message"),
                ((b"\x82\xa2op\xa5store\xa9block_ids\xdd\xff\xff\xff\xff",), "malformed"),
                ((m.encode(m.Status(seq=9)),), "not_greeted"),
            ):
                peer.send(*frames)
                assert peer.socket.poll(5000)
                reply = peer.decoder.decode(peer.socket.recv_multipart()[-1])
                assert isinstance(reply, m.ErrorReply) and reply.code == code, (frames, reply)
        finally:
            peer.socket.close()


def test_unknown_fields_are_ignored() -> None:
    with running_server() as server, zmq.Context() as context:
        peer = RawPeer(context, server.url)
        try:
            peer.send(b"\x83\xa2op\xa4ping\xa3seq\x07\xa6future\x93\x01\x02\xa1x")
            assert peer.socket.poll(5000)
            reply = peer.decoder.decode(peer.socket.recv_multipart()[-1])
            assert isinstance(reply, m.Pong) and reply.seq == 7
        finally:
            peer.socket.close()


def test_an_oversized_frame_ends_the_connection_before_memory_is_taken(
    processes: Nursery, url: str
) -> None:
    server = processes.start("server", url=url, host_bytes=2 << 20)
    server.call("ready")
    with zmq.Context() as context, HmaClient(url) as honest:
        honest.connect()
        before = server.call("facts")["resident_bytes"]
        for _ in range(10):
            peer = RawPeer(context, url)
            peer.send(bytes(m.MAX_FRAME_BYTES + 1))
            peer.socket.poll(50)
            peer.socket.close()
        assert honest.ping() < 5
        assert server.call("facts")["resident_bytes"] - before < m.MAX_FRAME_BYTES


def speak_zmtp(raw: socket.socket) -> None:
    """Greet as a DEALER without security would (RFC 23, ZMTP 3.0)."""
    raw.sendall(b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY" + b"\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
    raw.sendall(b"\x04" + bytes([len(ready)]) + ready)


def comes_back(client: HmaClient) -> None:
    """What was on its way when the connections were dropped is lost; what is sent anew is not."""
    deadline = time.monotonic() + 30
    while True:
        try:
            client.ping(1)
            return
        except ServerUnavailableError:
            assert time.monotonic() < deadline, "the client did not come back"


def test_a_message_that_never_ends_costs_its_sender_the_connection(
    processes: Nursery, url: str
) -> None:
    """Small parts without a last one: no limit of the socket's own holds for them together.

    Sent by hand, because ZeroMQ's own sockets keep a message back until it is whole.
    """
    server = processes.start(
        "server", url=url, host_bytes=4 << 20, socket_limit_bytes=64 << 20, lease_s=300.0
    )
    server.call("ready")
    pool = TestPool()
    part = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
    with HmaClient(url, timeout_s=30) as client:
        client.connect()
        register(client, pool)
        before = server.call("facts")["resident_bytes"]
        for round_ in range(3):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.settimeout(30)
                raw.connect(url.removeprefix("ipc://"))
                speak_zmtp(raw)
                with pytest.raises(OSError, match=r"Broken pipe|reset"):
                    for _ in range(8192):
                        raw.sendall(part)
            comes_back(client)
            digests, ids = prompt(round_, 2), pool.all_ids(2)
            pool.write(digests, ids)
            assert client.store("i", 0, 0, digests, b"", ids).stored == 6
            assert client.lookup("i", f"r{round_}", digests, 64).tokens == 64
        assert server.call("facts")["resident_bytes"] - before < 4 << 30
        assert client.status()["registrations"], "nobody else has lost anything"


def test_floods_that_were_let_go_leave_no_room_for_larger_ones(monkeypatch) -> None:
    held = 100 << 20
    monkeypatch.setattr("hma_triton.server.socket_guard.private_bytes", lambda: held)
    guard, now = SocketGuard(64 << 20), 0
    for _ in range(4):
        held, now = 165 << 20, now + 1_000_000_000
        assert guard.exceeded(now, 0)
        for _ in range(3):
            held, now = 100 << 20, now + 1_000_000_000
            assert not guard.exceeded(now, 0)


def test_memory_that_stays_raises_one_alarm_only(monkeypatch) -> None:
    held = 100 << 20
    monkeypatch.setattr("hma_triton.server.socket_guard.private_bytes", lambda: held)
    guard = SocketGuard(64 << 20)
    held = 180 << 20
    assert [guard.exceeded(second * 1_000_000_000, 0) for second in range(1, 30)].count(True) == 1


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_dropped_connections_come_back_on_every_transport(transport: str) -> None:
    """The socket's address is free again only when its threads have let go of it."""
    url = {} if transport == "ipc" else {"url": f"tcp://127.0.0.1:{free_port()}"}
    with running_server(**url) as server, server.client(timeout_s=30) as client:
        others = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(16)]
        for other in others:
            other.setsockopt(zmq.LINGER, 0)
            other.connect(server.url)
            other.send(b"x" * 65536)
        try:
            for _ in range(12):
                server.server.call_later(server.server._renew_socket)
            comes_back(client)
            assert client.ping(10) < 10
            assert server.thread.is_alive(), "the server ended with its socket"
        finally:
            for other in others:
                other.close()


def test_a_pool_that_its_owner_has_shrunk_is_not_touched() -> None:
    """Touching what is behind the end of a segment is a SIGBUS, the end of the server."""
    with running_server() as server, server.client() as client:
        pool = TestPool()
        register(client, pool)
        digests, ids = prompt(1, 2), pool.all_ids(2)
        pool.write(digests, ids)
        assert client.store(
            "i", 0, 0, first(digests, 1), b"", [i[: len(i) // 2] for i in ids]
        ).stored
        handle = share_storage(next(iter(pool.kv.values())).untyped_storage())
        os.ftruncate(handle.fd, 4096)
        try:
            reply = client.store("i", 0, 0, digests, b"", ids)
            assert (reply.code, reply.stored) == ("transfer", 0)
            assert "storage 0: its segment has shrunk to 4096 bytes" in reply.message
            assert client.lookup("i", "r", digests, 64).tokens == 32
            loaded = client.retrieve("i", 0, "r", first(digests, 1), 0, pool.load_ids(32))
            assert (loaded.ok, loaded.code) == (False, "transfer")
        finally:
            os.ftruncate(handle.fd, handle.nbytes)
        assert client.store("i", 0, 0, digests, b"", ids).code == ""


def test_bytes_that_are_no_zeromq_at_all(url: str) -> None:
    with running_server(url=url) as server, server.client() as client:
        for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 64, b"\x00" * 64):
            with socket.socket(socket.AF_UNIX) as raw:
                raw.connect(url.removeprefix("ipc://"))
                raw.sendall(noise)
            assert client.ping() < 5


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        ({"boot_id": "another"}, "no_data_path", "another host"),
        ({"pid_namespace": 1}, "no_data_path", "another process namespace"),
        ({"time_namespace": 1}, "no_data_path", "another time namespace"),
        ({"start_ticks": 1}, "no_data_path", "is gone"),
        ({"pid": 2**31 - 1}, "no_data_path", "is gone"),
    ],
)
def test_peers_without_a_data_path_are_refused_by_name(change, code, why) -> None:
    with running_server() as server, zmq.Context() as context:
        peer = RawPeer(context, server.url)
        try:
            reply = peer.ask(
                m.Hello(seq=1, version=m.PROTOCOL_VERSION, process=foreign_process(**change))
            )
            assert isinstance(reply, m.ErrorReply)
            assert reply.code == code and why in reply.message
            assert isinstance(peer.ask(m.Status(seq=2)), m.ErrorReply)
        finally:
            peer.socket.close()


def test_another_version_is_refused_with_both_numbers() -> None:
    with running_server() as server, zmq.Context() as context:
        peer = RawPeer(context, server.url)
        try:
            reply = peer.ask(m.Hello(seq=1, version=99, process=this_process()))
            assert isinstance(reply, m.ErrorReply) and reply.code == "unsupported_version"
            assert "99" in reply.message and str(m.PROTOCOL_VERSION) in reply.message
        finally:
            peer.socket.close()


def test_a_registration_that_lies_maps_nothing() -> None:
    """Segments of others, descriptors that are no segments, views that leave their segment."""
    import msgspec

    pool = TestPool()
    honest = msgspec.msgpack.decode(HostileFrames(1, pool, "liar").templates[1])

    def lie(**changes: object) -> m.RegisterKVCache:
        fields = {**honest, "seq": 50, **changes}
        request = m.RequestDecoder().decode(msgspec.msgpack.encode(fields))
        assert isinstance(request, m.RegisterKVCache), request
        return request

    def storage(**changes: object) -> list[dict]:
        return [{**honest["storages"][0], **changes}, *honest["storages"][1:]]

    def tensor(**changes: object) -> list[dict]:
        layer = honest["kv_caches"][0]
        return [
            {**layer, "tensors": [{**layer["tensors"][0], **changes}]},
            *honest["kv_caches"][1:],
        ]

    def info(**changes: object) -> list[dict]:
        first_info, *others = honest["engine_group_infos"]
        return [{**first_info, **changes}, *others]

    other = {**honest["storages"][0]["owner"], "pid": os.getppid()}
    with running_server() as server, zmq.Context() as context:
        peer = RawPeer(context, server.url)
        peer.greet()
        try:
            for request, why in (
                (lie(storages=storage(owner=other)), "every process registers its own"),
                (lie(storages=storage(fd=0)), "no shared-memory segment"),
                (lie(storages=storage(fd=9999)), "cannot be opened"),
                (lie(storages=storage(inode=1)), "not the segment that was registered"),
                (lie(storages=storage(nbytes=1 << 40)), "were registered"),
                (lie(kv_caches=tensor(offset=1 << 40)), "outside its segment"),
                (lie(kv_caches=tensor(strides=[1 << 40, 1, 1, 1])), "outside its segment"),
                (lie(kv_caches=tensor(shape=[0, 2, 16, 16])), "is no cache"),
                (lie(kv_caches=tensor(dtype="float7")), "'float7' is unknown"),
                (lie(kv_caches=tensor(storage=77)), "storage 77 of 7 is not there"),
                (lie(kv_caches=[*honest["kv_caches"], honest["kv_caches"][0]]), "twice"),
                (lie(chunk_tokens=48), "48"),
                (lie(replicated_infos=[9]), "replicated infos"),
                (lie(rank=3), "rank 3 of a world of 1"),
                (lie(engine_group_infos=info(engine_group_id=2**31)), "at most 1024"),
                (lie(engine_group_infos=info(engine_group_id=-1)), "engine group -1"),
                (lie(engine_group_infos=info(layer_indices=[0] * 50)), "names 50 layers"),
                (lie(engine_group_infos=info(tokens_per_block=2**40)), "tokens_per_block"),
                (lie(facts={"dcp_size": '"two"'}), "dcp_size"),
            ):
                reply = peer.ask(request)
                assert isinstance(reply, m.ErrorReply), why
                assert why in reply.message, (why, reply)
                assert reply.code in ("bad_registration", "bad_request"), reply
            assert server.server.snapshot()["registrations"] == []
            assert isinstance(peer.ask(lie()), m.RegisterReply), "the truth is accepted"
        finally:
            peer.socket.close()


def test_a_peer_cannot_use_or_end_what_another_registered() -> None:
    with running_server() as server, server.client() as owner, server.client() as other:
        pool = TestPool()
        register(owner, pool, "mine")
        ids = pool.all_ids(2)
        stolen = other.store("mine", 0, 0, prompt(1, 2), b"", ids)
        assert stolen.code == "unknown_instance"
        loaded = other.retrieve("mine", 0, "r", first(prompt(1, 2), 2), 0, ids)
        assert (loaded.ok, loaded.code) == (False, "unknown_instance")
        assert owner.store("mine", 0, 0, prompt(1, 2), b"", ids).stored == 6
