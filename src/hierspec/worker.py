"""One thread that runs a model for everybody: jobs come from any thread, share forward passes, and end with a result.

`AsyncLanguageModel` and the server run on it. Callers never wait inside a pass: they submit a job and are told, in the
worker's thread, what was written and how it ended.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from hierspec.core.engine import Engine, failure_of
from hierspec.core.errors import Busy, HierspecError, OutOfMemory
from hierspec.core.request import Step
from hierspec.core.room import room_at_most, room_likely
from hierspec.core.sampling import Sampling
from hierspec.fair_queue import FairQueue
from hierspec.generation import Failure, Generation, TextStep, Writer
from hierspec.language_model import LanguageModel
from hierspec.options import PlanLike

Event = TextStep | Generation | Failure  # any number of steps, then one of the other two
Listener = Callable[[Event], None]  # called in the worker's thread: it must be quick, and its errors are not shown


@dataclass(eq=False)
class Job:
    """A prompt to be answered, and who is told about it."""

    ids: list[int]
    plan: PlanLike
    sampling: Sampling
    listener: Listener
    namespace: str = ""
    submitted: float = field(default_factory=time.perf_counter)
    writer: Writer | None = None  # once it runs
    began: float = 0.0  # when it stopped waiting and began to run, on the clock of `submitted`
    cancelled: bool = False

    def cancel(self) -> None:
        """Stop before the next pass. It ends with what was written so far."""
        self.cancelled = True


class Observer(Protocol):
    """Counts what a worker does. Called in the worker's thread: it must be quick, and its errors are not shown."""

    def on_submit(self, job: Job) -> None:
        """The worker has taken the job in. Some end without any step."""

    def on_first(self, job: Job) -> None:
        """Its first step was written; `on_step` of that step comes next."""

    def on_step(self, job: Job, step: TextStep) -> None: ...

    def on_end(self, job: Job, result: Generation | Failure) -> None: ...


class Worker:
    """Owns the passes of one model. Closing it finishes the submitted jobs first, or cancels them.

    At most `most_running` jobs share passes, and no more than the KV cache has room for; the others wait, and
    namespaces take turns. If `most_waiting` already wait, a job is refused.
    """

    def __init__(
        self,
        model: LanguageModel,
        observer: Observer | None = None,
        most_running: int = 64,
        most_waiting: int = 256,
    ) -> None:
        self.model, self.observer = model, observer
        self.most_running, self.most_waiting = most_running, most_waiting
        self._engine = Engine(serving=True)
        self._news = threading.Condition()  # guards the three below; notified when one of them changes
        self._arrived: list[Job] = []
        self._closing = False
        self._cancels = False  # whether closing cancels the submitted jobs
        self._line: FairQueue[Job] = FairQueue()
        self._next: Job | None = None  # taken from the line: it runs as soon as there is room
        self._running: list[Job] = []
        self._thread = threading.Thread(target=self._run, name="hierspec worker", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Jobs that take part in passes."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs that wait until they may run."""
        return len(self._arrived) + len(self._line) + (self._next is not None)

    def submit(self, job: Job) -> None:
        with self._news:
            if self._closing:
                raise HierspecError("The model is being closed and takes no more prompts; open it again.")
            if self.waiting >= self.most_waiting:
                raise Busy(f"{self.waiting} prompts wait already, which is the most that may; try again later.")
            self._arrived.append(job)
            self._news.notify()

    def close(self, finish: bool = True) -> None:
        """Take no more jobs, finish the submitted ones (or cancel them), and end the thread."""
        with self._news:
            self._closing = True
            self._cancels = self._cancels or not finish
            self._news.notify()
        self._thread.join()

    def _run(self) -> None:
        while self._take_in():
            self._let_in()
            if self._running:
                self._round()

    def _take_in(self) -> bool:
        """Move new jobs into the line; wait for one if there is nothing to do. Returns False once all is done."""
        with self._news:
            while not (self._arrived or self._line or self._next or self._running or self._closing):
                self._news.wait()
            arrived, self._arrived = self._arrived, []
            for job in arrived:
                self._line.put(job.namespace, job)
        for job in arrived:
            self._notify("on_submit", job)
        return bool(self._line or self._next or self._running)

    def _let_in(self) -> None:
        """Begin the jobs that may run now. Those that were cancelled while they waited end at once."""
        if self._cancels:
            for job in self._running:
                job.cancel()
        for job in self._line.take_where(lambda job: job.cancelled or self._cancels):
            job.cancel()
            if self._prepare(job):
                self._begin(job)
        while self._next is not None or self._line:
            if self._next is None:
                job = self._line.take()
                if not self._prepare(job):
                    continue
                self._next = job
            if not self._may_run(self._next):
                return
            job, self._next = self._next, None
            self._begin(job)

    def _prepare(self, job: Job) -> bool:
        """Make the job's request. Returns whether it can ever run; if not, the job has ended."""
        try:
            request = self.model.request(job.ids, job.plan, job.sampling, namespace=job.namespace)
            job.writer = Writer(request, self.model.tokenizer)
            if room_at_most(request) > 1:
                with self.model.turn():
                    request.cancel()
                raise OutOfMemory(
                    f"The prompt's {len(request.prompt)} tokens and {request.limit} new ones do not fit into the KV "
                    "cache; shorten the prompt, lower max_tokens, or raise --kv-memory."
                )
        except Exception as error:  # whatever it is, the others go on
            self._end(job, Failure(failure_of("The request", error)))
            return False
        return True

    def _may_run(self, job: Job) -> bool:
        """Whether the job may join the running ones: there must be a place, and likely room in the KV cache."""
        if self._cancels:
            job.cancel()
        if job.cancelled or not self._running:
            return True
        if len(self._running) >= self.most_running:
            return False
        requests = [each.writer.request for each in (*self._running, job) if each.writer is not None]
        return sum(room_likely(request) for request in requests) <= 1

    def _begin(self, job: Job) -> None:
        assert job.writer is not None
        job.began = time.perf_counter()
        self._engine.submit(job.writer.request)
        self._running.append(job)

    def _round(self) -> None:
        """Run one round of the engine, and tell listeners what it wrote."""
        by_request = {id(job.writer.request): job for job in self._running if job.writer is not None}
        with self.model.turn():
            for job in self._running:
                if job.cancelled and job.writer is not None:
                    job.writer.request.cancel()
            written = [(by_request[id(request)], step) for request, step in self._engine.step()]
        for job, step in written:
            self._add(job, step)
        for job in [job for job in self._running if job.writer is not None and job.writer.request.ended is not None]:
            assert job.writer is not None
            self._running.remove(job)
            self._end(job, job.writer.result())

    def _add(self, job: Job, step: Step) -> None:
        writer = job.writer
        assert writer is not None
        first = not writer.seconds
        try:
            text_step = writer.add(step)
        except Exception as error:  # its tokens cannot be decoded: the others go on
            with self.model.turn():
                writer.request.fail(failure_of("The request", error))
            return
        if first:
            self._notify("on_first", job)
        self._notify("on_step", job, text_step)
        self._tell(job, text_step)

    def _end(self, job: Job, result: Generation | Failure) -> None:
        self._notify("on_end", job, result)
        self._tell(job, result)

    def _notify(self, method: str, *arguments: object) -> None:
        """Tell the observer. Its errors must not end a job."""
        if self.observer is not None:
            with suppress(Exception):
                getattr(self.observer, method)(*arguments)

    @staticmethod
    def _tell(job: Job, event: Event) -> None:
        try:
            job.listener(event)
        except Exception:  # its event loop may be closed: nobody listens any more
            job.cancel()
