"""Tools that run other programs, and programs that are not Python: jupyter, make, node."""

from __future__ import annotations

import json

from tests.clean_exit.exits.real_programs import DIRTY, PYTHON, Program, dirty


def notebook(source: str) -> str:
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cell = {
        "cell_type": "code", "id": "a", "source": source, "metadata": {}, "outputs": [],
        "execution_count": None,
    }  # fmt: skip
    page = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(page)


NBCONVERT = ("jupyter-nbconvert", "--to", "notebook", "--execute", "--output", "out", "in.ipynb")
JUPYTER = ("nbconvert", "ipykernel")
AT_EXIT = DIRTY + "atexit.register(lambda: 1 / 0)\n"
# What a kernel writes to stderr goes to its notebook.
LEAVES = """
import subprocess as s
s.Popen(["sleep", "600"], start_new_session=True, stdout=s.DEVNULL, stderr=s.DEVNULL)
"""
COVERAGE = ("coverage", "run", "--rcfile=rc", "main.py")
SUBPROCESS = "import subprocess, sys\nsubprocess.run([sys.executable, 'other.py'], check=True)\n"
RC = "[run]\nparallel = true\npatch = subprocess\n"
MAKEFILE = """
all: one two three
one two:
	{python} -c 'print("$@")'
three:
	{python} three.py
	$(MAKE) again
again:
	echo again
"""
THREE = {
    "clean": "print('three')\n",
    "dirty": AT_EXIT,
}

TOOLS = [
    Program("jupyter nbconvert", "dirty-kernel", NBCONVERT, {"in.ipynb": notebook(LEAVES)},
            modules=JUPYTER, options={"max_shutdown_s": 30}, **dirty("orphan-process")),
    Program("coverage", "dirty-subprocess", COVERAGE,
            {"main.py": SUBPROCESS, "other.py": AT_EXIT, "rc": RC}, modules=("coverage",),
            **dirty("atexit-error")),
    *(
        Program("make", f"parallel-{name}", ("make", "-j", "2"),
                {"Makefile": MAKEFILE.format(python=PYTHON), "three.py": source},
                **({} if name == "clean" else dirty("atexit-error")))
        for name, source in THREE.items()
    ),
    Program("node", "aborts", ("node", "main.js"), {"main.js": "process.abort()"},
            findings=frozenset({"crash"}), exit_code=134),
    Program("node", "leaves-a-child", ("node", "main.js"),
            {"main.js": "require('child_process').spawn('sleep', ['600'], "
                        "{detached: true, stdio: 'ignore'}).unref()"},
            **dirty("orphan-process")),
]  # fmt: skip
