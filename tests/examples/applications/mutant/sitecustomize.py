"""Break one promise of the product in every process of an application, as `MUTANT` names it.

A test of an application proves something only if it fails with one of these.
"""

import gc
import os


def leak() -> None:
    """Release nothing but what has a ``close()``."""
    from torch_utils._release.run import Release

    Release._empty = lambda self, roots, trash: None


def break_sharing() -> None:
    """Empty all tensors that a released object leads to, even those that others use."""
    import sys
    import types

    from torch_utils._release.run import Release

    skipped = (type, types.ModuleType, types.FunctionType, types.FrameType)
    run = Release.run

    def run_and_empty(self, objects, **options):
        torch = sys.modules.get("torch")
        seen, tensors, pending = {id(objects)}, [], list(objects)
        while pending and torch is not None:
            thing = pending.pop()
            if id(thing) in seen or isinstance(thing, skipped):
                continue
            seen.add(id(thing))
            if isinstance(thing, torch.Tensor):
                tensors.append(thing)
            else:
                pending.extend(gc.get_referents(thing))
        run(self, objects, **options)
        for tensor in tensors:
            tensor.data = torch.empty(0)

    Release.run = run_and_empty


def skip_destructor() -> None:
    """Call neither `_release` of a resource nor ``close()`` of what is released."""
    from torch_utils import Resource
    from torch_utils._release.run import Release

    # The library's own resources (scopes, hosts) stay as they are.
    def no_release(cls, **arguments):
        if not cls.__module__.startswith("torch_utils.") and "_release" in vars(cls):
            cls._release = lambda self: None

    Resource.__init_subclass__ = classmethod(no_release)
    Release._close = lambda self, root: None


def blind_plugin() -> None:
    """Report no finding about any program."""
    import dataclasses

    from clean_exit import checker

    check = checker.check
    checker.check = lambda *args, **options: dataclasses.replace(
        check(*args, **options), findings=()
    )


if os.environ.get("MUTANT"):
    globals()[os.environ["MUTANT"]]()
