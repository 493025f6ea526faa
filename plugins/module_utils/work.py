# Copyright (c) the gpuops authors
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One target's part of a run: reading, looking, signalling, waiting, and what comes of it."""

from __future__ import annotations

import os
import time

from ansible_collections.gpuops.gpu.plugins.module_utils import (
    deadline,
    holders,
    node,
    nvidia_smi,
    owners,
    restarts,
    signals,
    turns,
    verdict,
)

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes a quarter as long to import as Python takes to start
    from collections.abc import Callable
    from typing import Any

STDOUT = 1
NEVER = float("inf")

# Seconds after SIGKILL from which a process that is still there counts as unkillable.
UNKILLABLE_AFTER = 5.0

# Seconds that the driver is given to free memory where its readings cannot tell when it has: it
# takes 0.1 of a process, 0.6 of eight (measured with driver 580).
UNSEEN_RELEASE = 1.0

# MiB of a GPU in use that the driver may keep for itself beside what it lists for the processes.
DRIVERS_OWN_MIB = 512

# Seconds between looks for new holders while memory is being released, doubled each time.
FIRST_LOOK_AFTER = 0.4
# Seconds for which readings follow each other without a pause: most releases take less.
NO_PAUSE_BEFORE = 1.0
# The longest pause between two readings of memory, in seconds.
LONGEST_PAUSE = 0.25


