# SPDX-License-Identifier: GPL-3.0-or-later
"""The verbs of :mod:`gpuops.api` for asyncio programs: the same parameters, the same report.

A task that is cancelled ends its run, and is through only when the run has ended.
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


def _twin(call: Callable[P, Report]) -> Callable[P, Coroutine[Any, Any, Report]]:
    @functools.wraps(call)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> Report:
        cancel = threading.Event()
        given: dict[str, Any] = {"cancel": cancel, **kwargs}
        # A thread of its own: the pool of asyncio may be full of other people's work.
        future: asyncio.Future[Report] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()

        def done(report: Report | None, error: BaseException | None) -> None:
            if not future.done():
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
                # asyncio lets a KeyboardInterrupt out of the loop; a cancelled run is not that.
                problem = asyncio.CancelledError(str(error))
            except Exception as error:
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(done, report, problem)

        threading.Thread(target=work, name=f"gpuops-{call.__name__}", daemon=True).start()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            cancel.set()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                await future
            raise

    return twin


status = _twin(api.status)
plan = _twin(api.plan)
reset = _twin(api.reset)
verify = _twin(api.verify)
