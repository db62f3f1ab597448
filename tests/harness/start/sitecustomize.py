"""Python runs this first in each process that a test starts: tests/conftest.py says where it is.

Nothing that torch makes while it is imported is garbage. Not to look for any there, neither
meanwhile nor at the end, is a quarter of the time that a trainer of a few steps takes. (With a
GPU's torch comes Triton, which complains at the end of what nobody has cleared away.)
"""

import atexit
import gc
import sys

gc.set_threshold(300_000)
atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else gc.freeze())
