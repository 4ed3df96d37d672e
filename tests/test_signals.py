# SPDX-License-Identifier: Apache-2.0
"""A second signal never changes the exit code, at any moment."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

INT, TERM = "signal.raise_signal(signal.SIGINT)", "signal.raise_signal(signal.SIGTERM)"


def ends_with(body: str, after: str = "") -> int:
    """Return the exit status of a process that runs `body` as a command, and `after` as its interpreter exits."""
    script = [
        "import atexit, signal, sys, threading, time",
        "from kvpress.signals import run_command",
        f"atexit.register(lambda: exec({after!r}))",
        "def command():",
        textwrap.indent(textwrap.dedent(body), "    "),
        "run_command(command)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(script)], capture_output=True, text=True, timeout=60)  # noqa: S603
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


@pytest.mark.parametrize("second", [INT, TERM])
@pytest.mark.parametrize(("first", "code"), [(INT, 130), (TERM, 143)])
@pytest.mark.parametrize(
    "body",
    [
        "try: {first}\nfinally: {second}",
        "try: {first}\nexcept KeyboardInterrupt:\n    {second}\n    sys.exit(1)",
        "try: {first}\nexcept BaseException as error:\n    {second}\n    raise RuntimeError from error",
        "try: {first}\nexcept KeyboardInterrupt: sys.exit(1)\nfinally:\n    for _ in range(3): {second}",
    ],
    ids=["finally", "except", "another error", "many"],
)
def test_the_first_signal_decides(body: str, first: str, second: str, code: int) -> None:
    assert ends_with(body.format(first=first, second=second)) == code


@pytest.mark.parametrize("code", [0, 1, 130])
@pytest.mark.parametrize("number", [INT, TERM])
def test_a_signal_after_the_end_leaves_the_exit_code(code: int, number: str) -> None:
    assert ends_with(f"sys.exit({code})", after=number) == code


def test_a_signal_while_threads_are_waited_for() -> None:
    body = f"threading.Thread(target=lambda: (time.sleep(0.2), {INT}, time.sleep(30))).start()\nsys.exit(3)"
    assert ends_with(body) == 3


def test_an_interrupt_that_something_swallowed_is_still_the_exit_code() -> None:
    assert ends_with(f"try: {INT}\nexcept KeyboardInterrupt: pass\nsys.exit(0)") == 130


@pytest.mark.parametrize(
    ("body", "code"), [("sys.exit(None)", 0), ("sys.exit('no')", 1), ("raise KeyboardInterrupt", 130)]
)
def test_without_a_signal_the_command_decides(body: str, code: int) -> None:
    assert ends_with(body) == code


def test_a_command_called_as_a_function_leaves_the_handlers() -> None:
    from kvpress.signals import run_command

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert run_command(lambda: 7) == 7
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
