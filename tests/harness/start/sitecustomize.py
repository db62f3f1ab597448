"""Python runs this first in each process that a test starts: tests/conftest.py says where it is.

Nothing that torch makes while it is imported is garbage. Not to look for any there, neither
meanwhile nor at the end, is a quarter of the time that a trainer of a few steps takes. (With a
GPU's torch comes Triton, which complains at the end of what nobody has cleared away.)

And a trainer does not predict its memory, which takes as long as the rest of its run; but where
a test is about that, or --use-activation-checkpoint is auto.
"""

import atexit
import gc
import os
import sys

gc.set_threshold(300_000)
atexit.register(lambda: gc.unfreeze() if "triton" in sys.modules else gc.freeze())


class Unplanned:
    """Finds trainer/setup.py, from which runs ask for a plan, and gives it none."""

    def find_spec(self, name, path, target=None):
        if name != "trainer.setup" or "PLANS_NOTHING" not in os.environ:
            return None
        from importlib.util import find_spec

        sys.meta_path.remove(self)
        spec = find_spec(name)
        execute = spec.loader.exec_module
        spec.loader.exec_module = lambda module: plan_nothing(execute(module) or module)
        return spec


def plan_nothing(setup) -> None:
    from trainer.plan import Plan, plan_memory

    def plan(args, process, config, *given):
        if args.use_activation_checkpoint == "auto":
            return plan_memory(args, process, config, *given)
        return Plan(config, "not predicted", None)

    setup.plan_memory = plan


sys.meta_path.insert(0, Unplanned())
