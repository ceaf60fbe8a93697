"""release: take the memory out of objects whose variables live on, and prove it.

A ``with`` block cannot unbind the caller's variable, and neither can a function. So the
weights are taken out of the object itself, and afterwards the object says that they were.
"""

from __future__ import annotations

from typing import Any

from torch_utils._releasing.holders import SEARCH_S
from torch_utils._releasing.plan import plan
from torch_utils._releasing.work import Collect, Release, check_collect, check_search
from torch_utils._runtime import DEBUG, early_bound, is_shutting_down, log
from torch_utils.report import CleanupReport

__all__ = ["Collect", "release", "safe_tensor_cleanup"]


@early_bound
def release(
    *objects: Any,
    collect: Collect = "auto",
    trim_host: bool = True,
    thorough: bool = False,
    search_s: float = SEARCH_S,
) -> CleanupReport:
    """Give back what objects hold, in place; the caller's variables may live on.

    Takes modules (and what wraps one: SentenceTransformer, CrossEncoder, transformers models,
    compiled modules), tensors, optimizers, faiss indexes, containers of these, any object with
    ``close()``, and objects that hold these in their attributes (a pipeline, a cache, a dataclass);
    docs/memory.md has the table. Finding out what to do runs none of their code.
    Afterwards a module, optimizer or index raises `ReleasedError` on every use, and a tensor is
    empty. Weights and submodules that a live model shares stay as they are.

    Errors out of the objects' own code are collected in the report and logged; only
    KeyboardInterrupt and its like go on to the caller, after everything else was released.
    While the program ends only ``close()`` methods are called: the end of the process gives
    the memory back sooner than anything done before it.

    Of several threads that release one object at the same time, one counts it, gives it up and
    reports it; the others do not wait for that. Storages that different objects share, which
    two threads release at the same time, may be in both reports.

    Args:
        *objects: What to release, in this order. None is nothing to release.
        collect: Whether to collect garbage. "auto": only if something that was given up is
            still alive, the youngest generations first, and the full heap only if no variable
            leads to it, so that it may be garbage; "never"; "full": always.
        trim_host: Return the C heap's unused pages to the system (glibc).
        search_s: How long to look for who still holds what was given up, in seconds, where
            something is. The search starts at the running functions' variables and follows
            references from there; raise this to have more distant holders named.
        thorough: Also clear what torch keeps outside its allocators, where it is loaded and in
            use: compiled code, cuBLAS workspaces, cuFFT plans, IPC handles, pinned host memory;
            and collect cycles that `gc.freeze` has put aside. Takes as long as it takes.

    Returns:
        What was freed and what is still held, measured.

    Raises:
        TypeError: An object is of a kind that it does not know, or a generator or iterator. Says
            what to pass instead. Nothing was touched.
        ValueError: ``collect`` is none of the three, or ``search_s`` no number of seconds.
    """
    try:
        check_collect(collect)
        check_search(search_s)
        targets = plan(objects)
        work = Release(collect=collect, trim_host=trim_host, thorough=thorough, search_s=search_s)
        work.run(targets)
        report = work.finish()
    except Exception as error:
        # A destructor may call this when the modules it is made of are gone already.
        if not is_shutting_down():
            raise
        return CleanupReport(errors=(error,), skipped="the interpreter is being taken apart")
    work.raise_interrupt()
    return report


@early_bound
def safe_tensor_cleanup(tensor_attr_name: str, obj: Any) -> bool:
    """Set ``obj.<name>`` to None and so give up the tensor, or tensors, that it held.

    Works on plain attributes, ``__slots__``, properties with a setter or deleter, registered
    parameters and buffers, and whatever the attribute holds: a tensor, or a list, tuple or
    dictionary of them. For destructors and shutdown paths: never raises, imports nothing,
    initialises nothing. As safe across threads as setting an attribute is.

    The tensor itself stays whole for others that refer to it; its memory goes with the last of
    them. To take the memory although a variable lives on, use `release`.

    Args:
        tensor_attr_name: The attribute's name.
        obj: Its owner; None and half-built owners are fine.

    Returns:
        True if there was something. False where there was nothing, or where the owner refuses
        to be changed; it is then as it was.
    """
    try:
        if getattr(obj, tensor_attr_name, None) is None:
            return False
        try:
            setattr(obj, tensor_attr_name, None)
        except Exception as error:
            # A property without a setter, a frozen owner, a validating __setattr__: each
            # raises what it likes. A deleter may still do.
            log(DEBUG, "%s refuses None: %r", tensor_attr_name, error)
        if getattr(obj, tensor_attr_name, None) is not None:
            delattr(obj, tensor_attr_name)
        return getattr(obj, tensor_attr_name, None) is None
    except Exception as error:
        # Destructors call this, on owners that may be half built or half taken apart.
        log(DEBUG, "%s not cleaned up: %r", tensor_attr_name, error)
        return False
