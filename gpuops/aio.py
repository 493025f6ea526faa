# SPDX-License-Identifier: GPL-3.0-or-later
"""The verbs of :mod:`gpuops.api` for asyncio programs: the same parameters, the same report.

``watch`` and ``output`` are called in another thread than the loop's. A task that is cancelled ends
its run, and is through only when the run has ended. A run that ``cancel`` ends gives its report so
far, whose ``ended`` is ``interrupted``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from gpuops import api
from gpuops.errors import Interrupted
from gpuops.report import Report

P = ParamSpec("P")


class _Cancel(threading.Event):
    """Is also set when the caller's event is; that one is not set here, since other runs have it.

    :param given: the caller's.
    """

    def __init__(self, given: threading.Event | None) -> None:
        super().__init__()
        self.given = given

    def is_set(self) -> bool:
        """Whether the run is to end."""
        return super().is_set() or (self.given is not None and self.given.is_set())


def _twin(call: Callable[P, Report]) -> Callable[P, Coroutine[Any, Any, Report]]:
    @functools.wraps(call)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> Report:
        given: dict[str, Any] = {**kwargs}
        cancel = given["cancel"] = _Cancel(given.get("cancel"))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Report] = loop.create_future()

        def done(report: Report | None, error: BaseException | None) -> None:
            if error is not None:
                future.set_exception(error)
            else:
                assert report is not None
                future.set_result(report)

        def work() -> None:
            report: Report | None = None
            problem: BaseException | None = None
            try:
                report = call(*args, **given)
            except Interrupted as error:
                report = error.report  # raised, it would end the loop as a KeyboardInterrupt does
            except StopIteration as error:
                # No future takes one, and the task would wait for ever.
                problem = RuntimeError(f"{call.__name__} raised StopIteration")
                problem.__cause__ = error
            except BaseException as error:
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(done, report, problem)

        # A thread of its own: the pool of asyncio may be full of other people's work.
        threading.Thread(target=work, name=f"gpuops-{call.__name__}", daemon=True).start()
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
                cancel.set()
        if cancelled is not None:
            future.exception()  # so that asyncio does not complain that nobody has seen it
            raise cancelled
        return future.result()

    return twin


status = _twin(api.status)
plan = _twin(api.plan)
reset = _twin(api.reset)
verify = _twin(api.verify)
