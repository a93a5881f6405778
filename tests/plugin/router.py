"""What hears the KV cache events of an engine."""

from pathlib import Path
from typing import Any

__all__ = ["Router"]


class Router:
    """Hears KV cache events as they are published, and asks for what it missed.

    Args:
        folder: where the sockets are.
    """

    def __init__(self, folder: Path) -> None:
        self._live, self._missed = (f"ipc://{folder / name}" for name in ("live", "missed"))

    def config(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "endpoint": self._live,
            "replay_endpoint": self._missed,
        }

    def listen(self) -> None:
        import zmq

        context: zmq.Context[Any] = zmq.Context.instance()
        self._subscriber, self._asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._subscriber.subscribe(b"")
        self._subscriber.connect(self._live)
        self._asking.connect(self._missed)

    def heard(self) -> list[dict[str, Any]]:
        """All events so far, in order. The first may have been published before we heard any."""
        import msgspec
        from vllm.distributed.kv_events import KVEventBatch

        live = {}
        while self._subscriber.poll(1000):
            _, number, payload = self._subscriber.recv_multipart()
            live[int.from_bytes(number, "big")] = payload
        assert live, "nothing was heard"
        batches = {}
        self._asking.send_multipart((b"", (0).to_bytes(8, "big")))
        while self._asking.poll(5000):
            _, _, number, payload = self._asking.recv_multipart()
            if not payload:
                break
            batches[int.from_bytes(number, "big")] = payload
        assert batches.items() >= live.items() and list(batches) == list(range(len(batches)))
        decode = msgspec.msgpack.Decoder(KVEventBatch).decode
        events = [event for payload in batches.values() for event in decode(payload).events]
        return [{"type": type(event).__name__, **msgspec.to_builtins(event)} for event in events]
