"""Ctrl-C in the middle of a run."""


def interrupt_third_call(monkeypatch, owner, name: str) -> list[tuple]:
    """Interrupt the third call of a function; returns the arguments of every call so far."""
    honest, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls
