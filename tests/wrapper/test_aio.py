# SPDX-License-Identifier: GPL-3.0-or-later
"""The asyncio twins: a cancelled task is through when its run is, whoever holds an event for it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from gpuops import Interrupted, Report, aio, api
from gpuops.report import totals
from tests.patience import PATIENCE, until

SO_FAR = Report(verb="reset", ended="interrupted", hosts=(), totals=totals([]))


class Run:
    """A stand-in for a verb: goes on until it is told to end, and then takes its time."""

    def __init__(self) -> None:
        self.begun = self.ended = False
        self.thread: threading.Thread | None = None

    def __call__(self, limit: str, *, cancel: threading.Event | None = None) -> Report:
        assert cancel is not None
        self.thread = threading.current_thread()
        self.begun = True
        assert until(cancel.is_set)
        time.sleep(0.3)
        self.ended = True
        raise Interrupted(SO_FAR)

    __name__ = "reset"


async def begun(*runs: Run) -> None:
    """Wait until they are under way."""
    assert await asyncio.to_thread(until, lambda: all(run.begun for run in runs))


@pytest.mark.parametrize("own", [False, True], ids=["no event", "an event"])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_a_cancelled_task_is_through_when_its_run_is(own: bool, times: int) -> None:
    async def main() -> None:
        run, event = Run(), threading.Event()
        task = asyncio.create_task(aio._twin(run)("ct129", **({"cancel": event} if own else {})))
        await begun(run)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0.01)
            assert not task.done() or run.ended
        with pytest.raises(asyncio.CancelledError):
            await task
        assert run.ended and task.cancelled()
        assert run.thread is not threading.main_thread()
        assert not event.is_set(), "other runs may have it too"

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_an_event_that_is_set_gives_the_report_so_far() -> None:
    async def main() -> None:
        event, runs = threading.Event(), (Run(), Run())
        tasks = [asyncio.create_task(aio._twin(run)("a", cancel=event)) for run in runs]
        await begun(*runs)
        event.set()
        assert await asyncio.gather(*tasks) == [SO_FAR, SO_FAR]

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_timeout_of_asyncio_is_one() -> None:
    async def main() -> None:
        run = Run()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await aio._twin(run)("ct129")
        assert run.ended

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_an_error_of_the_run_is_an_error_of_the_task(error: BaseException) -> None:
    def call(limit: str) -> Report:
        raise error

    async def main() -> None:
        await aio._twin(lambda limit, cancel=None: call(limit))("ct129")

    with pytest.raises(type(error)):
        asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_the_end_of_an_iterator_is_an_error_of_the_task() -> None:
    """As of a ``watch`` that calls next(); a future refuses it as it is."""
    ended = StopIteration()

    def status(limit: str, *, cancel: threading.Event | None = None) -> Report:
        raise ended

    def main() -> None:
        try:
            asyncio.run(aio._twin(status)("ct129"))
        except RuntimeError as error:
            caught.append(error)

    caught: list[RuntimeError] = []
    thread = threading.Thread(target=main, daemon=True)  # so that a task without end ends the test
    thread.start()
    thread.join(PATIENCE)
    (error,) = caught
    assert str(error) == "status raised StopIteration" and error.__cause__ is ended


def test_each_verb_has_a_twin() -> None:
    for verb in ("status", "plan", "reset", "verify"):
        twin: Any = getattr(aio, verb)
        assert twin.__wrapped__ is getattr(api, verb)
