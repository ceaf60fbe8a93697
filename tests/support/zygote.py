"""An interpreter that has imported what is slow to import, and forks one child a program.

The child runs the program in its ``__main__`` and ends as any interpreter does, through the
whole of its finalization; only the seconds of importing torch are shared. The library under
test is not among what is imported here.
"""

import atexit
import gc
import json
import os
import sys

del sys.path[0]  # This folder, whose modules are not to be found by their bare names.
__import__("torch")


def _freeze():
    if "triton" not in sys.modules:  # It would report frozen objects as leaked.
        gc.freeze()


def _serve():
    """Return the job, in the child; the parent goes on serving until its stdin ends."""
    while True:
        line = sys.stdin.buffer.raw.readline()  # type: ignore[union-attr]  # Python's own stdin has one
        if not line:
            os._exit(0)
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.update(job["env"])
            for descriptor, path in ((1, job["stdout"]), (2, job["stderr"])):
                os.dup2(os.open(path, os.O_WRONLY), descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.setsid()
            sys.argv[1:] = job["arguments"]
            if job["quick_end"]:
                atexit.register(_freeze)  # The first one registered is the last to run.
            return job
        os.write(1, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(1, f"{os.waitstatus_to_exitcode(status)}\n".encode())


_job = _serve()
del _serve
exec(compile(_job["program"], "program.py", "exec"))
