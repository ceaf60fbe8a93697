"""A pool of connections with a destructor that fails at exit."""

import gc


def disconnect(connection):
    print("disconnected", connection)


class Pool:
    def __init__(self):
        self.connections = ["first", "second"]

    def __del__(self):
        for connection in self.connections:
            disconnect(connection)


pool = Pool()
gc.freeze()  # Servers do this to make garbage collections shorter.
