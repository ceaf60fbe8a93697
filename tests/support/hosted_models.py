"""Models that processes of the tests load; no torch, so that a process starts in no time."""

import mmap
import os
import tempfile
import time
from pathlib import Path


class Picky(Exception):
    """Cannot be made again from its arguments, as many exceptions cannot."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


class Model:
    dimension = 3

    def __init__(self, *arguments):
        self.arguments = arguments
        self.kept = None

    def echo(self, value, **keywords):
        return (value, keywords) if keywords else value

    def __call__(self, value):
        return [value]

    def itself(self):
        return self

    def pid(self):
        return os.getpid()

    def call(self, function, *arguments):
        return function(*arguments)

    def fail(self, kind, *arguments):
        raise kind(*arguments)

    def map_file(self, size):
        """Read a file through a mapping, as weights are."""
        with tempfile.TemporaryFile() as file:
            file.truncate(size)
            self.kept = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        return sum(self.kept[:: mmap.PAGESIZE])

    def touch_and_spin(self, path):
        Path(path).touch()
        sum(range(10**12))  # One call of C, which never lets go of the GIL.

    def note_and_wait(self, number, path):
        Path(path).with_name(f"call {number}").touch()
        while not Path(path).exists():
            time.sleep(0.01)
        return number

    def fork(self):
        """Leave a process behind that has every descriptor of this one."""
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        return pid