class Work:
    """One target's part of a run: its reader, its readings and what comes of them."""

    def __init__(
        self,
        host: node.Node,
        target: verdict.Target,
        session: nvidia_smi.Session,
        earlier: list[dict[str, Any]],
    ) -> None:
        self.node = host
        self.target = target
        target.inside = host.in_container and not target.vmid
        self.session = session
        self.loop: nvidia_smi.Loop | None = None
        self.earlier = earlier
        self.readings: list[nvidia_smi.Reading] = []
        self.view = verdict.View()
        self.scan: holders.Scan | None = None
        self.actions: list[dict[str, Any]] = []
        # Mine as they were seen last, by PID; of earlier rungs those that were signalled.
        self.seen = {
            each["node_pid"]: restarts.remembered(each)
            for each in earlier
            if each["result"] == "sent"
        }
        self.timings: dict[str, float] = {}
        self.first_signal = 0.0
        self.nodes = 0

    def count_nodes(self) -> None:
        """How many GPUs the place should show: as many as it has device nodes."""
        try:
            text, code = self.session.answer()
        except nvidia_smi.SmiError:
            return  # The reading that follows fails in the same way and says so.
        names = text.split() if code == 0 else []
        self.nodes = sum(1 for name in names if name[:6] == "nvidia" and name[6:].isdigit())

    def read(self) -> bool:
        """Keep the answer to the last question; where a loop reads, its next one, if there is any.

        Returns whether there was one.
        """
        reading = self.loop.reading(LONGEST_PAUSE) if self.loop else self.session.gpus()
        if self.loop and self.loop.over:
            self.end_loop()
        if reading is None:
            return False
        for gpu in reading.gpus:
            gpu.minor = self.node.minor_of(gpu.uuid)
        self.readings.append(reading)
        return True

    def close(self) -> None:
        """End what reads for this target."""
        self.end_loop()
        self.session.close()

    def start_loop(self) -> None:
        """Notice zero as soon as it is true, if a loop begins in time; else single calls do."""
        self.loop = nvidia_smi.Loop(self.session, self.readings[-1])
        if self.loop.reading(LONGEST_PAUSE) is None:
            self.end_loop()

    def end_loop(self) -> None:
        """Read by single calls from now on."""
        if self.loop:
            self.loop.close()
            self.loop = None

    def wanted(self) -> list[nvidia_smi.Gpu]:
        """The GPUs of the last reading that this run is about."""
        last = self.readings[-1].gpus if self.readings else []
        return [gpu for gpu in last if self.target.wants(gpu)]

    def problem(self) -> str:
        """What is wrong with the last reading, if anything."""
        return verdict.unreadable(self.target, self.readings[-1], self.nodes)

    def all_zero(self) -> bool:
        """Did the last reading show zero everywhere?"""
        return not self.problem() and all(self.target.is_zero(gpu) for gpu in self.wanted())

    def unseen_release(self) -> float:
        """Seconds for which it must stay at "zero", where that may be the memory of who has ended.

        So it may where the driver tells none, or more than a process has of a GPU that it has
        merely opened, and the declared baseline covers that.
        """
        seen = all(
            gpu.used_mib is not None and gpu.used_mib <= verdict.OPENED_MIB for gpu in self.wanted()
        )
        return 0.0 if seen else UNSEEN_RELEASE

    def look(self) -> None:
        """Find the holders; look deeply if those found do not explain the memory in use.

        Never by a look that another target has had made before now: somebody may have come since
        that was there when this target was read.
        """
        since = time.monotonic()
        # Memory in use hints at holders that a quick look misses; where none is, nothing does.
        self.scan = self.node.look(since, deep=self.target.holders_only or self.all_zero())
        self.view = self.sort(self.scan)
        if not self.problem() and self._unexplained():
            self.scan = self.node.look(since, deep=True)
            self.view = self.sort(self.scan)
        self.seen.update((holder.pid, holder) for holder in self.view.mine)

    def sort(self, found: holders.Scan) -> verdict.View:
        """What may be done to whom of those found."""
        untold = self.target.holders_only or self.unseen_release() > 0
        view = self.node.view(self.target, found, untold)
        if self.target.gpus:
            view.limit({gpu.minor for gpu in self.wanted()})
        if self.target.quits_mps:
            concerned = self.concerned(view.mine)
            left = [holder for holder in view.mine if holder not in concerned]
            why = verdict.LEFT_OUT if self.target.gpus else verdict.NOT_THERE
            view.keep_shared_mps(left, why)
        return view

    def _unexplained(self) -> bool:
        return any(
            not self.target.is_zero(gpu)
            and (not self.explained(gpu) or (self.loose_mib(gpu) or 0) > DRIVERS_OWN_MIB)
            for gpu in self.wanted()
        )

    def explained(self, gpu: nvidia_smi.Gpu) -> bool:
        """Is there a living holder that may own this GPU's memory?"""
        everyone = self.view.mine + [holder for holder, _ in self.view.spared]
        return any(
            verdict.explains(holder, gpu)
            for holder in everyone
            if gpu.minor is None or gpu.minor in holder.gpus
        )

    def loose_mib(self, gpu: nvidia_smi.Gpu) -> int | None:
        """MiB of this GPU that the driver ascribes to no process; ``None`` where not known."""
        if gpu.used_mib is None or gpu.minor is None or self.scan is None:
            return None
        known = 0
        for holder in self.scan.holders.values():
            used = holder.used_mib.get(gpu.minor, 0)
            if used is None:
                return None
            known += used
        return max(0, gpu.used_mib - known)

    def state(self) -> dict[str, Any]:
        """Look and read, and take the second reading too if it can prove something."""
        self.count_nodes()
        self.read()
        if self.session.hung:
            # One call that hangs is enough: the driver's list would be the second.
            self.node.do_without_list(self.session.lost)
        self.look()
        if self.all_zero():
            self.read()
        return self.result()

    def proved_at(self) -> float:
        """How old what was found is (monotonic seconds): as old as the first of the two readings.

        The look that counts is never older.
        """
        return min([reading.at for reading in self.readings[-2:]], default=time.monotonic())

    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs of the last reading with verdict and unattributed memory."""
        rows = []
        for gpu in self.wanted():
            row = gpu.as_dict()
            row["verdict"] = verdict.judge_gpu(self.target, gpu, self.view)
            row["unattributed_mib"] = self.loose_mib(gpu)
            rows.append(row)
        return rows

    def judge(self) -> verdict.Verdict:
        """The verdict on what was read and seen last; who keeps coming back is named."""
        judged = verdict.judge(self.target, self.readings, self.view, self.nodes)
        # Where it tells no memory, the list is all that it says of what is in use.
        if judged.word == verdict.CLEAN and self.target.holders_only:
            problem = self.node.unlisted({gpu.minor for gpu in self.wanted()})
            if problem:
                return verdict.Verdict(verdict.UNKNOWN, problem, verdict.remedy_for(problem))
        returned = self.returned(1)
        if judged.word == verdict.HELD and returned:
            return verdict.restarted(returned[0], *restarts.supervisor(returned[0]))
        return judged

    def returned(self, times: int) -> list[holders.Holder]:
        """Those of mine that have come back at least so often after having been ended."""
        return [
            holder for holder in self.view.mine if restarts.times(holder, self.earlier) >= times
        ]

    def may_free_itself(self, judged: verdict.Verdict) -> bool:
        """May it become clean without our doing: the driver is releasing, or a server ending?

        From inside a container what the driver still has of whom we have ended looks like memory of
        somebody in another.
        """
        if judged.word == verdict.BLOCKED and self.target.inside:
            seen = [self.view.in_the_way(gpu, self.target.is_zero(gpu)) for gpu in self.wanted()]
            return not any(seen) and anybody_signalled(self.earlier + self.actions)
        if judged.word == verdict.UNKNOWN:
            only_ending = self.view.ending and not self.problem()
            return only_ending or self.is_listed_still()
        return judged.word == verdict.HELD and not self.returned(1)

    def is_listed_still(self) -> bool:
        """Is all that is wrong a process on the driver's list that is not there (any more)?"""
        readable = bool(self.readings) and not self.problem()
        listed = self.node.ghost({gpu.minor for gpu in self.wanted()})
        return self.target.holders_only and readable and bool(listed)

    def record(self) -> dict[str, Any]:
        """What has been done so far, which no result may leave out."""
        done = list(self.actions)
        return {"actions": done, "changed": anybody_signalled(done)}

    def result(self, judged: verdict.Verdict | None = None) -> dict[str, Any]:
        """Everything about this target as plain data."""
        judged = judged or self.judge()
        result = bare_result(self.target.name, judged)
        result.update(
            place=self.target.place,
            inside=self.target.inside,
            scope=self.target.scope,
            holders_only=self.target.holders_only,
            gpus=self.gpus(),
            holders=[holder.as_dict() for holder in self.view.mine],
            spared=[dict(holder.as_dict(), why=why) for holder, why in self.view.spared],
            stuck={str(pid): why for pid, why in self.view.stuck.items()},
            **self.record(),
            settled=judged.word != verdict.HELD or not self.concerned(self.view.mine),
            waiting=self.may_free_itself(judged),
            readings=len(self.readings),
            timings=self.timings,
            problems=self.node.problems,
        )
        if self.scan is not None:
            result["scan"] = {
                "seconds": self.scan.seconds,
                "processes": self.scan.processes,
                "deep": self.scan.deep,
            }
        return result

    def release(self, rung: dict[str, Any]) -> dict[str, Any]:
        """Climb one rung, when no other run is at work on this target.

        :param rung: ``name``, ``select``, ``signal`` and ``wait`` (seconds).
        """
        turn = turns.Turn(self.target.vmid)
        try:
            waited = turn.take(float(rung["wait"]) + self.target.smi_timeout)
            if waited is None:
                return self.result(verdict.busy(self.target, self.name_of(turn.owner())))
            if waited > 0:
                # What was asked before the turn may be about a world that is gone.
                self.session.drop_answers()
                self.session.ask(*nvidia_smi.FIRST_QUESTIONS)
            return self.climb(rung, turn)
        finally:
            turn.end()

    def name_of(self, pid: int) -> str:
        """A process in words, ``""`` for 0."""
        who = holders.Holder(pid)
        if pid and self.node.identify(who):
            return verdict.short(who)
        return "process %d, which has ended" % pid if pid else ""

    def climb(self, rung: dict[str, Any], turn: turns.Turn) -> dict[str, Any]:
        """Choose, signal, and wait until clean or until waiting is pointless."""
        result = self.state()
        if result["verdict"] != verdict.HELD:
            return self.settle(result, float(rung["wait"]))
        if self.returned(restarts.MOST):
            return dict(result, settled=True)
        strangers = self.strangers(self.view)
        if strangers and not self.earlier:
            return dict(result, settled=True, refused=refusal(strangers))
        due = [each for each in self.choose(rung["select"], self.view) if each not in strangers]
        told = {each.pid: turn.told_at(each, rung["signal"]) for each in due}
        chosen = [each for each in due if not told[each.pid]]
        if not chosen:
            return self.wait_on(result, due, max(told.values(), default=0), rung)
        ending = [each for each in due if 0 <= age_of(told[each.pid]) <= float(rung["wait"])]
        supervised = self.supervised(chosen + ending)
        end_if_nobody_listens()
        # What was asked before the signal proves nothing.
        self.session.drop_answers()
        if not self.all_zero():
            self.start_loop()
        grips = self.signal_all(chosen, rung) + signals.grips_on(ending)
        turn.remember(self.actions)
        self.wait(grips, rung, supervised)
        return dict(self.outcome(supervised), before=result["gpus"])

    def wait_on(
        self, result: dict[str, Any], told: list[holders.Holder], at: int, rung: dict[str, Any]
    ) -> dict[str, Any]:
        """Wait for whom a run has told that was broken off: they have no less time to end for it.

        :param result: what :meth:`state` found.
        :param at: when the last of them was told, in clock ticks since boot.
        """
        age = age_of(at)
        if not told or not 0 <= age <= float(rung["wait"]):
            return result
        self.session.drop_answers()
        self.first_signal = time.monotonic() - age
        supervised = self.supervised(told)
        self.wait(signals.grips_on(told), rung, supervised)
        self.timings = {}  # This run has signalled nobody.
        return self.outcome(supervised, at)

    def verify(self) -> dict[str, Any]:
        """The state; clean only if who was signalled before, and has ended since, stays away.

        Who has been sent SIGKILL, by an earlier run or by anybody, is given the same time to end.
        """
        result = self.state()
        killed = self.being_killed()
        if killed:
            until = time.monotonic() + UNKILLABLE_AFTER
            while killed and time.monotonic() < until:
                time.sleep(LONGEST_PAUSE)
                killed &= self.being_killed()
            self.session.drop_answers()
            self.session.ask(*nvidia_smi.FIRST_QUESTIONS)
            result = self.state()
            self.name_stuck(killed & self.being_killed())
        return self.result() if self.view.stuck else self.settle(result, 0.0)

    def being_killed(self) -> set[int]:
        """Those this run is about that have been sent SIGKILL and have not ended."""
        concerned = self.concerned(self.view.mine + self.out_of_sight())
        return {holder.pid for holder in concerned if signals.is_being_killed(holder)}

    def out_of_sight(self) -> list[holders.Holder]:
        """Those of mine that were seen before, and hold nothing now: they have ended, or hang.

        One that hangs while it ends has nothing open any more, and none of it is free before it
        has ended (the kernel closes all files first, and lets go of them afterwards).
        """
        there = {holder.pid for holder in self.view.mine}
        there |= {holder.pid for holder, _ in self.view.spared}
        return [holder for pid, holder in self.seen.items() if pid not in there]

    def settle(self, result: dict[str, Any], patience: float) -> dict[str, Any]:
        """Watch as after a signal: somebody signalled at an earlier rung may have ended since.

        :param result: what :meth:`state` found.
        """
        word = result["verdict"]
        ended = word == verdict.CLEAN or (word == verdict.UNKNOWN and self.is_listed_still())
        if not ended or not anybody_signalled(self.earlier):
            return result
        self.session.drop_answers()
        self.first_signal = time.monotonic()
        supervised = self.supervised([])
        self.wait([], {"signal": "", "wait": patience}, supervised)
        self.timings = {}  # They are about signals, and there was none.
        return self.outcome(supervised)

    def supervised(self, chosen: list[holders.Holder]) -> list[holders.Holder]:
        """Those of these, and of whom an earlier rung has signalled, that somebody may restart.

        Nobody has asked about the latter while another still held on.
        """
        ended = chosen + [
            restarts.remembered(each) for each in self.earlier if each["result"] == "sent"
        ]
        return [each for each in ended if restarts.supervised(each, ended)]

    def outcome(self, supervised: list[holders.Holder], at: int | None = None) -> dict[str, Any]:
        """The result; not clean where one of these is gone, and being started again.

        :param at: when another run has signalled them, in clock ticks since boot.
        """
        judged = self.judge()
        done = self.earlier + self.actions
        told = {each["node_pid"]: each["at"] for each in done if each["result"] == "sent"}
        if at is not None:
            told = dict({holder.pid: at for holder in supervised}, **told)
        found = None
        if told and judged.word == verdict.CLEAN:
            found = restarts.pending(supervised, told)
        if found is None:
            return self.result(judged)
        holder, by = found
        judged = verdict.restarting(holder, by, restarts.supervisor(holder)[1])
        return dict(self.result(judged), restarting=True)

    def plan(self, rung: dict[str, Any]) -> dict[str, Any]:
        """Whom this rung would signal, if those that the rungs before would have ended are gone."""
        result = self.state()
        if result["verdict"] != verdict.HELD:
            return result
        strangers = self.strangers(self.view)
        if strangers:
            return dict(result, settled=True, refused=refusal(strangers))
        done = {each["node_pid"] for each in self.earlier}
        left = [holder for holder in self.concerned(self.view.mine) if holder.pid not in done]
        chosen = [holder for holder in self.choose(rung["select"], self.view) if holder in left]
        return dict(
            result,
            actions=[action(holder, rung, "would be sent") for holder in chosen],
            changed=bool(chosen),
            settled=len(chosen) == len(left),
            plan=[verdict.plan_entry(holder) for holder in self.concerned(self.view.mine)],
        )

    def strangers(self, view: verdict.View) -> list[holders.Holder]:
        """Those that the plan, if there is one, does not know as they are now."""
        plan = self.target.plan
        if plan is None:
            return []
        return [each for each in self.concerned(view.mine) if verdict.plan_entry(each) not in plan]

    def choose(self, select: str, view: verdict.View) -> list[holders.Holder]:
        """The holders that a rung is about, out of those in scope and not protected."""
        dirty = {gpu.minor for gpu in self.wanted() if not self.target.is_zero(gpu)}
        return [holder for holder in self.concerned(view.mine) if SELECTIONS[select](holder, dirty)]

    def concerned(self, mine: list[holders.Holder]) -> list[holders.Holder]:
        """Those of these that hold a GPU this run is about, or none but the control nodes."""
        asked = {gpu.minor for gpu in self.wanted()}
        return [holder for holder in mine if self.target.is_about_all or holder.gpus & asked]

    def signal_all(self, chosen: list[holders.Holder], rung: dict[str, Any]) -> list[signals.Grip]:
        """Signal each of these that is still the same process, and would still be chosen.

        All is read again while the handles are open: a number may have passed to another process
        in the middle of the look, which then mixed the evidence of one with the name of the other.
        """
        if rung["signal"] == "quit":
            return self.quit_mps(chosen, rung)
        grips = signals.grips_on(chosen)
        now = holders.scan(
            self.node.devices,
            deep=True,
            pids=[grip.pid for grip in grips],
            stoppers=self.node.stoppers,
        )
        for holder in chosen:
            self.recognise(holder, now)
        view = self.sort(now)
        strangers = self.strangers(view)
        due = {each.pid for each in self.choose(rung["select"], view) if each not in strangers}
        sent = []
        self.first_signal = time.monotonic()
        for holder, grip in zip(chosen, grips):
            if grip.pid in due:
                outcome = grip.send(rung["signal"])
            elif grip.pid in now.holders:
                outcome = "changed"
            elif grip.ended():
                outcome = "gone"
            else:
                outcome = "unreadable" if grip.pid in now.skipped else "let go"
            self.actions.append(action(holder, rung, outcome))
            if outcome == "sent":
                sent.append(grip)
            else:
                grip.close()
        return sent

    def recognise(self, holder: holders.Holder, now: holders.Scan) -> None:
        """Who it is now, in this later look; what is not the same process is taken out of it."""
        there = now.holders.get(holder.pid)
        if there is None:
            return
        if not self.node.identify(there) or there.start != holder.start:
            del now.holders[holder.pid]
            return
        # The driver is not asked again: where it listed the process, and the device is still held.
        for device, how in holder.evidence.items():
            if "driver list" in how and device in there.evidence:
                there.evidence[device].add("driver list")
        there.used_mib = {
            minor: mib for minor, mib in holder.used_mib.items() if minor in there.gpus
        }

    def quit_mps(self, chosen: list[holders.Holder], rung: dict[str, Any]) -> list[signals.Grip]:
        """Tell the MPS daemons of these to quit, each once."""
        grips = signals.grips_on(chosen)
        self.first_signal = time.monotonic()
        home = self.node.home(self.target)
        # All are looked at before any is told: with the daemon its server goes.
        directories = [holders.mps_directory(holder.pid) for holder in chosen]
        whys = [
            self.why_not_quit(holder, grip, home, directory)
            for holder, grip, directory in zip(chosen, grips, directories)
        ]
        told: dict[str, str] = {}
        for holder, why, directory in zip(chosen, whys, directories):
            if not why and directory not in told:
                told[directory] = self.session.quit_mps(directory)
            self.actions.append(action(holder, rung, why or told[directory]))
        return grips

    def why_not_quit(
        self, holder: holders.Holder, grip: signals.Grip, home: int | None, directory: str
    ) -> str:
        """Why the MPS daemon of this one is not told to quit on its behalf, or ``""``.

        :param directory: where it says that its pipes are.
        """
        if not grip.same() or self.node.why_not(self.target, holder, home):
            return "changed"
        vmid = self.target.vmid
        # What is told is told by a process that sees what the container's PID 1 does.
        writer = owners.container_init(vmid) if vmid else os.getpid()
        near = writer and directory and holder.namespaces[:1] == [home]
        if near and holders.mps_within_reach(holder, directory, writer):
            return ""
        return "out of reach"

    def wait(
        self, grips: list[signals.Grip], rung: dict[str, Any], supervised: list[holders.Holder]
    ) -> None:
        """Read until two zeros with everybody gone, or until more waiting cannot help.

        :param supervised: those that somebody may restart; where there are any it must stay so.
        """
        watch = restarts.WATCH if supervised else 0.0
        killed, patience = rung["signal"] == "KILL", float(rung["wait"])
        began = self.first_signal
        pause, proof = Pause(began), Proof()
        while True:
            end_if_nobody_listens()
            if not self.loop:
                self.session.ask("gpus")
            # Who was killed is waited for in any case: it ends, or it is unkillable.
            awaited = grips if killed or time.monotonic() - began <= patience else []
            alive = [grip for grip in awaited if not grip.ended()]
            if proof.zeros and not alive and not proof.looked:
                self.look()
                proof.looked = True
            news = self.read()
            alive = [grip for grip in alive if not grip.ended()]
            elapsed = time.monotonic() - began
            if self.problem():
                break
            # Memory that is not told counts as zero at once; whoever is alive has some.
            untold = bool(alive) and self.target.holders_only
            proof.note(self.all_zero() and not untold, bool(alive), elapsed)
            if news and (proof.zeros or elapsed > NO_PAUSE_BEFORE):
                self.end_loop()
            if proof.zeros in (1, 2):
                self.timings["second_zero" if proof.zeros == 2 else "zero"] = elapsed
            if proof.complete():
                lasts = elapsed - proof.quiet >= max(watch, self.unseen_release())
                if lasts or self.concerned(self.view.mine):
                    break
                proof.looked = False
                time.sleep(LONGEST_PAUSE)
            stuck = alive if killed and elapsed > UNKILLABLE_AFTER else []
            # The end of a proof that has begun is waited for, too.
            due = proof.zeros or (killed and alive)
            if stuck or (elapsed > patience and not due):
                self.look()
                self.name_stuck({grip.pid for grip in stuck if not grip.ended()})
                break
            if not alive and not proof.zeros and pause.time_to_look():
                self.look()
                if all(self.target.is_zero(gpu) or self.explained(gpu) for gpu in self.wanted()):
                    break  # Somebody else owns what is left: the next rung's matter, or foreign.
            if not proof.zeros and not self.loop:
                pause.between_readings()
        for grip in grips:
            grip.close()

    def name_stuck(self, pids: set[int]) -> None:
        """Record what those that outlived SIGKILL wait for; they still hold what they did."""
        self.view.mine += [holder for holder in self.out_of_sight() if holder.pid in pids]
        for holder in self.view.mine:
            if holder.pid in pids:
                self.view.stuck[holder.pid] = signals.why_stuck(holder.pid)


class Proof:
    """How far the proof of zero has come: two readings in a row, and a look since the first."""

    def __init__(self) -> None:
        self.zeros = 0
        self.looked = False
        # Seconds after the signal from which on it was zero, with nobody left to wait for.
        self.quiet = NEVER

    def note(self, zero: bool, alive: bool, elapsed: float) -> None:
        """A reading was taken: was it zero, and is anybody still waited for?"""
        self.zeros = self.zeros + 1 if zero else 0
        self.looked = self.looked and zero
        self.quiet = NEVER if alive or not zero else min(self.quiet, elapsed)

    def complete(self) -> bool:
        """Is it there, but for how long it has to stay so?"""
        return self.zeros >= 2 and self.looked and self.quiet < NEVER


class Pause:
    """How long to wait between readings and between looks: short at first, then longer."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.next_look = began
        self.patience = FIRST_LOOK_AFTER

    def time_to_look(self) -> bool:
        """Is a look for new holders due? The first at once, then ever more rarely."""
        if time.monotonic() < self.next_look:
            return False
        self.next_look = time.monotonic() + self.patience
        self.patience *= 2
        return True

    def between_readings(self) -> None:
        """None at first, nvidia-smi takes its time itself; later a twentieth of what was waited."""
        waited = time.monotonic() - self.began
        if waited > NO_PAUSE_BEFORE:
            time.sleep(min(LONGEST_PAUSE, waited / 20))


# What a rung is about: holder and the minor numbers of the GPUs that are not zero.
SELECTIONS: dict[str, Callable[[holders.Holder, set[int | None]], bool]] = {
    "mps": lambda holder, dirty: holder.is_mps,
    # The service itself is told to quit first and killed last: its clients depend on it.
    "workloads": lambda holder, dirty: (
        holder.is_workload and not holder.escaped and not holder.is_mps
    ),
    "dirty_gpus": lambda holder, dirty: (
        bool(holder.gpus & dirty) and not holder.escaped and not holder.is_mps
    ),
    "devices": lambda holder, dirty: not holder.escaped,
    "escaped": lambda holder, dirty: holder.escaped,
}


def refusal(strangers: list[holders.Holder]) -> str:
    """Why nobody is signalled although there is a plan."""
    named = "; ".join(verdict.short(each) for each in strangers[:3])
    return "not in the plan, or changed since: %s; make a new plan" % named


def action(holder: holders.Holder, rung: dict[str, Any], outcome: str) -> dict[str, Any]:
    """What was done to whom and when (clock ticks since boot), for the record."""
    # Of one that has left its control group it says nothing.
    nearest = None if holder.escaped else owners.innermost(holder.cgroup or "")
    return dict(
        holder.as_dict(),
        restarted_by=nearest.evidence if nearest else "",
        rung=rung["name"],
        signal=rung["signal"],
        result=outcome,
        at=holders.ticks_since_boot(),
    )


def age_of(at: int) -> float:
    """The seconds since then, which is in clock ticks since boot."""
    return (holders.ticks_since_boot() - at) / os.sysconf("SC_CLK_TCK")


def anybody_signalled(actions: list[dict[str, Any]]) -> bool:
    """Is there a signal among these that was really sent?"""
    return any(each["result"] == "sent" for each in actions)


def end_if_nobody_listens() -> None:
    """End at once when the controller is gone: what it began, its next run looks at anew."""
    if deadline.is_broken(STDOUT):
        os._exit(1)


def bare_result(name: str, judged: verdict.Verdict) -> dict[str, Any]:
    """A result with a verdict and nothing else known yet.

    ``settled``: nothing left for a further rung, be it clean, hopeless, or nobody there to signal.
    ``restarting``: clean at the moment, but what was ended is being started again.
    ``waiting``: it may become clean by itself; the driver is still releasing, or a server ending.
    """
    return {
        "name": name,
        "verdict": judged.word,
        "reason": judged.reason,
        "remedy": judged.remedy,
        "changed": False,
        "settled": True,
        "waiting": False,
        "gpus": [],
        "holders": [],
        "spared": [],
        "stuck": {},
        "actions": [],
        "plan": [],
        "refused": "",
        "restarting": False,
        "timings": {},
        "done": 0.0,
        "problems": [],
    }
