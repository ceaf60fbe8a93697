"""What the programs of the matrix keep alive: the library's objects, and a naive destructor.

Each logs "made" and "released" with its process's id into a file. The logging is bound early,
so that what fails in a late phase is the subject and never the log. Imported by the programs,
on every Python, so nothing but the standard library at the top.
"""

import os
import sys

KIND = os.environ["HAZARD_SUBJECT"]
LOG = os.open(os.environ["HAZARD_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_count = 0

# OpenMP's threads in torch, and the one in which a host waits for its model's keep_alive.
if KIND in ("retriever", "host") and sys.version_info >= (3, 12):
    import warnings

    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)


def log(event: str, number: object, _write=os.write, _pid=os.getpid, _log=LOG) -> None:
    _write(_log, f"{event} {_pid()} {number}\n".encode())


def _next() -> int:
    global _count
    _count += 1
    log("made", _count)
    return _count


def make(action=None):
    """Return a new subject; ``action`` is called in its release, after the log."""
    return _MAKERS.get(KIND, _resource)(action)


def close(subject) -> None:
    """End a subject early, the way its users would."""
    if KIND == "scope":
        subject.__exit__(None, None, None)
    else:
        subject.close()


def is_alive(subject) -> bool:
    """Whether a subject can still be used."""
    if KIND == "scope":
        return subject.report is None
    return not subject.closed


def _resource(action):
    from torch_utils import Resource

    class Subject(Resource):
        def __init__(self) -> None:
            self.number = _next()

        def _release(self, _log=log) -> None:
            _log("released", self.number)
            if action is not None:
                action()

    return Subject()


def _scope(action):
    from torch_utils import SafePyTorchCleanup

    scope = SafePyTorchCleanup().__enter__()
    if action is not None:
        scope.callback(action)
    scope.callback(log, "released", _next())
    return scope


def _host(action):
    from torch_utils import ModelHost

    number = _next()

    class Model:
        def close(self, _log=log) -> None:
            _log("released", number)
            if action is not None:
                action()

    subject = ModelHost(Model, keep_alive="1h")
    with subject.lease():
        pass  # Now the idle timer runs.
    return subject


def _retriever(action):
    from rag_demo import PyTorchGPURetriever

    class Letters:
        name, dimension = "letters", 2

        def embed_query(self, text):
            return self.embed_documents([text])[0]

        def embed_documents(self, texts):
            return [[1.0, len(text)] for text in texts]

    class Subject(PyTorchGPURetriever):
        def _release(self, _log=log) -> None:
            super()._release()
            _log("released", self.number)
            if action is not None:
                action()

    subject = Subject(Letters(), device="cpu")
    subject.number = _next()
    subject.add(["cache", "memory"])
    return subject


class Naive:
    """The control: a destructor that imports what it needs, as most do."""

    closed = False

    def __init__(self, action) -> None:
        self.number = _next()
        self.action = action

    def close(self) -> None:
        self.__del__()

    def __del__(self) -> None:
        import colorsys  # Nothing else imports it; Python 3.14's multiprocessing imports json.

        colorsys.rgb_to_hls(0, 0, 0)
        log("released", self.number)
        if self.action is not None:
            self.action()


_MAKERS = {"scope": _scope, "host": _host, "retriever": _retriever, "naive": Naive}
if KIND != "naive" and not os.environ.get("HAZARD_LATE"):
    import torch_utils  # noqa: F401
if KIND == "retriever":
    import rag_demo  # noqa: F401
