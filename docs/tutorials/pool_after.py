"""The same pool as a Resource: closed once, at exit at the latest."""

import gc

from torch_utils import Resource


def disconnect(connection):
    print("disconnected", connection)


class Pool(Resource):
    def __init__(self):
        self.connections = ["first", "second"]

    def _release(self):
        for connection in self.connections:
            disconnect(connection)


pool = Pool()
gc.freeze()
