"""What the programs here are told, what they say, and how they end.

What a user can put right ends in one line; a traceback is for what is wrong in the programs.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
from absl import flags

from meml_jax import devices
from meml_jax.config import Config
from meml_jax.interrupts import Interrupted
from meml_jax.settings import flatten
from meml_jax.types import UserError


def say(line: str) -> None:
    """Print a line at once, also into a pipe; of several processes, the first speaks for all."""
    if not devices.process():
        print(line, flush=True)


def split_overrides(argv: list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Separate overrides of settings from the other arguments.

    They are `--config.a.b=value` and `--config.a.b value`; of a bool, `--config.a.b` and
    `--noconfig.a.b` too.

    Raises:
      UserError: no value, of a field that is no bool.
    """
    overrides, rest, left = [], [], list(reversed(argv))
    while left:
        arg = left.pop()
        if re.match("-[A-Za-z]", arg):  # as absl takes it
            arg = f"-{arg}"
        if arg.startswith("--noconfig.") and _is_bool(arg.removeprefix("--noconfig.")):
            overrides.append(f"--{arg.removeprefix('--no')}=false")
        elif not arg.startswith("--config."):
            rest.append(arg)
        elif "=" in arg:
            overrides.append(arg)
        elif left and not re.match("--?[A-Za-z]", left[-1]):
            overrides.append(f"{arg}={left.pop()}")
        elif _is_bool(arg.removeprefix("--config.")):
            overrides.append(f"{arg}=true")
        else:
            raise UserError(f"{arg} has no value; write {arg}=VALUE")
    return tuple(overrides), rest


def _is_bool(field: str) -> bool:
    return isinstance(flatten(Config()).get(field), bool)


@contextlib.contextmanager
def user_errors() -> Iterator[None]:
    """Turn what the libraries of flags and config files raise into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except SystemExit as stop:
        *_, (frame, line) = traceback.walk_tb(stop.__traceback__)
        raise UserError(
            f"{frame.f_code.co_filename}, line {line}: ends the program ({stop.code!r}), expected "
            "a file that can be imported and a get_config that returns settings"
        ) from None
    except Exception as error:  # a config file is a program, which may raise about anything
        *_, cause = causes = list(_causes(error))
        reason = " ".join(str(cause).split())
        if told := [one for one in causes if isinstance(one, UserError)]:
            raise UserError(str(told[-1])) from None
        # What a config file raises of some kinds comes with its traceback as the message.
        if isinstance(error, _OF_FLAGS) and "Traceback (most recent call last)" not in str(error):
            raise UserError(" ".join(str(error).split())) from None
        *_, (frame, line) = traceback.walk_tb(cause.__traceback__)
        place = f"{frame.f_code.co_filename}, line {line}"
        if isinstance(cause, SyntaxError) and cause.filename:  # raised where the file is read
            place, reason = f"{cause.filename}, line {cause.lineno}", cause.msg
        raise UserError(f"{place}: {type(cause).__name__}: {reason}") from None


_OF_FLAGS = (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """List an error and what is behind it: the flag libraries wrap what went wrong."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def stops_are_told() -> Iterator[None]:
    """End with a line at SIGTERM and at Ctrl-C, wherever no training takes it to save first.

    Python drops what is raised while it collects garbage; a stop that is lost so is sent again.
    """

    def stop(signum: int, frame: Any) -> None:
        raise Interrupted(signum, "stopped; the same command goes on")

    def send_again(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, Interrupted | KeyboardInterrupt):
            hook(dropped)
            return
        signum = getattr(dropped.exc_value, "signum", signal.SIGINT)
        started = False
        while not started:
            again = threading.Timer(0.1, os.kill, (os.getpid(), signum))
            again.daemon = True  # not waited for by a program that ends before
            # On a busy machine the signal may come before the start is over, and be dropped too.
            with contextlib.suppress(Interrupted, KeyboardInterrupt):
                again.start()
                started = True

    hook = sys.unraisablehook
    handlers = {signal.SIGTERM: stop, signal.SIGINT: signal.default_int_handler}
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    sys.unraisablehook = send_again
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        sys.unraisablehook = hook


def complain(error: object) -> None:
    """Print what is wrong; a process of several says which one it is."""
    index = devices.process()
    print(f"error: {f'process {index}: ' * bool(index)}{error}", file=sys.stderr, flush=True)


def leave(code: int) -> NoReturn:
    """End the program; after a stop at once, whatever still runs.

    XLA's threads may be compiling or computing what was stopped. Python would wait for them, for a
    minute or so, and take down what they use before they end: a segmentation fault.
    """
    if code > 128 and not jax.distributed.is_initialized():  # several processes end in order
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def exit_code(work: Callable[[], int]) -> int:
    """Do a program's work, and turn a stop, and what a user can put right, into one line."""
    try:
        with stops_are_told():
            return work()
    except UserError as error:
        complain(error)
        return 2
    except BrokenPipeError:  # as of `| head`; what is left to say has no reader
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        complain(f"{error.filename}: {error.strerror}; move what is in its way or name another")
        return 2
    except jax.errors.JaxRuntimeError as error:
        if not jax.distributed.is_initialized():
            raise
        reason = " ".join(str(error).split())[:160]
        complain(f"another process was lost, the same commands go on ({reason})")
        return 2
    except Interrupted as stop:
        say(str(stop))
        return 128 + stop.signum
    except KeyboardInterrupt:
        say("stopped; the same command goes on")
        return 128 + signal.SIGINT
