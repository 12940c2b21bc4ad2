"""Answers Prometheus's scrapes of a service that has no other HTTP server."""

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer


def serve_scrapes(host: str, port: int, render: Callable[[], bytes], content_type: str) -> None:
    """Answer each GET on a thread, with what ``render`` returns."""
    server = _Server((host, port), _handler(render, content_type))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


def _handler(render: Callable[[], bytes], content_type: str) -> type[BaseHTTPRequestHandler]:
    # prometheus_client's own server answers Prometheus in a format that replaces colons in names by
    # underscores. The names would differ from those of the gateway, which does not use that server.
    class Handler(BaseHTTPRequestHandler):
        timeout = 10  # seconds of silence; each connection has a thread

        def do_GET(self) -> None:
            body = render()
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Do not log scrapes."""

    return Handler
