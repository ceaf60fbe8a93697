"""Threads that share two models, one of them loaded at a time: threads_service.py [PORT]"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from model import load_model

from torch_utils import ModelPool, exit_on_signals


class Rate(BaseHTTPRequestHandler):
    def do_POST(self):
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with POOL.lease(self.path.strip("/"), timeout_s=60) as model:
            answer = str(model.friendliness(text)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    exit_on_signals()  # SIGTERM ends the program normally, like Ctrl-C
    with ModelPool(max_loaded=1, keep_alive="10m") as POOL:
        POOL.add("strict", load_model)
        POOL.add("kind", load_model)
        address = ("127.0.0.1", int(sys.argv[1]) if sys.argv[1:] else 0)
        with ThreadingHTTPServer(address, Rate) as server:
            print(f"listening on port {server.server_port}", flush=True)
            server.serve_forever()
