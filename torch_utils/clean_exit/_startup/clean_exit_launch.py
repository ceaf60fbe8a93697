"""Start a program whose interpreter ignores the environment (-I, -E) or site (-S), with the probe.

Called as ``python -I clean_exit_launch.py [-x] FILE|-c CODE|-m MODULE ARGUMENTS...``. The program
runs as ``__main__`` in this very module's namespace, which is what Python itself does, so that
its variables live exactly as long as they would.
"""

import sys

sys.path.insert(0, sys.argv[0].rpartition("/")[0])
import clean_exit_isolated

clean_exit_isolated.run(globals())
