"""What the probe records of an error, without running any of the program's code but its str().

As in clean_exit_probe: all that the functions use is bound to them.
"""

_FRAMES = 30  # entries of a traceback that are recorded
_LETTERS = 2000  # of a message
_NAMED = ("function", "builtin_function_or_method", "method", "type", "generator", "coroutine")


def name_object(thing, _type=type, _named=_NAMED):
    """Name an object without running any of its code."""
    if thing is None:
        return ""
    kind = _type(thing)
    name = thing.__qualname__ if kind.__name__ in _named else ""
    return "%s.%s %s" % (kind.__module__, kind.__qualname__, name)


def describe_error(
    error,
    traceback,
    _type=type,
    _str=str,
    _failure=BaseException,
    _most=_FRAMES,
    _letters=_LETTERS,
):
    """Return the error's type, its message, and where it was, innermost last."""
    kind = _type(error)
    name = kind.__qualname__
    if kind.__module__ != "builtins":
        name = kind.__module__ + "." + name
    try:
        message = _str(error)[:_letters]
    except _failure:
        message = "<no message>"
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        places.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    return name, message, places[-_most:]
