"""The probe's offer to write the stacks of all threads when the checker asks, by a signal.

As in clean_exit_probe: nothing here raises, or changes what the program can see.
"""

import sys

STACKS_SIGNAL = 62  # A real-time signal that hardly any program uses; the checker sends it.


def offer_stacks(path, record, keep_open, read_stat, os):
    """Have the stacks of all threads written when the checker asks."""
    try:
        import faulthandler

        file = os.open(path + ".stacks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        number = keep_open(file, os)
        if number is not None:
            faulthandler.register(STACKS_SIGNAL, file=number, all_threads=True)
            record("stacks", read_stat(os)[0], number)
            _withdraw_if_handled(record)
            _withdraw_if_registered(record, faulthandler)
    except Exception:  # A Python without faulthandler: no stacks.
        pass


def _withdraw_if_handled(record):
    """Withdraw the offer of stacks when the program handles that signal itself.

    signal.signal() looks up _signal.signal with its argument at hand: seen there, and not by a
    function around it, it leaves no frame in the tracebacks of the errors of that call.
    """
    import _signal

    usual, caller = _signal.signal, sys._getframe

    class Module(type(_signal)):
        @property
        def signal(self, _wanted=STACKS_SIGNAL, _is=isinstance, _int=int, _failure=Exception):
            try:
                frame = caller(1)
                number = frame.f_locals.get("signalnum")
                if frame.f_code.co_name == "signal" and _is(number, _int) and number == _wanted:
                    record("stacks", None, None)
            except _failure:
                pass
            return usual

    Module.__name__ = Module.__qualname__ = "module"
    _signal.__class__ = Module


def _withdraw_if_registered(record, faulthandler):
    """Withdraw the offer also when the program has stacks written at that signal itself."""
    usual = faulthandler.register

    def register(*args, _wanted=STACKS_SIGNAL, _failure=Exception, **options):
        try:
            if (args[0] if args else options["signum"]) == _wanted:
                record("stacks", None, None)
        except _failure:
            pass
        return usual(*args, **options)

    faulthandler.register = register
